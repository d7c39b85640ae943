"""Convert one JSON object to a row, or to a bad row with the reason."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from shardtrain.data.sources import BadRow, Row
from shardtrain.utils import checked_json

_TYPES = {
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


_MAX_DEPTH = 200
"""Maximum nesting of a row. Python's own limit depends on the caller, and a row must be the same for all."""


class _Refused(ValueError):
    """Raised inside the decoder for JSON that Python accepts and this package does not."""

    def __init__(self, row: BadRow) -> None:
        super().__init__(row.reason)
        self.row = row


def parse_bytes(data: bytes) -> Row:
    """Parse one JSON object in UTF-8; see parse_text."""
    try:
        return parse_text(data.decode())
    except UnicodeDecodeError as error:
        return not_utf8(error)


def parse_text(text: str) -> Row:
    """Parse one JSON object. Return a BadRow for other values, duplicate keys, NaN, and text that is not
    Unicode.

    Escaped control characters, including U+0000, are kept.
    """
    try:
        checked_json.check_memory(text, checked_json.ROW_MEMORY_BYTES)
        value = _DECODER.decode(text)
        if not isinstance(value, dict):
            return BadRow(f"is not a JSON object but {_TYPES[type(value)]}")
        # half of a surrogate pair would fail in every tokenizer
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
        # count brackets first, because few rows have enough of them to be nested so deeply
        if text.count("{") + text.count("[") > _MAX_DEPTH and _too_deep(value):
            return _TOO_DEEP
    except _Refused as refused:
        return refused.row
    except checked_json.TooLargeError as error:
        return BadRow("is too large", detail=str(error))
    except json.JSONDecodeError as error:
        message = error.msg[0].lower() + error.msg[1:].removesuffix(" at")
        return BadRow(f"is not JSON: {message}", detail=f"column {error.pos + 1}")
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        return BadRow("contains half of a surrogate pair, which is not text", detail=escape)
    except RecursionError:
        return _TOO_DEEP
    # int() rejects numbers with very many digits
    except ValueError:
        return BadRow("contains a number with too many digits")
    return value


def _too_deep(value: Any) -> bool:
    """True if a value is nested deeper than the limit."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            inner += item.values() if isinstance(item, dict) else item
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def not_utf8(error: UnicodeDecodeError, shift: int = 0) -> BadRow:
    """Return the bad row of bytes that are not UTF-8.

    ``shift`` is the number of bytes that were skipped before them.
    """
    number = error.start + shift + 1
    byte = error.object[error.start]
    return BadRow("is not UTF-8", detail=f"byte {number} is 0x{byte:02x}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise _Refused(BadRow("has a duplicate key", detail=json.dumps(twice)))
    return result


def _constant(name: str) -> NoReturn:
    raise _Refused(BadRow(f"contains {name}, which is not JSON"))


_TOO_DEEP = BadRow("is nested too deeply", detail=f"more than {_MAX_DEPTH} levels")
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
