"""Read a file with a single JSON array of objects. Such a file is read completely, so its size is limited."""

from __future__ import annotations

import json
import re
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardtrain.data import sandbox
from shardtrain.data.sources import Row
from shardtrain.data.sources._compressed import BLOCK_BYTES, Damaged, open_stream
from shardtrain.data.sources._data_files import File
from shardtrain.data.sources._index import BYTE_ORDER_MARK, too_long
from shardtrain.data.sources._json import parse_text
from shardtrain.utils import checked_json
from shardtrain.utils.errors import DataError

MAX_BYTES = 256 * 2**20
"""A larger array is rejected. Files with one object per line have no such limit."""

MAX_ELEMENTS = 2**23
"""Maximum number of elements. The positions of each take 48 bytes while they are collected."""
_ELEMENT_CHARACTERS = 16 * 2**20
_PART_CHARACTERS = 2**20
_MOVE_CHARACTERS = 2**18
_LOOK_EVERY = 4096

_SPACE = re.compile(r"[ \t\r\n]*")
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
"""A string or a bracket."""


def is_array(file: File) -> bool:
    """True if a ``.json`` file begins with an array. Files with other suffixes have one object per line."""
    if file.kind != ".json":
        return False
    with open_stream(file) as stream:
        try:
            head = stream.read(BLOCK_BYTES)
        except Damaged:
            return False
    return head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


@dataclass
class ArrayPart:
    """Elements of the array in one file; see Part. Keeps the text, and parses one element at a time.

    ``elements`` contains the start, stop and line of each element in the text, as arrays that ranks can
    send.
    """

    file: File
    elements: Mapping[str, npt.NDArray[np.int64]]
    max_row_bytes: int
    _text: str | None = None

    @property
    def num_rows(self) -> int:
        """Number of elements."""
        return len(self.elements["starts"])

    def row(self, index: int) -> Row:
        if self._text is None:
            self._text = _text(self.file)
        start = self.elements["starts"][index]
        stop = self.elements["stops"][index]
        piece = self._text[start:stop]
        num_bytes = len(piece) if piece.isascii() else len(piece.encode())
        if num_bytes > self.max_row_bytes:
            return too_long(num_bytes)
        return parse_text(piece)

    def place(self, index: int) -> str:
        """Return line and element number, because an array is often on one line."""
        return f"{self.elements['lines'][index]} (element {index + 1})"


def open_array(file: File, max_row_bytes: int) -> ArrayPart:
    """Find the elements of a file's array.

    Raises:
        DataError: the file is too large, or is not a JSON array. The message has the line.
    """
    text = _text(file)
    starts = array("q")
    stops = array("q")
    lines = array("q")
    limit = sandbox.limits().seconds
    since = time.thread_time()
    place = 0
    line = 1
    try:
        for start, stop in _elements(text, max_row_bytes):
            if len(starts) % _LOOK_EVERY == 0 and time.thread_time() - since > limit:
                rule = f"takes more than data.artefact_seconds={limit} to read"
                raise _broken(file, text, start, rule, "raise it, or write one object per line")
            if len(starts) == MAX_ELEMENTS:
                rule = f"is one JSON array of more than {MAX_ELEMENTS} elements"
                raise _broken(file, text, start, rule, "write one object per line")
            line += text.count("\n", place, start)
            place = start
            starts.append(start)
            stops.append(stop)
            lines.append(line)
    except json.JSONDecodeError as error:
        raise _broken(file, text, error.pos, f"is not a JSON array: {error.msg}") from error
    except RecursionError as error:
        raise _broken(file, text, _after_last(text, stops), "is nested too deeply") from error
    except ValueError as error:
        rule = "contains a number with too many digits"
        raise _broken(file, text, _after_last(text, stops), rule) from error
    elements = {
        "starts": np.array(starts, np.int64),
        "stops": np.array(stops, np.int64),
        "lines": np.array(lines, np.int64),
    }
    return ArrayPart(file, elements, max_row_bytes, text)


def _elements(text: str, max_row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each element of a JSON array, in characters.

    A JSON decoder finds the end of an element without keeping its value.

    Raises:
        json.JSONDecodeError: the text is not a JSON array.
        RecursionError: an element is nested too deeply.
        ValueError: an element contains a number with too many digits.
    """
    ends = _Ends(text, max_row_bytes)
    place = _after(text, text.index("[") + 1)
    has_more = not text.startswith("]", place)
    while has_more:
        stop = ends.after(place)
        yield place, stop
        place = _after(text, stop)
        has_more = text.startswith(",", place)
        if has_more:
            place = _after(text, place + 1)
    # The array must be closed, and nothing may follow it.
    if not text.startswith("]", place):
        raise json.JSONDecodeError("Expecting ',' or ']'", text, place)
    end = _after(text, place + 1)
    if end != len(text):
        raise json.JSONDecodeError("Expecting nothing after the array's end", text, end)


def _after_last(text: str, stops: Sequence[int]) -> int:
    """Return the start of the element after the last complete one, for a message."""
    if not stops:
        return _after(text, text.index("[") + 1)
    comma = _after(text, stops[-1])
    return _after(text, comma + 1)


class _Ends:
    """Finds the ends of elements.

    Decodes limited parts of the text, because one element could be gigabytes of empty lists.
    """

    def __init__(self, text: str, max_row_bytes: int) -> None:
        self._full_text = text
        self._max_characters = max(max_row_bytes, _ELEMENT_CHARACTERS)
        self._part = text[:_PART_CHARACTERS]
        self._first = 0
        self._decode = json.JSONDecoder().raw_decode

    def after(self, place: int) -> int:
        """Return the position after the element at ``place``.

        Raises JSONDecodeError if it is not valid, too long, or takes too much memory.
        """
        # move the part when the position is far into it, so it is copied once for many elements
        is_last = self._first + len(self._part) == len(self._full_text)
        if place - self._first > _MOVE_CHARACTERS and not is_last:
            self._part = self._full_text[place : place + _PART_CHARACTERS]
            self._first = place
            is_last = place + len(self._part) == len(self._full_text)
        try:
            return self._decode(self._part, place - self._first)[1] + self._first
        except json.JSONDecodeError as error:
            # an apparent error at the end of a part may be an element that continues after it
            is_cut = error.pos >= len(self._part) - 8 or error.msg.startswith("Unterminated string")
            if is_cut and not is_last:
                return self._after_long(place)
            at = error.pos + self._first
            raise json.JSONDecodeError(error.msg, self._full_text, at) from None

    def _after_long(self, place: int) -> int:
        """Return the position after an element that is longer than a part. Raises JSONDecodeError."""
        # Find its end without decoding it.
        depth = 0
        stop = place
        for token in _TOKEN.finditer(self._full_text, place, place + self._max_characters):
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
            if depth <= 0:
                stop = token.end()
                break
        if stop == place:
            rule = f"an element is longer than {self._max_characters} characters"
            raise json.JSONDecodeError(rule, self._full_text, place)
        element = self._full_text[place:stop]
        try:
            checked_json.check_memory(element, checked_json.ROW_MEMORY_BYTES)
            end = self._decode(element)[1]
        except checked_json.TooLargeError as error:
            raise json.JSONDecodeError(str(error), self._full_text, place) from None
        except json.JSONDecodeError as error:
            at = error.pos + place
            raise json.JSONDecodeError(error.msg, self._full_text, at) from None
        return place + end


def _text(file: File) -> str:
    """Read a file as text. Raises DataError if it is damaged, too large or not UTF-8."""
    pieces = []
    total = 0
    with open_stream(file) as stream:
        try:
            while total <= MAX_BYTES and (block := stream.read(BLOCK_BYTES)):
                pieces.append(block)
                total += len(block)
        except Damaged as error:
            raise file.unusable(f"cannot be read: {error}", "get the file again") from error
    if total > MAX_BYTES:
        rule = f"is one JSON array of more than {MAX_BYTES >> 20} MiB"
        raise file.unusable(rule, "write one object per line, as: jq -c '.[]'")
    data = b"".join(pieces).removeprefix(BYTE_ORDER_MARK)
    pieces.clear()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file.path}:{line}: is not UTF-8; convert the file to UTF-8") from error


def _after(text: str, place: int) -> int:
    """Return the position of the next character that is not whitespace."""
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _broken(
    file: File,
    text: str,
    place: int,
    rule: str,
    fix: str = "correct the file, or write one object per line",
) -> DataError:
    line = text.count("\n", 0, place) + 1
    return DataError(f"{file.path}:{line}: {rule}; {fix}")
