"""Parsing of JSON with finite numbers only, and JSON lines that end with a checksum.

The checksum reveals a digit that has changed on disk. It is the last field of a line, ``crc32``, and
covers the line without that field. Lines without a checksum are accepted: an older version or another
program may have written them.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

FIELD = "crc32"
_MARK = b', "%s": "' % FIELD.encode()
_MAY_BE_INFINITE = frozenset({"time_step_limit"})
"""Keys that are infinite in published files: the bounds of Mamba-2's time step in ``config.json``."""
MAX_LINE_BYTES = 2**20
"""Records are numbers and short texts; JSON of a longer line could take a hundred times its size in memory."""


def parse(data: bytes | str, unique_keys: bool = False) -> Any:
    """Parse the JSON of an artefact, whose numbers must be finite.

    Args:
        data: The text.
        unique_keys: Reject an object with a duplicate key. Otherwise the last value is used.

    Raises:
        ValueError: It is not JSON, or a number is NaN or infinite (``NaN``, ``Infinity``, ``1e999``).

    >>> parse('{"eps": 1e-5, "theta": [2, 1e999]}')
    Traceback (most recent call last):
    ValueError: theta=[2, inf] has a number that is not finite
    """

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if unique_keys and len(table) != len(pairs):
            raise ValueError("a key occurs twice")
        for key, value in pairs:
            if not _is_finite(value) and key not in _MAY_BE_INFINITE:
                raise ValueError(f"{key}={str(value)[:60]} has a number that is not finite")
        return table

    content = json.loads(data, object_pairs_hook=checked)
    if not _is_finite(content):
        raise ValueError("a number is not finite")
    return content


def is_count(value: Any, least: int = 0, most: int = 2**63 - 1) -> bool:
    """True if a value is an integer from ``least`` to ``most``, by default the maximum of int64.

    Not for booleans.
    """
    return type(value) is int and least <= value <= most


def _is_finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON with a checksum. It needs at least one field, and finite numbers.

    >>> line_of({"step": 1, "loss": 2.5})
    b'{"step": 1, "loss": 2.5, "crc32": "2d8596d8"}\\n'
    """
    text = json.dumps(record, allow_nan=False).encode()
    return b'%s%s%08x"}\n' % (text[:-1], _MARK, zlib.crc32(text))


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, without its checksum. None if the checksum is wrong or it is not a JSON object.

    >>> record_of(b'{"step": 1, "loss": 2.5, "crc32": "2d8596d8"}')
    {'step': 1, 'loss': 2.5}
    >>> record_of(b'{"step": 1, "loss": 7.5, "crc32": "2d8596d8"}')
    >>> record_of(b'{"step": 1, "loss": 7.5, "crc32": "2d8596d8", "name": "of a script"}')
    {'step': 1, 'loss': 7.5, 'name': 'of a script'}
    >>> record_of(b'{"step": 1, "loss": 2.5}')
    {'step': 1, 'loss': 2.5}
    """
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    # Check only lines that end with a checksum. A script may have added fields after it, or written the line.
    text, mark, rest = line.rstrip().rpartition(_MARK)
    if mark and rest != b'%08x"}' % zlib.crc32(text + b"}") and next(reversed(record)) == FIELD:
        return None
    record.pop(FIELD, None)
    return record
