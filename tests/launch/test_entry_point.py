"""The command of a node, started by a shell, a pod or a container, trains or reports in one line why it cannot."""

from __future__ import annotations

import functools
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import patience
import pytest
from clocks import set_clock
from launched import losses, newest, record, wait_for
from ports import free_port
from tiers import cases
from tiny import text_file

from shardtrain.launch import failure

ROOT = Path(__file__).parents[2]
TIMEOUT = 120

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the loopback interface is called lo"
)


def options(folder: Path, steps: int, **more: object) -> list[str]:
    values = {
        "job.dump_folder": folder, "training.dataset": "text", "training.dataset_path": text_file(),
        "training.seq_len": 32, "training.local_batch_size": 1, "training.steps": steps, "training.device": "cpu",
        "model.overrides.num_layers": 1, "lr_scheduler.warmup_steps": 1, "metrics.log_freq": 1, **more,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items()]


def bare(folder: Path, **names: str) -> dict[str, str]:
    """Return an environment like that of ``env -i``, with a Python environment that contains the package."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    variables = {
        "PATH": "/usr/bin:/bin",
        "VIRTUAL_ENV": str(folder / "venv"),
        "PYTHONPATH": str(ROOT),
    }
    return {**variables, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **names}


def start(
    command: list[str], names: dict[str, str], kind: type[subprocess.Popen] = subprocess.Popen
) -> subprocess.Popen:
    return kind(command, env=names, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Return the exit status and stderr of each process, and fail if one exceeds the time limit."""
    try:
        outputs = [
            process.communicate(timeout=patience.seconds(TIMEOUT))[1] for process in processes
        ]
        return [
            (process.returncode, stderr) for process, stderr in zip(processes, outputs, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()


def node(
    number: int, port: int, arguments: list[str], folder: Path, clock: float = 0, **names: str
) -> subprocess.Popen[str]:
    """One of two shells: ``shardtrain train --nnodes 2 --node_rank K --rdzv_endpoint 127.0.0.1:PORT --nproc 1``.

    The clock of the node is ``clock`` seconds ahead.
    """
    place = [
        "--nnodes",
        "2",
        "--node_rank",
        str(number),
        "--rdzv_endpoint",
        f"127.0.0.1:{port}",
        "--nproc",
        "1",
    ]
    environment = bare(folder, SHARDTRAIN_LOCAL_ADDR="127.0.0.1", **names)
    command = [sys.executable, "-m", "shardtrain", "train", *place, *arguments]
    shift = functools.partial(set_clock, setattr, clock) if clock else None
    return forked.Popen(
        command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=shift
    )


def errors(stderr: str) -> list[str]:
    assert "Traceback" not in stderr, stderr
    return [line for line in stderr.splitlines() if line.startswith("error[")]


def test_the_script_trains_with_two_ranks_in_an_empty_environment(tmp_path):
    names = bare(tmp_path, NGPU="2", LOG_RANK="0,1")
    command = [str(ROOT / "run_llama_train.sh"), *options(tmp_path / "run", 5)]
    [(code, stderr)] = ended(start(command, names))

    assert code == 0, stderr
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
    assert "training with 2 processes" in stderr
    for rank in (0, 1):
        assert "done: 5 steps" in (tmp_path / f"run/logs/rank-{rank}.log").read_text()
        assert f"[rank{rank}]" in stderr, "the terminal shows both ranks of LOG_RANK"


@pytest.mark.nightly(
    "through the script",
    by="tests/launch/test_requests_to_stop.py::test_a_stop_request_in_any_phase_saves_and_loses_no_step",
)
def test_a_signal_to_the_script_reaches_the_ranks_which_save(tmp_path):
    more = {"checkpoint.enable": "true", "training.on_data_end": "repeat"}
    process = start(
        [str(ROOT / "run_train.sh"), *options(tmp_path / "run", 100_000, **more)],
        bare(tmp_path, NGPU="2"),
    )
    try:
        wait_for(
            lambda: (tmp_path / "run/metrics.jsonl").exists() and len(losses(tmp_path / "run")) > 1
        )
        process.send_signal(signal.SIGTERM)
    finally:
        [(code, stderr)] = ended(process)

    assert code == 75, stderr
    assert newest(tmp_path / "run") > 0
    assert record(tmp_path / "run")["code"] == 75


# kind of start -> options and variables, for a run on a single node
STARTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "forked ranks": (["--nproc", "2"], {}),
    "one process": (["--nproc", "1"], {}),
    "a node": (["--nnodes", "1", "--node_rank", "0", "--rdzv_endpoint", "127.0.0.1:PORT", "--nproc", "2"], {}),
    "a rank of another launcher": (
        [],
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": "PORT"},
    ),
    "a command of our script": (["--nproc", "2"], {failure.SUPERVISED: "1"}),
}  # fmt: skip


@pytest.mark.parametrize(
    "how", cases(["forked ranks"], nightly=[how for how in STARTS if how != "forked ranks"])
)
def test_the_status_of_a_stopped_run_is_the_configured_one(tmp_path, how):
    arguments, names = STARTS[how]
    port = str(free_port())
    arguments = [argument.replace("PORT", port) for argument in arguments]
    names = {name: value.replace("PORT", port) for name, value in names.items()}
    more = {
        "checkpoint.enable": "true",
        "checkpoint.stop_exit_code": 3,
        "training.on_data_end": "repeat",
    }
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "shardtrain", "train", *arguments]
    command += options(folder, 100_000, **more)
    environment = bare(tmp_path, SHARDTRAIN_LOCAL_ADDR="127.0.0.1", **names)
    process = start(command, environment, forked.Popen)
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) > 1)
        process.send_signal(signal.SIGTERM)
    finally:
        [(code, stderr)] = ended(process)

    assert code == (75 if failure.SUPERVISED in names else 3), stderr
    assert "stopped[75]" in stderr
    assert record(tmp_path / "run")["code"] == 75
    assert newest(tmp_path / "run") > 0


@pytest.mark.nightly(
    "two hosts meet",
    by="tests/launch/test_ssh.py::test_two_hosts_train_one_run_stop_saved_at_ctrl_c_and_continue",
)
@pytest.mark.slow
@pytest.mark.parametrize("first", cases([1], nightly=[0]))
def test_a_node_waits_for_a_later_one_and_each_rank_has_its_log(tmp_path, first):
    port = free_port()
    arguments = options(tmp_path / "run", 2)
    early = node(first, port, arguments, tmp_path)

    assert early.stderr is not None
    assert "meeting at" in early.stderr.readline()

    time.sleep(2)  # it is waiting for the other node by now
    assert early.poll() is None

    late = node(1 - first, port, arguments, tmp_path)
    for code, stderr in ended(early, late):
        assert code == 0, stderr
    assert list(losses(tmp_path / "run")) == [1, 2]
    assert sorted(path.name for path in (tmp_path / "run/logs").glob("*.log")) == [
        "rank-0.log",
        "rank-1.log",
    ]


@pytest.mark.nightly(
    "each node starts an interpreter per rank",
    by="tests/launch/test_meeting.py::test_nodes_with_any_clocks_meet_in_one_world_and_the_difference_is_named",
)
@pytest.mark.parametrize("ahead", [-20, 60])
def test_two_nodes_with_different_clocks_train_one_run_and_end(tmp_path, ahead):
    port = free_port()
    arguments = options(tmp_path / "run", 2)
    pair = [node(0, port, arguments, tmp_path), node(1, port, arguments, tmp_path, ahead)]
    results = ended(*pair)

    assert [code for code, _ in results] == [0, 0], results
    assert list(losses(tmp_path / "run")) == [1, 2]

    start_line = json.loads((tmp_path / "run/goodput.jsonl").read_text().splitlines()[0])
    assert start_line["world_size"] == 2
    assert sum("the clock of node 1 (127.0.0.1) is" in stderr for _, stderr in results) == 1


@pytest.mark.parametrize("number", cases([1], nightly=[0]))
def test_a_node_that_never_comes_is_reported_in_one_line(tmp_path, number):
    port = free_port()
    [(code, stderr)] = ended(
        node(number, port, options(tmp_path / "run", 2), tmp_path, RDZV_TIMEOUT="2")
    )
    [line] = errors(stderr)

    assert code == 6
    assert line.startswith("error[6]")
    assert f"127.0.0.1:{port}" in line
    assert "2 s" in line
    assert ("2 nodes" if number == 0 else "first node") in line


@pytest.mark.slow
@pytest.mark.nightly("each node starts an interpreter per rank")
def test_two_nodes_with_two_configurations_do_not_train(tmp_path):
    port = free_port()
    folder = tmp_path / "run"
    first = node(0, port, options(folder, 2), tmp_path)
    second = node(1, port, options(folder, 2, **{"optimizer.lr": 0.5}), tmp_path)
    results = ended(first, second)

    assert [code for code, _ in results] == [2, 2], results

    lines = [line for _, stderr in results for line in errors(stderr)]
    assert lines, results
    for line in lines:
        assert "optimizer.lr=" in line
        assert "0.5 on rank 1" in line
    assert not (folder / "metrics.jsonl").exists()


def test_refused_ranks_replace_the_exit_file_of_an_earlier_attempt(tmp_path):
    """exit.json says retryable after the save for a joining node. If the larger run is refused, it must not."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/exit.json").write_text('{"code": 75, "retryable": true}')
    names = {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    arguments = options(tmp_path / "run", 2, **{"training.global_batch_size": 4})
    [(code, stderr)] = ended(
        start(
            [sys.executable, "-m", "shardtrain", "train", *arguments],
            bare(tmp_path, **names),
            forked.Popen,
        )
    )

    assert code == 2 and "training.global_batch_size=4" in stderr, stderr
    assert record(tmp_path / "run")["code"] == 2
    assert record(tmp_path / "run")["retryable"] is False


def test_stale_variables_of_another_launcher_are_ignored(tmp_path):
    stale = {"RANK": "1", "MASTER_ADDR": "gone.invalid", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "2",
            "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "8", "ROLE_RANK": "x"}  # fmt: skip
    salloc = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "8",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    names = bare(tmp_path, NGPU="1", **stale, **salloc)
    command = [sys.executable, "-m", "shardtrain", "train", *options(tmp_path / "run", 2)]
    [(code, stderr)] = ended(start(command, names, forked.Popen))

    assert code == 0, stderr
    assert list(losses(tmp_path / "run")) == [1, 2]


@pytest.mark.parametrize(
    "names",
    [
        {"TORCHELASTIC_RUN_ID": "x"},
        # Alibaba PAI
        {
            "WORLD_SIZE": "2",
            "RANK": "0",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "1",
            "NPROC_PER_NODE": "8",
        },
        {"PET_NNODES": "2"},
        {"PET_NODE_RANK": "1"},
        {"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "many"},
        {"NGPU": "two"},
        {"RUNAI_NUM_OF_GPUS": "1.5"},
        {"PET_NPROC_PER_NODE": "-1"},
        {"PET_NNODES": "2", "MASTER_ADDR": "a", "RDZV_TIMEOUT": "soon"},
    ],
)
def test_an_impossible_environment_is_one_line_without_importing_torch(tmp_path, names):
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "shardtrain",
        "train",
        *options(tmp_path / "run", 2),
    ]
    [(code, stderr)] = ended(start(command, bare(tmp_path, **names)))

    assert code == 2 and len(errors(stderr)) == 1, stderr
    assert "| torch\n" not in stderr
    assert not (tmp_path / "run").exists()
