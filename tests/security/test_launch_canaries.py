"""Six secrets in the environment of ``launch``: none is in a file, line or command that it makes."""

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
    """Every command line of the machine at 20 Hz."""
    lines, ended = set[bytes](), threading.Event()

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
    path.write_text(CONFIG.format(names=names, references="\n".join(f'{name} = "hub/key"' for name in CANARIES)))
    return path


def run(folder: Path, *words: str | Path, **names: str) -> subprocess.CompletedProcess[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    own = {"XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "shardtrain", *map(str, words)]
    done = subprocess.run(
        command,
        env={**os.environ, **CANARIES, **own, **names},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patience.seconds(150),
    )
    with (folder / "printed").open("a") as file:
        file.write(done.stdout + done.stderr)
    return done


def test_no_dry_run_and_no_batch_script_holds_a_secret(tmp_path: Path, config_file: Path) -> None:
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    with command_lines() as lines:
        for platform in ("local", "ssh", "slurm", "kubernetes", "runai"):
            done = run(tmp_path, "launch", platform, config_file, "--dry-run")
            assert done.returncode == 0 and "shardtrain" in done.stdout, done.stderr
        record = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}
        done = run(tmp_path, "launch", "slurm", config_file, **record)
        assert (done.returncode, done.stdout) == (0, "slurm/7\n"), done.stderr
    assert "#SBATCH" in (tmp_path / "record.script").read_text()
    assert_silent(tmp_path, lines)


@pytest.mark.parametrize("name", CANARIES)
@pytest.mark.parametrize(
    "option", ["env.A", "workdir", "image", "mounts", "slurm.sweep", "slurm.setup", "kubernetes.node_selector", "name"]
)
def test_an_option_of_launch_that_holds_a_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, option: str
) -> None:
    from shardtrain.cli import main

    for one, value in CANARIES.items():
        monkeypatch.setenv(one, value)
    forms = {"mounts": f"/{CANARIES[name]}:/a", "slurm.sweep": f"--job.description {CANARIES[name]}"}
    value = forms.get(option, f"a={CANARIES[name]}" if "selector" in option else CANARIES[name])
    for platform in ("slurm", "kubernetes"):
        words = ["launch", platform, "--image=i", "--dry-run", f"--launch.{option}={value}"]
        assert main(words) == 2, (option, name)
        told = capsys.readouterr()
        assert CANARIES[name] not in told.out + told.err


@pytest.mark.nightly(
    "on one machine", by="tests/security/test_secret_canaries.py::test_a_run_of_two_ranks_with_all_sinks_is_silent"
)
@pytest.mark.slow
@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "sshd")
def test_a_run_by_ssh_that_crashes_saying_every_secret_is_silent(tmp_path: Path, config_file: Path) -> None:
    dataset = tmp_path / "mine.py"
    dataset.write_text(CRASHES.format(names=tuple(CANARIES)))
    given = options(tmp_path, **{"training.dataset": dataset})
    with command_lines() as lines, sshd.server(tmp_path / "sshd", {"host-a": "127.0.0.1"}) as ssh_config:
        words = [f"--launch.ssh.config_file={ssh_config}", f"--launch.python={sys.executable}"]
        words += [f"--launch.workdir={ROOT}", "--nproc", "2"]
        done = run(tmp_path, "launch", "ssh", config_file, *words, *given)
        # the variables have arrived: the dataset has said them all, and each was masked
        assert done.returncode == 2 and done.stderr.count("***") >= len(CANARIES), done.stderr
        logs = run(tmp_path, "launch", "logs", done.stdout.splitlines()[0])
        assert "refused: ***" in logs.stdout
        report = run(tmp_path, "doctor", "--json", "--nproc", "1", *options(tmp_path)).stdout
        assert "findings" in report
    assert_silent(tmp_path, lines)
