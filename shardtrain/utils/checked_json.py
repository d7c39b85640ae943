"""Lines of JSON that carry a checksum of themselves, so that a digit that changed on a disk is seen.

The last field of a line is ``crc32`` of the line without it, as TensorBoard's own records have one. A line that does
not end with it, of an older version or of another program that wrote the file again, is taken as it is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

FIELD = "crc32"
_MARK = b', "%s": "' % FIELD.encode()
MAX_LINE_BYTES = 2**20
"""Records are numbers and short texts; JSON of a longer line could take a hundred times its size in memory."""


def line_of(record: Mapping[str, Any]) -> bytes:
    """The line of a record, which has one field at least; its numbers must be finite.

    >>> line_of({"step": 1, "loss": 2.5})
    b'{"step": 1, "loss": 2.5, "crc32": "2d8596d8"}\\n'
    """
    text = json.dumps(record, allow_nan=False).encode()
    return b'%s%s%08x"}\n' % (text[:-1], _MARK, zlib.crc32(text))


def record_of(line: bytes) -> dict[str, Any] | None:
    """The record of a line, without its checksum; None where it is not what was written, or no object of JSON.

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
    # Only a line that ends with a checksum can have a wrong one.
    text, mark, rest = line.rstrip().rpartition(_MARK)
    if mark and rest != b'%08x"}' % zlib.crc32(text + b"}") and next(reversed(record)) == FIELD:
        return None
    record.pop(FIELD, None)
    return record
