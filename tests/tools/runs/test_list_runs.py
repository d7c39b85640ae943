"""``runs`` lists the state of each run below a folder, and ignores all other files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from shardtrain import cli
from shardtrain.tools.runs.run_files import RunFolder


def run_folder(
    path: Path, text: str = '{"step": 7, "loss": 2.5}\n', end: object = None, age: float = 0.0
) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text(text)
    if end is not None:
        (path / "exit.json").write_text(json.dumps(end))
    for file in path.iterdir():
        os.utime(file, (time.time() - age,) * 2)
    return path


@pytest.mark.parametrize(
    ("end", "age", "state"),
    [
        (None, 0, "under way"),
        (None, 3600, "silent"),
        ({"code": 0}, 3600, "ended"),
        ({"code": 5}, 0, "failed (5)"),
        ({"code": 75}, 0, "stopped (75)"),
        ({"code": 76}, 0, "stopped (76)"),
        ({"code": [0]}, 0, "failed"),
    ],
)
def test_the_state_of_a_run_is_that_of_its_newest_attempt(
    tmp_path: Path, end: object, age: float, state: str
) -> None:
    assert RunFolder(run_folder(tmp_path / "run", end=end, age=age)).status().state == state


def test_the_exit_file_of_an_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", end={"code": 5}, age=100)
    os.utime(folder / "metrics.jsonl")
    assert RunFolder(folder).status().state == "under way"


def test_runs_are_found_below_and_the_newest_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path / "sweep/old", age=500, end={"code": 0})
    new = run_folder(tmp_path / "sweep/new", text='{"step": 7, "loss": 2.5}\n{"step": 8, "lo')
    run_folder(new / "inside/a run")  # folders inside a run are not searched
    run_folder(tmp_path / ".hidden/run")
    run_folder(tmp_path / "a/b/c/d/e/f/run")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert cli.main(["runs", str(tmp_path)]) == 0

    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["STATE", "STEP", "LOSS", "AGE", "RUN"]
    assert [line.split()[-1] for line in lines] == [
        str(tmp_path / "sweep/new"),
        str(tmp_path / "sweep/old"),
    ]
    assert lines[0].startswith("under way")
    assert lines[0].split()[2:4] == ["7", "2.5"]
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["state"], row["step"], row["loss"]) for row in rows] == [
        ("under way", 7, 2.5),
        ("ended", 7, 2.5),
    ]


@pytest.mark.parametrize(
    "text", ["", "\n\n", "[1]\n", "{" * 1000, '{"step": "x"}\n', "\x00\n" * 100]
)
def test_a_file_without_a_record_is_shown_without_numbers(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path / "run\x1b[31m", text=text, end=[1])
    assert cli.main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert " - " in out
    assert "\x1b" not in out


def test_a_path_that_is_not_a_folder_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["runs", str(tmp_path / "none")]) == 2
    assert "is not a folder; name a folder with runs" in capsys.readouterr().err
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert "none of its folders has a metrics.jsonl" in capsys.readouterr().out
