"""The name of a configuration file never becomes an option or a terminal command in a file or output that names it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from shardtrain.cli import main
from shardtrain.config import load
from shardtrain.train import run_folder
from shardtrain.utils.redact import CONTROLS

NAMES = {
    "newline": 'a\n[model]\nname = "planted.py" #.toml',
    "carriage return": "a\rname = 1 #.toml",
    "escape": "a\x1b]0;title\x07.toml",
    "8-bit control": "a\x9b31m.toml",
    "direction": "a\u202etxt.toml",
    "line separator": "a\u2028b.toml",
}
TEXT = '[training]\nsteps = 7\n[job]\ndescription = "a \\u001b]0;t\\u0007 \\u009b31m \\u202e \\u2028"\n'
Writer = Callable[[Path, Path, pytest.CaptureFixture[str]], str]


def _resolved(file: Path, folder: Path, output: pytest.CaptureFixture[str]) -> str:
    run_folder.write_resolved_config(load(file), folder, 1, f"certificate {file}")
    return (folder / run_folder.RESOLVED_CONFIG).read_text(encoding="utf-8")


def _show(file: Path, folder: Path, output: pytest.CaptureFixture[str]) -> str:
    assert main(["config", "show", str(file)]) == 0
    return output.readouterr().out


def _init_from(file: Path, folder: Path, output: pytest.CaptureFixture[str]) -> str:
    new = folder / "new.toml"
    assert main(["init", str(new), str(file)]) == 0
    return new.read_text(encoding="utf-8")


def _init_to(file: Path, folder: Path, output: pytest.CaptureFixture[str]) -> str:
    folder.mkdir()
    plain = folder / "plain.toml"
    plain.write_text(TEXT, encoding="utf-8")
    new = folder / file.name
    assert main(["init", str(new), str(plain)]) == 0
    return new.read_text(encoding="utf-8")


WRITERS: dict[str, Writer] = {
    "config.resolved.toml": _resolved,
    "config show": _show,
    "init from the file": _init_from,
    "init to the file": _init_to,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_name_stays_in_its_comment(
    writer: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / NAMES[name]
    file.write_text(TEXT, encoding="utf-8")
    text = WRITERS[writer](file, tmp_path / "new", capsys)

    assert re.search(rf"[\x00-\x08\x0b-\x1f{CONTROLS}]", text) is None

    values = tomllib.loads(text)
    assert values["training"]["steps"] == 7
    assert values["job"]["description"] == "a \x1b]0;t\x07 \x9b31m \u202e \u2028"
    assert values["model"]["name"] == "llama3"


@pytest.mark.parametrize("name", NAMES)
def test_config_check_names_the_file_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / NAMES[name]
    file.write_text(TEXT, encoding="utf-8")
    main(["config", "check", str(file), "--for-machine", "none"])
    output = capsys.readouterr().out

    assert re.search(rf"[\x00-\x08\x0b-\x1f{CONTROLS}]", output) is None
    assert re.search(r"\.toml: \d+ errors?, \d+ notes?$", output.splitlines()[-1])
    assert "planted.py" not in output.splitlines()[0]
