"""``launch status`` without an id lists the launches from this machine, newest first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardtrain import cli
from shardtrain.launch import launched

PLATFORM = """
def render(job, launch):
    return "a script"

def submit(text, job, launch):
    return "17"
"""


def test_launches_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", "status"]) == 0
    assert "nothing has been launched from this machine" in capsys.readouterr().out

    launched.note("slurm/1234", "outputs/first")
    (tmp_path / "cluster.py").write_text(PLATFORM)
    arguments = ["launch", "cluster.py", "debug", "--job.dump_folder", "outputs/second"]

    # A dry run is not listed.
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "17"

    # Lines of another program are ignored, or shown without their control characters.
    path = tmp_path / "state/shardtrain/launched.jsonl"
    with path.open("a") as file:
        file.write('{"id": 3}\nnot JSON\n[]\n{"id": "\\u001b[31m", "run": "x", "time": 1}\n')

    assert cli.main(["launch", "status"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["LAUNCHED", "ID", "RUN"]
    assert "\x1b" not in "".join(lines)
    assert lines[2].split()[2:] == ["cluster.py", "17", "outputs/second"]
    assert lines[3].split()[2:] == ["slurm/1234", "outputs/first"]
    assert os.stat(path).st_mode & 0o077 == 0


def test_a_launch_that_cannot_be_recorded_still_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)
    launched.note("slurm/1", "outputs")
    assert "nothing has been launched" in launched.table()[0]
