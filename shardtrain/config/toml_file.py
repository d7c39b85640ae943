"""Reading of untrusted TOML files. Files that would cost much time or memory are rejected before parsing."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

from shardtrain.config import presets
from shardtrain.config.coerce import parse_toml
from shardtrain.config.option_arguments import CONFIG_FILE
from shardtrain.config.options import nearest
from shardtrain.facts.file_kinds import dataset_of
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import Problem

MAX_FILE_BYTES = 2**20
"""Maximum size of a file."""

MAX_VALUES = 5_000
"""Maximum number of keys and values in a file. 100 datasets with weights in 20 stages are 2,000."""

_KEY = r"""[ \t]*(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')[ \t]*"""
DEEP_KEY = re.compile(rf"(?:^|[{{,])[ \t]*\[{{0,2}}{_KEY}(?:\.{_KEY}){{16}}", re.MULTILINE)
"""Pattern of a key with 17 parts. No option has more than 5."""


def parse_file(file: Path, problems: list[Problem]) -> tuple[dict[str, Any], str]:
    """Return the tables and the text of a TOML file. If it is invalid, add a problem and return ({}, "")."""

    def refuse(rule: str, fix: str) -> tuple[dict[str, Any], str]:
        problems.append(Problem(CONFIG_FILE, str(file), rule, fix))
        return {}, ""

    try:
        content = bounded_reads.start(file, MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            rule = f"has more than {MAX_FILE_BYTES} bytes, which no configuration has"
            return refuse(rule, "name a configuration file")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return refuse("is not UTF-8 text", _meant(file) or "save it as UTF-8")
    except OSError as error:
        problems.append(_unreadable(file, error))
        return {}, ""

    try:
        # Check this before parsing: the parser's time and memory grow with the square of a key's length.
        if DEEP_KEY.search(text):
            raise RecursionError
        table = parse_toml(text)
    except RecursionError:
        return refuse("nests its values too deeply", "write plain tables and lists")
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        # without a line it is "at end of document"
        line = match[1] if match else len(text.rstrip().splitlines())
        # The line number becomes the problem's origin, so remove it from the text.
        reason = re.sub(r" \(at .*\)$", "", str(error))
        rule = f"is not valid TOML: {reason}"
        fix = _meant(file) or "correct this line"
        problems.append(Problem("the file", None, rule, fix, f"{file.name}:{line}"))
        return {}, ""
    except ValueError as error:  # an integer with too many digits
        return refuse(f"cannot be read ({error})", "correct the number")

    if num_values(table) > MAX_VALUES:
        rule = f"holds more than {MAX_VALUES} keys and values, which no configuration has"
        return refuse(rule, "name a configuration file")
    return table, text


def _meant(file: Path) -> str:
    """Return the fix for a file that is not TOML, according to its suffix. "" for unknown suffixes."""
    suffix = file.suffix.lower()
    name = shlex.quote(str(file))
    if suffix in (".json", ".yml", ".yaml"):
        return f"write it as TOML: shardtrain config migrate {name} -o new.toml"
    dataset = dataset_of(file.name)
    if dataset is not None:
        options = f"--training.dataset {dataset} --training.dataset_path {name}"
        return f"the configuration comes first, and data as {options}"
    if suffix in (".safetensors", ".bin", ".pt", ".pth"):
        return "name a configuration; weights to begin with are checkpoint.initial_load_path"
    if suffix == ".py":
        return f"name a configuration; a model of your own is --model.name {name}"
    return ""


def num_values(value: Any) -> int:
    """Return the number of keys and values in nested tables and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return 0
    return len(value) + sum(num_values(item) for item in value)


def _unreadable(file: Path, error: OSError) -> Problem:
    """Return the problem of a file that cannot be opened. Suggest a file with a similar name."""
    if file.is_dir():
        return Problem(CONFIG_FILE, str(file), "is a folder", "name the TOML file in it")
    if file.exists():
        return Problem(
            CONFIG_FILE,
            str(file),
            rule=f"cannot be read ({error.strerror})",
            fix="allow reading it",
        )
    if file.is_symlink():
        rule = f"is a broken link ({error.strerror})"
        return Problem(CONFIG_FILE, str(file), rule, "repair the link")
    folder = file.parent
    names = []
    if folder.is_dir():
        names = sorted(name for name in os.listdir(folder) if name.endswith(".toml"))
    near = nearest(file.name, names)
    # The README names the files of presets, which are not in the user's folder.
    if file.suffix == ".toml" and file.stem in presets.names():
        fix = f"the preset of that name comes with the package: write {file.stem}"
    elif not near and file.suffix == "" and len(file.parts) == 1:
        preset = nearest(file.name, presets.names())
        fix = (
            f"did you mean {preset}? " if preset else ""
        ) + f"presets are {', '.join(presets.names())}"
    elif near:
        fix = f"did you mean {folder / near}?"
    elif names:
        fix = f"{folder} has {', '.join(names[:8])}"
    else:
        fix = f"the folder {folder} does not exist"
        if folder.is_dir():
            fix = f"{folder.absolute()} has no TOML file"
    return Problem(CONFIG_FILE, str(file), "does not exist", fix)
