"""Parse JSON with limited memory, and read and write JSON lines that end with a checksum.

All numbers must be finite. Python objects may take 50 times the size of their JSON text. For example,
``[],`` has 3 bytes and becomes a list of 72 bytes. ``parse`` therefore estimates the memory from the
punctuation of the text before it creates objects.

The checksum detects a digit that has changed on disk. It is the last field of a line, ``crc32``, and
covers the line without that field. Lines without a checksum are accepted, because an older version or
another program may have written them.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from shardtrain.utils.units import format_bytes

MEMORY_BYTES = 2**28
"""Default memory of the objects of one text. A config.json of 2 MB takes 40 MB."""
LARGE_MEMORY_BYTES = 2**30
"""Memory for files with an entry per tensor, token or shard: indexes, headers and tokenizers.

A tokenizer.json of 30 MB takes 0.6 GB. An index of a million tensors takes 0.5 GB.
"""
ROW_MEMORY_BYTES = 2**29
"""Memory of a row of data, which has at most data.max_row_bytes (16 MiB by default)."""
_MAX_RATIO = 200
"""Upper bound of the memory per byte of a text. Memory is only estimated for texts that may exceed the limit."""
_COSTS = {"[": 96, "{": 192, ",": 48, ":": 170}
"""Bytes per punctuation character: a container, an element of one, and a key with its hash entries.

Measured with CPython 3.11 to 3.14. The memory of a key includes temporary pairs of the parser.
"""
_QUOTE_COST = 32
"""Half of the size of a string object without its characters, because a string has two quotes."""
_BLOCK_BYTES = 2**18
_ASTRAL = re.compile(rb"[\xf0-\xff]|\\u[dD]")
"""Characters above U+FFFF. A string with one of them has 4 bytes per character."""
FIELD = "crc32"
_MARK = b', "%s": "' % FIELD.encode()
_MAY_BE_INFINITE = frozenset({"time_step_limit"})
"""Keys that are infinite in published files: the bounds of Mamba-2's time step in ``config.json``."""
_MAX_DIGITS = 300
"""Maximum length of an integer. A float cannot hold one of 309 digits, so code that expects a float would fail."""
MAX_LINE_BYTES = 2**20
"""Limit for a record of numbers and short texts. Parsing a line may take a hundred times its size in memory."""


class TooLargeError(ValueError):
    """The objects of a JSON text would take more memory than the limit."""


def parse(data: bytes | str, unique_keys: bool = False, memory_bytes: int = MEMORY_BYTES) -> Any:
    """Parse the JSON of an artefact, whose numbers must be finite.

    Args:
        data: The text. Bytes must be UTF-8.
        unique_keys: Reject an object with a duplicate key. Otherwise the last value is used.
        memory_bytes: Maximum memory of the objects and of the decoded text.

    Raises:
        TooLargeError: the objects would take more than ``memory_bytes``.
        ValueError: the text is not JSON, nests too deeply, or contains NaN, an infinite number
            (``NaN``, ``Infinity``, ``1e999``) or an integer of more than 300 digits.

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
                shown = reprlib.repr(value)[:60]
                raise ValueError(f"{key[:60]}={shown} has a number that is not finite")
        return table

    check_memory(data, memory_bytes)
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    try:
        content = json.loads(text, object_pairs_hook=checked, parse_int=_integer)
        # The hook sees only objects, so check a list or number outside of them.
        is_finite = _is_finite(content)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    if not is_finite:
        raise ValueError("a number is not finite")
    return content


def check_memory(data: bytes | str, memory_bytes: int = MEMORY_BYTES) -> None:
    """Estimate the memory that parsing a JSON text would take, without ``data`` itself.

    Raises:
        TooLargeError: the estimate exceeds ``memory_bytes``.

    >>> check_memory(b"[" + b"[]," * 10_000 + b"0]", memory_bytes=2**20)
    Traceback (most recent call last):
    shardtrain.utils.checked_json.TooLargeError: its values need 1.43 MiB of memory, more than 1.00 MiB
    """
    if len(data) * _MAX_RATIO <= memory_bytes:
        return
    if isinstance(data, str):
        data = data.encode("utf-8", "surrogatepass")
    # Upper bound for the decoded text. All strings in it together have at most as many bytes.
    if data.isascii() and rb"\u" not in data:
        text_bytes = len(data)
    elif _ASTRAL.search(data):
        text_bytes = 4 * len(data)
    else:
        text_bytes = 2 * len(data)
    size = 2 * text_bytes + _memory_of(data)
    if size > memory_bytes:
        # Punctuation inside strings creates no objects. Count again without strings, which is slower.
        size = 2 * text_bytes + sum(map(_memory_of, _without_strings(data)))
    if size > memory_bytes:
        rule = f"more than {format_bytes(memory_bytes)}"
        raise TooLargeError(f"its values need {format_bytes(size)} of memory, {rule}")


def _memory_of(text: bytes) -> int:
    """Estimate the memory of the objects of a text from its punctuation."""
    size = _QUOTE_COST * text.count(b'"')
    for character, cost in _COSTS.items():
        size += cost * text.count(character.encode())
    return size


def _without_strings(data: bytes) -> Iterator[bytes]:
    """Yield the blocks of a JSON text without the contents of strings. Quotes are kept."""
    is_in_string = False
    start = 0
    while start < len(data):
        stop = min(start + _BLOCK_BYTES, len(data))
        # Do not cut an escape sequence, which begins with a backslash.
        while stop < len(data) and data[stop - 1 : stop] == b"\\":
            stop += 1
        block = data[start:stop].replace(rb"\\", b"").replace(rb"\"", b"")
        start = stop
        parts = block.split(b'"')
        outside = parts[int(is_in_string) :: 2]
        num_quotes = len(parts) - 1
        is_in_string ^= num_quotes % 2 == 1
        yield b"".join(outside) + b'"' * num_quotes


def is_count(value: Any, least: int = 0, most: int = 2**63 - 1) -> bool:
    """True if a value is an integer from ``least`` to ``most``, by default the maximum of int64.

    False for booleans.
    """
    return type(value) is int and least <= value <= most


def _integer(text: str) -> int:
    """Convert an integer of JSON. Raises ValueError if it is too long."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _is_finite(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


_LINE_DECODER = json.JSONDecoder(parse_int=_integer)
"""Shared by all lines, because creating a decoder takes as long as parsing a short line."""


def line_of(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON with a checksum. The record must have a field, and only finite numbers.

    >>> line_of({"step": 1, "loss": 2.5})
    b'{"step": 1, "loss": 2.5, "crc32": "2d8596d8"}\\n'
    """
    text = json.dumps(record, allow_nan=False).encode()
    return b'%s%s%08x"}\n' % (text[:-1], _MARK, zlib.crc32(text))


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line without its checksum.

    Return None if the checksum is wrong, or the line is not a JSON object or too long.

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
        record = _LINE_DECODER.decode(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    # Check only lines that end with a checksum. A script may have written the line, or added fields after the
    # checksum.
    text, mark, rest = line.rstrip().rpartition(_MARK)
    if mark and rest != b'%08x"}' % zlib.crc32(text + b"}") and next(reversed(record)) == FIELD:
        return None
    record.pop(FIELD, None)
    return record
