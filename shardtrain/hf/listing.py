"""Describe a Hugging Face folder in one line, from its JSON files and safetensors headers. Imports no torch."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from shardtrain.facts.dtypes import SAFETENSORS_NAMES
from shardtrain.hub_formats import safetensors_header
from shardtrain.hub_formats.config_json import CONFIG, read_json
from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import CheckpointError
from shardtrain.utils.units import format_bytes

INDEX = "model.safetensors.index.json"
_MOST_CHARACTERS = 100
"""Maximum length of a name. Longer names are truncated, because a file may contain any name."""
_MOST_NAMES = 20
"""Maximum number of names per list."""


def line(folder: Path) -> str:
    """Return name, size, architecture, tensor counts by dtype, and missing or truncated files of a
    folder in one line.

    Raises:
        CheckpointError: config.json or the index cannot be read.
    """
    config = read_json(folder / CONFIG)
    named = config.get("architectures")
    name = config.get("model_type")
    if isinstance(named, list) and named:
        name = named[0]
    architecture = "no architecture"
    if name is not None:
        architecture = _short(str(name))

    # List the files that exist, and the missing files that the index names.
    sizes = 0
    types = Counter[str]()
    wrong: list[str] = []
    files = {path.name: path for path in folder.glob("*.safetensors")}
    if bounded_reads.is_present(folder / INDEX):
        table = read_json(folder / INDEX, checked_json.LARGE_MEMORY_BYTES).get("weight_map")
        if isinstance(table, dict):
            wrong += sorted({str(file) for file in table.values()} - files.keys())
        else:
            wrong.append(INDEX)
    for name, path in sorted(files.items()):
        sizes += path.stat().st_size
        dtypes = _types_of(path)
        types.update(dtypes or ())
        if dtypes is None:
            wrong.append(name)

    counts = [f"{count} {_short(dtype)}" for dtype, count in sorted(types.items())]
    kinds = ", ".join(_few(counts))
    columns = [
        os.path.basename(os.path.realpath(folder)),
        format_bytes(sizes),
        architecture,
        f"{types.total()} tensors",
        kinds or "no safetensors",
    ]
    if wrong:
        columns.append(f"missing or cut: {', '.join(_few(wrong))}")
    # Names in a file could contain control characters of a terminal.
    text = "  ".join(columns)
    return "".join(c if c.isprintable() else "?" for c in text)


def _short(name: str) -> str:
    if len(name) <= _MOST_CHARACTERS:
        return name
    return f"{name[:_MOST_CHARACTERS]}... ({len(name)} characters)"


def _few(names: list[str]) -> list[str]:
    shown = [_short(name) for name in names[:_MOST_NAMES]]
    if len(names) > _MOST_NAMES:
        shown.append(f"and {len(names) - _MOST_NAMES} more")
    return shown


def _types_of(path: Path) -> list[str] | None:
    """Return the dtype of each tensor, or None if the file is truncated or not a safetensors file."""
    names = {stored: name for name, stored in SAFETENSORS_NAMES.items()}
    try:
        header = safetensors_header.read(path)
        memory_bytes = checked_json.LARGE_MEMORY_BYTES
        tensors: dict[str, Any] = checked_json.parse(header, memory_bytes=memory_bytes)
        tensors.pop("__metadata__", None)
        end = 0
        dtypes = []
        for tensor in tensors.values():
            end = max(end, tensor["data_offsets"][1])
            stored = tensor["dtype"]
            dtypes.append(names.get(stored, str(stored)))
        # A truncated file is shorter than the offsets in its header require.
        if path.stat().st_size != safetensors_header.LENGTH_BYTES + len(header) + end:
            return None
        return dtypes
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
