"""The loss of a rank on one of two hosts is explained on both hosts, in ``exit.json`` and by the launcher."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import forked
import patience
import pytest
import sshd
from launched import newest, record, wait_for
from ports import free_port
from tiers import cases
from tiny import text_file

from shardtrain.config import load
from shardtrain.launch import failure, local
from shardtrain.launch.stop_request import ONE_REQUEST_SECONDS
from shardtrain.utils.errors import PeerError

ROOT = Path(__file__).parents[2]
HANG_SECONDS = max(4, round(patience.seconds(1)))

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2"),
    pytest.mark.slow,
]

# code in the rank, or a signal from outside -> exit code, class, part of the message
FAULTS: dict[str, tuple[int, str, str]] = {
    "os.kill(os.getpid(), 9)": (6, "", "was killed by signal 9"),
    "os._exit(41)": (41, "", "exited with status 41"),
    'raise MemoryError("no room")': (7, "MemoryError", "no room"),
    'raise ValueError("of my own")': (1, "ValueError", "of my own"),
    "SIGTERM": (75, "Preempted", "stopped by SIGTERM after step"),
    # Reported by the watchdog of its peers, or by its node, which kills it after twice comm.hang_timeout_seconds.
    "SIGSTOP": (6, "Hang|", r"sends no heartbeat|has not answered|was stopped \(by SIGSTOP"),
}
"""Fault of a rank -> exit status, and patterns of the class and the message in ``exit.json``."""
STARTS = ("train --nnodes 2", "launch ssh")
FIRST = ("train --nnodes 2", "os.kill(os.getpid(), 9)", 1)
ALL = [(how, fault, rank) for how in STARTS for fault in FAULTS for rank in (0, 1)]

SCHEDULE = """
import os, pathlib, time

def factor(step, total_steps, warmup_steps, min_lr_factor):
    folder = pathlib.Path(__file__).parent
    if os.environ.get("RANK") == "{rank}" and (folder / "run/checkpoint/step-2/manifest.json").exists():
        first = folder / "pid"
        if not first.exists():
            first.with_suffix(".new").write_text(str(os.getpid()))
            os.rename(first.with_suffix(".new"), first)
            {fault}
    return 1.0
"""


def options(folder: Path, hang_seconds: int) -> list[str]:
    values = {
        "job.dump_folder": folder / "run", "training.dataset": "text", "training.dataset_path": text_file(),
        "training.device": "cpu", "training.seq_len": 32, "training.local_batch_size": 1, "training.steps": 100_000,
        "training.on_data_end": "repeat", "model.overrides.num_layers": 1, "lr_scheduler.warmup_steps": 1,
        "lr_scheduler.name": folder / "faulty.py", "checkpoint.enable": "true", "checkpoint.interval": 2,
        "metrics.log_freq": 5, "comm.hang_timeout_seconds": hang_seconds,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items()]


@contextlib.contextmanager
def started(
    how: str,
    folder: Path,
    *more: str,
    limits: Mapping[int, tuple[int, int]] | None = None,
    hang_seconds: int = HANG_SECONDS,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a run on two loopback hosts: with one agent each, or with one launcher that uses ssh.

    ``limits`` maps the number of a host to a resource and its limit.
    """

    def set_limit(number: int) -> None:
        if limits and number in limits:
            name, value = limits[number]
            resource.setrlimit(name, (value, value))

    names = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "XDG_STATE_HOME": str(folder),
    }
    prefix = [sys.executable, "-m", "shardtrain"]
    with contextlib.ExitStack() as stack:
        if how == "launch ssh":
            if sshd.missing():
                pytest.skip(sshd.missing())
            config = stack.enter_context(
                sshd.server(folder / "sshd", {"host-a": "127.0.0.1", "host-b": "127.0.0.2"})
            )
            place = [f"--launch.ssh.config_file={config}", f"--launch.ssh.rendezvous_port={free_port()}",
                     f"--launch.python={sys.executable}", f"--launch.workdir={ROOT}",
                     "--launch.env.OMP_NUM_THREADS=1"]  # fmt: skip
            commands = [[*prefix, "launch", "ssh", "--hosts", "host-a,host-b", *place]]
        else:
            names["SHARDTRAIN_LOCAL_ADDR"] = "127.0.0.1"
            port = free_port()
            commands = [
                [
                    *prefix,
                    "train",
                    "--nnodes=2",
                    f"--node_rank={n}",
                    f"--rdzv_endpoint=127.0.0.1:{port}",
                ]
                for n in (0, 1)
            ]
        pipe = subprocess.PIPE
        hosts = [
            forked.Popen(
                [*command, "--nproc=1", *options(folder, hang_seconds), *more],
                env=names,
                cwd=ROOT,
                stderr=pipe,
                text=True,
                preexec_fn=functools.partial(set_limit, number),
            )
            for number, command in enumerate(commands)
        ]
        try:
            yield hosts
        finally:
            for host in hosts:
                host.kill()


def wait_for_a_rank(folder, hosts):
    """Wait until a rank has written its pid or a host has ended."""
    wait_for(lambda: (folder / "pid").exists() or any(host.poll() is not None for host in hosts))


@pytest.mark.parametrize(
    ("how", "fault", "rank"), cases([FIRST], nightly=[case for case in ALL if case != FIRST])
)
def test_each_fault_on_each_host_is_explained_on_both(tmp_path, how, fault, rank):
    is_signal = fault.startswith("SIG")
    code, kind, message = FAULTS[fault]
    schedule = SCHEDULE.format(rank=rank, fault="pass" if is_signal else fault)
    (tmp_path / "faulty.py").write_text(schedule)
    with started(how, tmp_path) as hosts:
        wait_for_a_rank(tmp_path, hosts)
        if is_signal:
            os.kill(int((tmp_path / "pid").read_text()), getattr(signal, fault))
        outputs = [host.communicate(timeout=patience.seconds(90))[1] for host in hosts]

    assert [host.returncode for host in hosts] == [code] * len(hosts), outputs

    is_stop = code == 75
    for text in outputs:
        lines = [line for line in text.splitlines() if "error[" in line or "stopped[" in line]
        assert len(lines) == 1, text
        assert re.search(message, lines[0]), text
        assert "Traceback" not in text, text
        if not is_stop:
            assert f"rank {rank} (host " in lines[0]
            assert f"logs/rank-{rank}.log" in lines[0]

    end = record(tmp_path / "run")
    assert end["code"] == code
    assert re.fullmatch(kind, end["class"])
    assert re.search(message, end["message"])
    assert end["rank"] == (None if is_stop else rank)
    assert not is_stop or end["last_step"] == newest(tmp_path / "run")

    for number in (0, 1):
        json.loads((tmp_path / f"run/logs/node-{number}.json").read_text())


@pytest.mark.parametrize(
    ("victim", "storage"), cases([(0, "shared")], nightly=[(1, "shared"), (0, "first_node")])
)
def test_a_node_whose_agent_is_killed_is_named_by_the_other_one(tmp_path, victim, storage):
    """Ranks die with their agent. They must not save as for a request to stop, or the run would count as saved."""
    (tmp_path / "faulty.py").write_text(SCHEDULE.format(rank=victim, fault="pass"))
    with started("train --nnodes 2", tmp_path, f"--checkpoint.storage={storage}") as hosts:
        wait_for_a_rank(tmp_path, hosts)
        hosts[victim].kill()
        stderr = hosts[1 - victim].communicate(timeout=patience.seconds(90))[1]

        # The rank of the killed agent ends by itself. A zombie counts as ended.
        process = Path(f"/proc/{(tmp_path / 'pid').read_text()}")
        wait_for(lambda: not process.exists() or "(zombie)" in (process / "status").read_text())

    assert hosts[1 - victim].returncode == 6, stderr

    (line,) = [line for line in stderr.splitlines() if "error[" in line or "stopped[" in line]
    assert f"rank {victim} (host " in line
    assert "was lost with its node" in line
    assert f"logs/rank-{victim}.log" in line

    end = record(tmp_path / "run")
    assert (end["code"], end["rank"], end["retryable"]) == (6, victim, True)


@pytest.mark.nightly("two agents that start ranks")
@pytest.mark.parametrize("host", [0, 1])
def test_a_second_interrupt_of_one_host_ends_both_with_the_same_reason(tmp_path, host):
    (tmp_path / "faulty.py").write_text(SCHEDULE.format(rank=0, fault="time.sleep(600)"))
    with started("train --nnodes 2", tmp_path, hang_seconds=600) as hosts:
        wait_for_a_rank(tmp_path, hosts)
        hosts[host].send_signal(signal.SIGINT)
        time.sleep(2 * ONE_REQUEST_SECONDS)
        hosts[host].send_signal(signal.SIGINT)
        outputs = [process.communicate(timeout=patience.seconds(90))[1] for process in hosts]

    assert [process.returncode for process in hosts] == [76, 76], outputs
    for text in outputs:
        assert text.count("stopped[76]: stopped by a second SIGINT without saving") == 1, text
    assert record(tmp_path / "run")["code"] == 76


SIGNALS_AT_START = {
    "SIGINT": """
import os, signal, time
if os.environ.get("RANK") == "0" and os.environ.get("SHARDTRAIN_AGENT") == str(os.getppid()):
    os.kill(os.getppid(), signal.SIGINT)
    end = time.monotonic() + 600
    while signal.SIGINT not in signal.sigpending() and time.monotonic() < end:
        time.sleep(0.01)
""",
    "SIGTERM": """
import os, signal
if os.environ.get("RANK") == "1" and os.environ.get("SHARDTRAIN_AGENT") == str(os.getppid()):
    os.kill(os.getpid(), signal.SIGTERM)
""",
}
"""Module that Python imports at its start. Rank 0 interrupts its agent, and waits until the agent interrupts it, or
rank 1 signals itself."""


@pytest.mark.nightly("two agents that start ranks")
@pytest.mark.parametrize("name", SIGNALS_AT_START)
def test_a_signal_while_python_starts_ends_both_hosts_without_a_traceback(
    tmp_path, monkeypatch, name
):
    (tmp_path / "sitecustomize.py").write_text(SIGNALS_AT_START[name])
    (tmp_path / "faulty.py").write_text(SCHEDULE.format(rank=0, fault="pass"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with started("train --nnodes 2", tmp_path) as hosts:
        outputs = [host.communicate(timeout=patience.seconds(90))[1] for host in hosts]

    assert [host.returncode for host in hosts] == [75, 75], outputs
    for text in outputs:
        assert f"stopped[75]: stopped by {name} before the first step" in text
        assert "Traceback" not in text
    assert record(tmp_path / "run")["code"] == 75


LIMIT_TOO_SMALL = [(0, "NOFILE", 63), (1, "NOFILE", 63)]
MORE_LIMITS = [
    (node, *limit)
    for node in (0, 1)
    for limit in (("NPROC", 13), ("NPROC", 3), ("AS", 300 * 2**20))
]


@pytest.mark.parametrize(("refused", "name", "value"), cases(LIMIT_TOO_SMALL, nightly=MORE_LIMITS))
def test_a_limit_of_one_host_ends_both_and_both_name_it(tmp_path, refused, name, value):
    """The host with the limit may be unable to import PyTorch or to start a thread."""
    (tmp_path / "faulty.py").write_text(SCHEDULE.format(rank=0, fault="pass"))
    if name == "NPROC" and os.geteuid() == 0:
        pytest.skip("root has no limit on threads: run this as another user")
    limits = {refused: (getattr(resource, f"RLIMIT_{name}"), value)}
    with started("train --nnodes 2", tmp_path, limits=limits) as hosts:
        outputs = [host.communicate(timeout=patience.seconds(90))[1] for host in hosts]

    assert [host.returncode for host in hosts] == [7, 7], outputs

    flag = {"NOFILE": "n", "NPROC": "u", "AS": "v"}[name]
    message = rf"ulimit -{flag}=\S+( MiB)? must be at least .* for 1 rank on host {socket.gethostname()}, "
    for text in outputs:
        (line,) = [line for line in text.splitlines() if "error[" in line]
        assert re.search(rf"error\[7\]: {message}", line), text

    end = record(tmp_path / "run")
    assert (end["code"], end["rank"], end["retryable"]) == (7, None, False)
    assert re.match(message, end["message"])


# code in exit.json before the start, code that another node writes meanwhile -> final code
MEETINGS = {
    "new folder": (None, None, 6),
    "an earlier run was done": (0, None, 6),
    "another node has explained it": (0, 8, 8),
    "another node has explained it, in a new folder": (None, 8, 8),
}


@pytest.mark.parametrize("name", MEETINGS)
@pytest.mark.parametrize("node_of_pod", ["", "0", "1"])
def test_nodes_that_fail_to_meet_write_exit_json(tmp_path, monkeypatch, name, node_of_pod):
    before, meanwhile, code = MEETINGS[name]
    variables = {"RANK": node_of_pod, "WORLD_SIZE": "2" if node_of_pod else ""}
    for variable, value in variables.items():
        if value:
            monkeypatch.setenv(variable, value)
        else:
            monkeypatch.delenv(variable, raising=False)
    loaded = load(None, [f"--job.dump_folder={tmp_path}"], preset="debug")
    # A file of an earlier run may be replaced, and one that another node writes meanwhile may not.
    if before is not None:
        failure.write_exit(tmp_path, None, before)

    with pytest.raises(PeerError), local.lost_peers_in_exit_json(loaded):
        if meanwhile is not None:
            failure.write_exit(tmp_path, None, meanwhile)
        raise PeerError(
            "the meeting at node-a:29500 of 2 nodes did not complete within 600 s: 1 joined; check the others"
        )

    end = record(tmp_path)
    assert (end["code"], end["rank"]) == (code, None)
    if code == 6:
        assert "did not complete" in end["message"]
        assert end["retryable"]


@pytest.mark.nightly(
    "two hosts over ssh",
    by="tests/launch/test_ssh_machines.py::test_a_host_whose_ssh_session_is_killed_is_reported_within_10_s",
)
def test_a_cut_session_ends_the_launcher_with_the_status_in_exit_json(tmp_path):
    (tmp_path / "faulty.py").write_text(SCHEDULE.format(rank=1, fault="pass"))
    with started("launch ssh", tmp_path) as [launcher]:
        wait_for(lambda: (tmp_path / "pid").exists() or launcher.poll() is not None)

        # Kill the ssh process of the second host.
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        pids_of_host_b = []
        for pid in children:
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"host-b" in command_line.split(b"\0"):
                pids_of_host_b.append(int(pid))
        os.kill(pids_of_host_b[0], signal.SIGKILL)
        stderr = launcher.communicate(timeout=patience.seconds(90))[1]

    end = record(tmp_path / "run")
    assert launcher.returncode == end["code"] == 75, stderr
    assert "the connection to host host-b was lost" in stderr
    assert end["last_step"] == newest(tmp_path / "run")
    assert end["rank"] is None
