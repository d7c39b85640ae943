"""``launch ssh`` between machines with separate networks: addresses, lost connections, differing installations.

The machines are Linux namespaces with real sshds: see ``machines``. After every test, nothing runs on any of them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import machines
import patience
import pytest
from launched import losses, record, wait_for
from tiers import cases
from tiny import text_file

from shardtrain import __version__
from shardtrain.launch.remote_agent import SILENCE_SECONDS

ROOT = Path(__file__).parents[2]
TELLS_SECONDS = 10.0
ALIVE_SECONDS = 15.0
"""Time limits for the report of a failure, and for a silent host (ServerAliveInterval 5, 3 times)."""
MACHINE_SECONDS = 10.0
"""Additional time for Python to start on a busy machine."""

pytestmark = pytest.mark.skipif(bool(machines.missing()), reason=machines.missing() or "namespaces")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    with machines.two(tmp_path_factory.mktemp("machines")) as two:
        yield two


@pytest.fixture(autouse=True)
def nothing_is_left(network):
    """Check after every test that no process of the hosts or of the launcher is left."""
    yield
    wait_for(lambda: not network.running(), 10)
    remaining = network.running()
    assert not remaining, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in remaining]


def command(
    network: machines.Machines, folder: Path, *more: str, config: str = "", hosts="host-a,host-b"
) -> list[str]:
    options = {
        "launch.ssh.config_file": network.config, "launch.python": sys.executable, "launch.workdir": ROOT,
        "launch.env.OMP_NUM_THREADS": 1, "job.dump_folder": folder, "training.dataset": "text",
        "training.dataset_path": text_file(), "training.device": "cpu", "training.seq_len": 32,
        "training.local_batch_size": 1, "model.overrides.num_layers": 1, "lr_scheduler.warmup_steps": 1,
        "metrics.log_freq": 1,
    }  # fmt: skip
    replaced = {option.partition("=")[0] for option in more}
    arguments = [
        sys.executable,
        "-m",
        "shardtrain",
        "launch",
        "ssh",
        *([config] if config else []),
        "--hosts",
        hosts,
    ]
    arguments += [
        "--nproc=1",
        *(f"--{name}={value}" for name, value in options.items() if f"--{name}" not in replaced),
    ]
    return network.switch.command("env", "--chdir", str(ROOT), *arguments, *more)


def start(arguments: list[str], state: Path) -> subprocess.Popen[str]:
    """Start a launch without variables that select the network interface of gloo."""
    names = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    names |= {"XDG_STATE_HOME": str(state), "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, env=names, stdout=pipe, stderr=pipe, text=True)


def run(
    arguments: list[str], state: Path, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    process = start(arguments, state)
    try:
        out, err = process.communicate(timeout=patience.seconds(seconds))
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def wait_for_steps(launcher: subprocess.Popen, folder: Path) -> None:
    def has_come() -> bool:
        assert launcher.poll() is None, launcher.stderr.read()
        return (folder / "metrics.jsonl").exists() and len(losses(folder)) > 1

    wait_for(has_come)


def errors(text: str) -> list[str]:
    assert "Traceback" not in text, text
    return [line for line in text.splitlines() if "error[" in line]


@pytest.mark.slow
@pytest.mark.nightly(
    "two networks, and the start of six interpreters",
    by="tests/launch/test_ssh.py::test_two_hosts_train_one_run_stop_saved_at_ctrl_c_and_continue",
)
def test_two_machines_train_without_name_resolution_or_a_named_interface(network, tmp_path):
    folder = tmp_path / "run"
    result = run(command(network, folder, "--training.steps=3"), tmp_path)
    assert result.returncode == 0, result.stderr
    assert max(losses(folder)) == 3
    assert "on 2 x cpu" in result.stderr
    assert f"meeting at {machines.HOSTS['host-a']}:29500" in result.stderr


def test_a_dry_run_shows_the_ssh_address_of_the_first_host(network, tmp_path):
    result = run(command(network, tmp_path / "run", "--dry-run"), tmp_path)
    assert result.returncode == 0
    assert result.stdout.count(f"{machines.HOSTS['host-a']}:29500") == 2


@pytest.mark.parametrize("moment", cases(["start"], nightly=["middle"]))
@pytest.mark.slow
def test_a_disconnected_host_is_reported_and_ends_its_processes(network, tmp_path, moment):
    folder = tmp_path / "run"
    more = [
        "--training.steps=100000",
        "--training.on_data_end=repeat",
        "--checkpoint.enable",
        "--checkpoint.interval=1000000",
    ]
    launcher = start(command(network, folder, *more, "--checkpoint.grace_seconds=5"), tmp_path)
    try:
        if moment == "middle":
            wait_for_steps(launcher, folder)
        else:
            ranks = network.hosts["host-b"].processes
            wait_for(lambda: any(b"train" in _arguments(pid) for pid in ranks()))
        network.cut("host-b")
        cut_at = time.monotonic()
        _, err = launcher.communicate(timeout=patience.seconds(90))
        seconds_until_end = time.monotonic() - cut_at

        assert launcher.returncode in (6, 75, 76), err
        assert launcher.returncode == record(folder)["code"], err
        assert "note: the connection to host host-b was lost" in err
        assert "last checkpoint" in err
        assert "note: host host-b was lost" in err
        # grace_seconds, and the time to detect it
        assert seconds_until_end < ALIVE_SECONDS + 5 + 10 + patience.seconds(MACHINE_SECONDS)

        # No process is left: of the launcher, of the other host, and finally of the lost host.
        assert network.switch.processes() <= network.idle
        assert network.hosts["host-a"].processes() <= network.idle
        wait_for(lambda: _ranks(network, "host-b") == 0, SILENCE_SECONDS + 5 + 10 + MACHINE_SECONDS)
        assert _ranks(network, "host-b") == 0, "the lost host still trains"
    finally:
        launcher.kill()
        network.reconnect("host-b")


@pytest.mark.parametrize("moment", cases(["start"], nightly=["middle"]))
@pytest.mark.slow
def test_a_host_whose_ssh_session_is_killed_is_reported_within_10_s(network, tmp_path, moment):
    folder = tmp_path / "run"
    launcher = start(
        command(network, folder, "--training.steps=100000", "--training.on_data_end=repeat"),
        tmp_path,
    )
    try:
        if moment == "middle":
            wait_for_steps(launcher, folder)
        else:
            wait_for(lambda: _ranks(network, "host-b") > 1)
        for pid in network.hosts["host-b"].processes() - network.idle:
            if not _is_ours(pid):  # sshd's process for this session
                os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        _, err = launcher.communicate(timeout=patience.seconds(60))
        assert time.monotonic() - killed_at < TELLS_SECONDS + patience.seconds(MACHINE_SECONDS)
        assert (
            launcher.returncode in (6, 75, 76) and launcher.returncode == record(folder)["code"]
        ), err
        assert "note: the connection to host host-b was lost" in err
    finally:
        launcher.kill()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (
            "host-a,nowhere.invalid",
            ['host="nowhere.invalid" cannot be reached', "Could not resolve", "check the name"],
        ),
        (
            f"host-a,{machines.HOLE}",
            [f'host="{machines.HOLE}" cannot be reached', "timed out", "check that it is up"],
        ),
        (
            "host-a,host-b:1",
            ['host="host-b:1" cannot be reached', "refused", "check that its sshd is up"],
        ),
    ],
)
def test_a_host_that_does_not_answer_is_reported_within_the_limit(
    network, tmp_path, hosts, expected
):
    limit = round(patience.seconds(4))
    before = time.monotonic()
    arguments = command(
        network, tmp_path / "run", f"--launch.ssh.connect_timeout_seconds={limit}", hosts=hosts
    )
    result = run(arguments, tmp_path)

    assert time.monotonic() - before < limit + patience.seconds(MACHINE_SECONDS)

    _is_refused(result, tmp_path / "run", expected)


def test_a_silent_port_is_reported_within_the_limit(network, tmp_path):
    listen = f"import socket, time; s = socket.create_server(('{machines.LAUNCHER}', 2222))"
    code = f"{listen}; print(1, flush=True); time.sleep(9999)"
    mute = subprocess.Popen(
        network.switch.command(sys.executable, "-c", code), stdout=subprocess.PIPE
    )
    try:
        assert mute.stdout.readline()
        limit = round(patience.seconds(4))  # 4 seconds, extended on a busy machine
        arguments = command(network, tmp_path / "run", f"--launch.ssh.connect_timeout_seconds={limit}",
                        hosts=f"host-a,{machines.LAUNCHER}:2222")  # fmt: skip
        before = time.monotonic()
        result = run(arguments, tmp_path)
        assert time.monotonic() - before < limit + patience.seconds(MACHINE_SECONDS)
        _is_refused(result, tmp_path / "run", [f'host="{machines.LAUNCHER}:2222"', "timed out"])
    finally:
        mute.kill()
        mute.wait()


def test_a_changed_host_key_is_reported_with_the_command_that_removes_it(network, tmp_path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"],
        check=True,
        timeout=patience.seconds(20),
    )
    key = (tmp_path / "other.pub").read_text()
    (tmp_path / "known").write_text(f"{machines.HOSTS['host-b']} {key}")
    text = network.config.read_text().replace(
        "StrictHostKeyChecking no", "StrictHostKeyChecking yes"
    )
    lines = [
        f"  UserKnownHostsFile {tmp_path}/known" if "KnownHosts" in line else line
        for line in text.splitlines()
    ]
    (tmp_path / "config").write_text("\n".join(lines) + "\n")
    arguments = command(
        network, tmp_path / "run", f"--launch.ssh.config_file={tmp_path}/config", hosts="host-b"
    )
    expected = [
        'host="host-b" cannot be reached',
        "Host key verification failed",
        "ssh-keygen -R host-b",
    ]
    _is_refused(run(arguments, tmp_path), tmp_path / "run", expected)


@pytest.fixture
def copy(tmp_path):
    """Copy of this package with another version."""
    folder = tmp_path / "package"
    shutil.copytree(ROOT / "shardtrain", folder, ignore=shutil.ignore_patterns("__pycache__"))
    init = folder / "__init__.py"
    init.write_text(
        init.read_text().replace(f'__version__ = "{__version__}"', '__version__ = "9.8.7"')
    )
    return folder


def test_a_host_with_another_version_is_reported_with_both(network, tmp_path, copy):
    with network.hosts["host-b"].shows(ROOT / "shardtrain", copy):
        result = run(command(network, tmp_path / "run"), tmp_path)
    expected = [
        'host="host-b" has shardtrain 9.8.7',
        f"this machine has {__version__}",
        "install the same version",
    ]
    _is_refused(result, tmp_path / "run", expected)


@pytest.fixture
def work(tmp_path):
    """A work folder next to an environment with only the package and torch, and an empty folder."""
    packages = Path("lib", f"python3.{sys.version_info.minor}", "site-packages")
    for folder in ("parent/folder", "bin", "nothing", packages):
        (tmp_path / folder).mkdir(parents=True)
    interpreter = Path(sys.executable).resolve()
    (tmp_path / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\n")
    (tmp_path / "bin/python").symlink_to(interpreter)
    (tmp_path / packages / "shardtrain").symlink_to(ROOT / "shardtrain")
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations
    (tmp_path / packages / "torch").symlink_to(torch)
    return tmp_path / "parent/folder"


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [
        ("lib", ["No module named", "install shardtrain and torch"]),
        ("bin", ["bin/python", "set launch.python"]),
        ("parent", ["parent/folder", "launch.workdir"]),
    ],
)
def test_a_host_without_package_interpreter_or_folder_is_reported(
    network, tmp_path, work, hidden, expected
):
    arguments = command(
        network,
        tmp_path / "run",
        f"--launch.python={tmp_path}/bin/python",
        f"--launch.workdir={work}",
    )
    before = time.monotonic()
    with network.hosts["host-b"].shows(tmp_path / hidden, tmp_path / "nothing"):
        result = run(arguments, tmp_path)

    assert time.monotonic() - before < TELLS_SECONDS + patience.seconds(MACHINE_SECONDS)

    _is_refused(result, tmp_path / "run", ['host="host-b" cannot start', *expected])


def test_a_host_without_the_configuration_file_is_reported_and_the_others_stop(network, tmp_path):
    here = tmp_path / "configs"
    nothing = tmp_path / "nothing"
    here.mkdir()
    nothing.mkdir()
    (here / "run.toml").write_text('[training]\nsteps = 100000\non_data_end = "repeat"\n')
    with network.hosts["host-b"].shows(here, nothing):
        before = time.monotonic()
        result = run(command(network, tmp_path / "run", config=f"{here}/run.toml"), tmp_path)
        assert time.monotonic() - before < TELLS_SECONDS + patience.seconds(MACHINE_SECONDS)

    assert result.returncode == 2, result.stderr

    (line,) = errors(result.stderr)
    assert line.startswith("[host-b] error[2]: ")
    assert f"{here}/run.toml" in line
    assert "note: host host-b has ended with 2" in result.stderr


def test_ctrl_c_before_all_hosts_have_answered_starts_nothing(network, tmp_path):
    launcher = start(command(network, tmp_path / "run", hosts=f"host-a,{machines.HOLE}"), tmp_path)
    try:
        wait_for(lambda: _ranks(network, "host-a") == 1)
        launcher.send_signal(signal.SIGINT)
        _, err = launcher.communicate(timeout=patience.seconds(TELLS_SECONDS))
        assert launcher.returncode == 75 and "before anything was started" in err, err
        assert not (tmp_path / "run").exists()
    finally:
        launcher.kill()


def _is_refused(result: subprocess.CompletedProcess[str], folder: Path, texts: list[str]) -> None:
    """Check for status 2, one error line with these texts, and no start."""
    assert result.returncode == 2, result.stderr
    lines = errors(result.stderr)
    assert len(lines) == 1, result.stderr
    line = lines[0]
    assert line.startswith("error[2]: ") and all(text in line for text in texts), line
    assert not folder.exists()


def _is_ours(pid: int) -> bool:
    arguments = _arguments(pid)
    return b"shardtrain" in arguments or b"shardtrain.launch.remote_agent" in arguments


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _ranks(network: machines.Machines, host: str) -> int:
    """Count the processes of this package on a host. sshd itself may keep a dead connection longer."""
    return sum(map(_is_ours, network.hosts[host].processes()))
