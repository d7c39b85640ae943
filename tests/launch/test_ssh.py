"""``launch ssh`` with a real sshd, where two loopback addresses are two hosts."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import patience
import pytest
import sshd
from launched import losses, newest, record, wait_for
from ports import free_port
from tiers import cases
from tiny import text_file

ROOT = Path(__file__).parents[2]
SMALL = [
    "--training.dataset=text", f"--training.dataset_path={text_file()}", "--training.device=cpu",
    "--training.seq_len=32", "--training.local_batch_size=1", "--model.overrides.num_layers=1",
    "--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1",
]  # fmt: skip

pytestmark = [
    pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "sshd"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2"),
]


@pytest.fixture(scope="module")
def ssh_config(tmp_path_factory):
    with sshd.server(
        tmp_path_factory.mktemp("sshd"), {"host-a": "127.0.0.1", "host-b": "127.0.0.2"}
    ) as config:
        yield config


@pytest.fixture(params=cases(["ssh"], nightly=["pdsh"]))
def via(request):
    if request.param == "pdsh" and not shutil.which("pdsh"):
        pytest.skip("no pdsh here: apt-get install pdsh (.ci/components.sh does)")
    return f"--launch.ssh.via={request.param}"


def command(config: Path, folder: Path, *more: str, hosts: str = "host-a,host-b") -> list[str]:
    return [
        sys.executable, "-m", "shardtrain", "launch", "ssh", "--hosts", hosts, f"--launch.ssh.config_file={config}",
        f"--launch.ssh.rendezvous_port={free_port()}", f"--launch.python={sys.executable}",
        f"--launch.workdir={ROOT}", "--nproc", "1", "--launch.env.OMP_NUM_THREADS=1",
        f"--launch.env.MARK={folder}", f"--job.dump_folder={folder}",
        *SMALL, *more,
    ]  # fmt: skip


def environment(state: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(state), "HF_TOKEN": "hf-canary-0123456789"}


def run(arguments: list[str], state: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        env=environment(state),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
    )


def marked(folder: Path) -> list[int]:
    """Return the processes that a launch into this folder started, regardless of their parents."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARK={folder}".encode() in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def wait_for_steps(launcher: subprocess.Popen, folder: Path) -> None:
    def has_come() -> bool:
        assert launcher.poll() is None, "ended"
        return (folder / "metrics.jsonl").exists() and len(losses(folder)) > 1

    wait_for(has_come)


def start(arguments: list[str], state: Path) -> subprocess.Popen:
    quiet = subprocess.DEVNULL
    return subprocess.Popen(arguments, env=environment(state), cwd=ROOT, stdout=quiet, stderr=quiet)


@pytest.mark.slow
def test_two_hosts_train_one_run_stop_saved_at_ctrl_c_and_continue(tmp_path, ssh_config, via):
    folder = tmp_path / "run"
    hostile = 'it\'s $HOME `id` "x" ; %j \\ é'
    arguments = [
        *command(
            ssh_config, folder, "--training.steps=100000", "--training.on_data_end=repeat",
            "--checkpoint.enable", via,
        ),
        f"--job.description={hostile}", f"--launch.env.HOSTILE={hostile}", "--launch.forward_env=HF_TOKEN",
    ]  # fmt: skip
    launcher = start(arguments, tmp_path)
    try:
        wait_for_steps(launcher, folder)

        # The ranks have the variables, and no process has the secret in its command line.
        for pid in marked(folder):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert f"HOSTILE={hostile}".encode() in variables
            assert b"HF_TOKEN=hf-canary-0123456789" in variables
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            if path.parent.is_dir():
                assert b"hf-canary" not in path.read_bytes(), path

        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(patience.seconds(60)) == 75
    finally:
        launcher.kill()
    saved = newest(folder)

    assert saved > 0
    assert record(folder)["code"] == 75
    wait_for(lambda: not marked(folder), 10)

    # The same command continues the run.
    arguments = [argument.replace("steps=100000", f"steps={saved + 1}") for argument in arguments]
    result = run(arguments, tmp_path)

    assert result.returncode == 0, result.stderr
    assert max(losses(folder)) == saved + 1
    assert "on 2 x cpu" in result.stderr
    assert hostile in result.stderr
    assert "[host-a] " in result.stderr
    assert "[host-b] " in result.stderr
    assert "hf-canary" not in result.stderr

    name = result.stdout.strip()
    logs = run([sys.executable, "-m", "shardtrain", "launch", "logs", name], tmp_path)
    assert "[host-a] " in logs.stdout
    assert "[host-b] " in logs.stdout

    status = run([sys.executable, "-m", "shardtrain", "launch", "status", name], tmp_path)
    assert status.stdout == "ended with 0\n"
    assert not marked(folder)


def test_a_killed_launcher_leaves_nothing_on_the_hosts(tmp_path, ssh_config, via):
    launcher = start(
        command(
            ssh_config,
            tmp_path / "run",
            "--training.steps=100000",
            "--training.on_data_end=repeat",
            via,
        ),
        tmp_path,
    )
    wait_for(lambda: len(marked(tmp_path / "run")) >= 2)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    # The ssh connections are separate processes, which detect the end of their input.
    wait_for(lambda: not marked(tmp_path / "run"), 60)

    assert not marked(tmp_path / "run")

    status = run(
        [sys.executable, "-m", "shardtrain", "launch", "status", f"ssh/{launcher.pid}"], tmp_path
    )

    assert (
        status.stdout == "ended without an exit status: it was killed, or its machine went down\n"
    )


@pytest.mark.parametrize(
    ("more", "hosts", "message"),
    [
        ([], "host-a,nowhere.invalid", "nowhere.invalid"),
        (["--launch.python=/no/python"], "host-a,host-b", "cannot start shardtrain"),
        (["--launch.workdir=/"], "host-a", "No module named"),
    ],
)
def test_a_host_that_cannot_start_is_named_in_one_line_and_no_host_starts(
    tmp_path, ssh_config, via, more, hosts, message
):
    folder = tmp_path / "run"
    before = time.monotonic()
    replaced = {option.partition("=")[0] for option in more}
    arguments = []
    for argument in command(ssh_config, folder, hosts=hosts):
        name = argument.partition("=")[0]
        # a Python without the package
        if name == "--launch.python" and "--launch.workdir=/" in more:
            argument = "--launch.python=/usr/bin/python3"
        if name not in replaced:
            arguments.append(argument)
    result = run([*arguments, *more, via], tmp_path)

    assert result.returncode == 2, result.stderr

    lines = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in result.stderr
    assert time.monotonic() - before < patience.seconds(40)
    assert not folder.exists()
    assert not marked(folder)


def test_a_host_whose_interpreter_has_no_torch_is_reported_before_anything_starts(
    tmp_path, ssh_config, via
):
    python = tmp_path / "python"
    hide = "find = PathFinder.find_spec; PathFinder.find_spec = lambda n, *a: None if n == 'torch' else find(n, *a)"
    main = (
        "import sys, runpy; runpy.run_module('shardtrain.launch.remote_agent', run_name='__main__')"
    )
    program = f"from importlib.machinery import PathFinder; {hide}; {main}"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c {shlex.quote(program)}\n")
    python.chmod(0o755)
    folder = tmp_path / "run"
    arguments = [
        w
        for w in command(ssh_config, folder, via, hosts="host-a,host-b")
        if not w.startswith("--launch.python")
    ]
    result = run([*arguments, f"--launch.python={python}"], tmp_path)

    assert result.returncode == 2
    assert not folder.exists()

    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert "cannot start shardtrain" in line
    assert "has no package torch; install shardtrain and torch on it" in line
    assert "Traceback" not in result.stderr


def test_hosts_that_refuse_the_key_are_named_in_one_line(tmp_path, ssh_config, via):
    other = tmp_path / "other"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)],
        check=True,
        timeout=patience.seconds(20),
    )
    # The same configuration of ssh, with a key that no host knows.
    config = tmp_path / "config"
    lines = [
        f"  IdentityFile {other}" if "IdentityFile" in line else line
        for line in ssh_config.read_text().splitlines()
    ]
    config.write_text("\n".join(lines) + "\n")
    result = run(command(config, tmp_path / "run", via), tmp_path)

    assert result.returncode == 2

    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error[")]
    assert 'host="host-a, host-b" cannot be reached by ssh' in line
    assert "Permission denied" in line


def test_a_busy_port_ends_all_hosts_with_one_line(tmp_path, ssh_config, via):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        arguments = [
            w for w in command(ssh_config, tmp_path / "run", via) if "rendezvous_port" not in w
        ]
        result = run([*arguments, f"--launch.ssh.rendezvous_port={port}"], tmp_path)

    assert result.returncode == 2, result.stderr
    assert f"127.0.0.1:{port}" in result.stderr
    assert "Address already in use" in result.stderr
    assert not marked(tmp_path / "run")
