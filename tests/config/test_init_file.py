"""``init`` writes a file that ``train`` takes: the preset and the overrides that were named, explained line by line."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path

import pytest

from shardtrain import cli, config
from shardtrain.config import init_file, presets


@pytest.mark.parametrize("preset", presets.names())
def test_the_file_is_the_configuration_of_the_preset(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.toml"
    assert cli.main(["init", str(path), preset, "--training.steps", "77"]) == 0
    written, meant = config.load(path, []), config.load(presets.FOLDER / f"{preset}.toml", ["--training.steps", "77"])
    assert written.config == meant.config
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= 120
    for number, line in enumerate(lines):  # each option has its line
        if " = " in line and not line.startswith("#"):
            assert lines[number - 1].startswith("#") or "." in line.partition(" = ")[0], line
    for name in init_file.FIRST:
        assert any(name.rpartition(".")[2] in line for line in lines)


def test_options_of_your_own_are_in_it_and_what_comes_next_is_said(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "mine.toml", "--training.dataset", "text", "--training.dataset_path", "a.txt"]) == 0
    table = tomllib.loads(Path("mine.toml").read_text())
    assert table["training"]["dataset_path"] == "a.txt" and table["model"]["flavor"] == "2.6M"
    assert "shardtrain train mine.toml" in capsys.readouterr().out
    Path("a.txt").write_text("words " * 400_000)
    assert cli.main(["config", "check", "mine.toml"]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "needs the file to write"),
        (["run"], "does not end in .toml"),
        (["there.toml"], "exists"),
        (["new.toml", "llama3_9b"], "llama3_9b"),
        (["new.toml", "--training.stepz", "1"], "training.steps"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(words, told, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.toml").write_text("")
    assert cli.main(["init", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]


def test_a_person_is_asked(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    answers = iter(["llama3_8b", "corpus/*.jsonl", "", "500"])
    assert init_file.main([str(tmp_path / "a.toml")], lambda question: next(answers)) == 0
    found = config.load(tmp_path / "a.toml", []).config
    assert (found.training.dataset, found.training.dataset_path, found.training.steps) == (
        "jsonl",
        "corpus/*.jsonl",
        500,
    )
    assert found.model.flavor == "8B" and not list(answers)


def test_the_next_commands_can_be_pasted_whatever_the_file_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "my run's.toml", "debug"]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("  shardtrain ")]
    assert len(commands) == 3 and all(words[-1] == "my run's.toml" for words in commands)
