"""JSON Schema of the options, which editors use to complete and check TOML files."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from shardtrain.config.options import options, options_of, sections
from shardtrain.utils import atomic_io

DIALECT = "http://json-schema.org/draft-07/schema#"
"""Dialect that Taplo and editors built on it (VS Code's Even Better TOML, Helix, Neovim) support."""
FILE = "shardtrain.schema.json"
"""Name of the schema file, which is in the same folder as the TOML files that refer to it."""
DIRECTIVE = f"#:schema ./{FILE}"
"""First line of a TOML file, which refers to the schema."""


def json_schema() -> dict[str, Any]:
    """Return the schema of a full configuration. It rejects unknown keys."""
    root: dict[str, Any] = {"$schema": DIALECT, "title": "shardtrain", **_table("")}
    return root


def json_schema_text() -> str:
    """Return the content of the schema file."""
    return json.dumps(json_schema(), indent=1) + "\n"


def write_schema_next_to(toml: Path) -> None:
    """Write the schema into the folder of a TOML file, unless it is already there.

    Replacing a different file is reported on stderr.

    Raises:
        OSError: the file cannot be written.
    """
    path = toml.with_name(FILE)
    text = json_schema_text()
    is_there = path.is_file()
    if is_there and _reads(path, text):
        return
    atomic_io.write(path, text, create_folder=True)
    if is_there:
        print(f"note: replaced {path}, which was not the schema of this version", file=sys.stderr)


def _reads(path: Path, text: str) -> bool:
    """True if the file contains exactly this text."""
    try:
        return path.stat().st_size == len(text.encode()) and path.read_bytes() == text.encode()
    except OSError:
        return False


def _table(section: str) -> dict[str, Any]:
    """Return the schema of a section with its options and subsections."""
    properties = {}
    for name, option in options().items():
        parent, _, key = name.rpartition(".")
        if parent == section:
            properties[key] = _option(option)
    for name in sections():
        parent, _, key = name.rpartition(".")
        if name and parent == section:
            properties[key] = _table(name)
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _option(option: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {**_kind(option.kind), "description": option.help}
    default = option.default
    if (
        default is not None
        and not dataclasses.is_dataclass(default)
        and not isinstance(default, dict)
    ):
        schema["default"] = default
    return schema


def _kind(kind: Any) -> dict[str, Any]:
    """Return the schema of a type. None is omitted, because TOML has no null: an unset key is absent."""
    origin = get_origin(kind)
    args = [arg for arg in get_args(kind) if arg is not type(None)]
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        if len(args) == 1:
            return _kind(args[0])
        return {"anyOf": [_kind(arg) for arg in args]}
    if origin is list:
        return {"type": "array", "items": _kind(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _kind(args[1])}
    if dataclasses.is_dataclass(kind):
        options = options_of("", kind)  # type: ignore[arg-type]
        entry = {name.rpartition(".")[2]: _option(option) for name, option in options.items()}
        return {"type": "object", "additionalProperties": False, "properties": entry}
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[kind]}
