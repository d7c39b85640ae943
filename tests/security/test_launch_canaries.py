"""Secrets in the environment of ``launch`` appear in no file, output or command line that it creates."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import patience
import pytest
import sshd
from canaries import CANARIES, CRASHES, assert_silent, options

ROOT = Path(__file__).resolve().parents[2]
PERIOD_SECONDS = 0.05
CONFIG = """\
[launch]
name = "run"
image = "registry.example/shardtrain:1"
forward_env = [{names}]
[launch.secrets]
{references}
[launch.ssh]
hosts = ["host-a"]
"""
SBATCH = """#!/bin/sh
cat > "$RECORD.script"
printf '%s\\n' "$@" > "$RECORD.argv"
echo 7
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextmanager
def command_lines() -> Iterator[set[bytes]]:
    """Collect every command line of the machine during the block, at 20 Hz."""
    lines = set[bytes]()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(PERIOD_SECONDS):
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    lines.add(entry.read_bytes())
                except OSError:
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lines
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    names = ", ".join(f'"{name}"' for name in CANARIES)
    path.write_text(
        CONFIG.format(names=names, references="\n".join(f'{name} = "hub/key"' for name in CANARIES))
    )
    return path


def run(folder: Path, *arguments: str | Path, **names: str) -> subprocess.CompletedProcess[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    folders = {
        "XDG_STATE_HOME": str(folder / "state"),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "shardtrain", *map(str, arguments)]
    done = subprocess.run(
        command,
        env={**os.environ, **CANARIES, **folders, **names},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patience.seconds(150),
    )
    with (folder / "printed").open("a") as file:
        file.write(done.stdout + done.stderr)
    return done


def test_dry_runs_and_batch_scripts_contain_no_secret(tmp_path: Path, config_file: Path) -> None:
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    with command_lines() as lines:
        for platform in ("local", "ssh", "slurm", "kubernetes", "runai"):
            done = run(tmp_path, "launch", platform, config_file, "--dry-run")
            assert done.returncode == 0, done.stderr
            assert "shardtrain" in done.stdout, done.stderr
        record = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}
        done = run(tmp_path, "launch", "slurm", config_file, **record)
        assert (done.returncode, done.stdout) == (0, "slurm/7\n"), done.stderr

    assert "#SBATCH" in (tmp_path / "record.script").read_text()
    assert_silent(tmp_path, lines)


@pytest.mark.parametrize("name", CANARIES)
@pytest.mark.parametrize(
    "option",
    [
        "env.A",
        "workdir",
        "image",
        "mounts",
        "slurm.sweep",
        "slurm.setup",
        "kubernetes.node_selector",
        "name",
    ],
)
def test_launch_option_with_a_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, option: str
) -> None:
    from shardtrain.cli import main

    for variable, secret in CANARIES.items():
        monkeypatch.setenv(variable, secret)
    secret = CANARIES[name]
    values = {
        "mounts": f"/{secret}:/a",
        "slurm.sweep": f"--job.description {secret}",
        "kubernetes.node_selector": f"a={secret}",
    }
    value = values.get(option, secret)
    for platform in ("slurm", "kubernetes"):
        arguments = ["launch", platform, "--image=i", "--dry-run", f"--launch.{option}={value}"]
        assert main(arguments) == 2, (option, name)
        output = capsys.readouterr()
        assert secret not in output.out + output.err


@pytest.mark.nightly(
    "on one machine",
    by="tests/security/test_secret_canaries.py::test_run_with_all_sinks_writes_no_secret",
)
@pytest.mark.slow
@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "sshd")
def test_ssh_run_that_fails_with_every_secret_masks_them(tmp_path: Path, config_file: Path) -> None:
    dataset = tmp_path / "mine.py"
    dataset.write_text(CRASHES.format(names=tuple(CANARIES)))
    train_options = options(tmp_path, **{"training.dataset": dataset})
    with (
        command_lines() as lines,
        sshd.server(tmp_path / "sshd", {"host-a": "127.0.0.1"}) as ssh_config,
    ):
        arguments = [f"--launch.ssh.config_file={ssh_config}", f"--launch.python={sys.executable}"]
        arguments += [f"--launch.workdir={ROOT}", "--nproc", "2"]
        done = run(tmp_path, "launch", "ssh", config_file, *arguments, *train_options)

        # the variables have arrived: the error of the dataset contains all of them, masked
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("***") >= len(CANARIES), done.stderr

        logs = run(tmp_path, "launch", "logs", done.stdout.splitlines()[0])
        assert "refused: ***" in logs.stdout
        report = run(tmp_path, "doctor", "--json", "--nproc", "1", *options(tmp_path)).stdout
        assert "findings" in report

    assert_silent(tmp_path, lines)
