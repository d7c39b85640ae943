"""Read the metadata of a dataset on one rank, and broadcast it to all others.

Metadata are the list of files, their sizes and times, and the offsets of rows. If each of a thousand ranks
read them, the storage would receive a thousand times more requests. So code that opens data reads metadata
through ``once``. Outside of ``shared``, ``once`` calls the reader directly. Inside, it is a collective, and
all ranks must open the same data in the same order.
Values are broadcast as JSON and arrays, never as pickles.

A node may have a separate copy of the data, whose files have other times than on rank 0's node,
see ``Listing``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Look = Callable[[], Any]
"""A function that reads the storage. It returns JSON values and arrays, in lists and in dicts with string keys."""
MAX_WITNESSES = 8
"""Number of files that a node checks to find out whether it has the same storage as rank 0."""


@dataclass(frozen=True)
class Witness:
    """Identity of a file that rank 0 has listed. A node checks that it finds the same file."""

    option: str
    path: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Listing:
    """Functions with which a node checks that rank 0's list of files is valid for the node's storage.

    Attributes:
        witnesses: selects some files from the result of ``once``.
        content: a hash of what must be equal in all copies, such as names and sizes. By default, nothing must be.
        difference: describes how the content of the second of two results differs, as "lacks ..." or "has ...".
    """

    witnesses: Callable[[Any], Sequence[Witness]]
    content: Callable[[Any], str] = lambda result: ""
    difference: Callable[[Any, Any], str] = lambda result, other: ""


class Ranks(Protocol):
    """Interface of the ranks that open data together."""

    def once(self, place: str, look: Look, listing: Listing | None) -> Any:
        """Implementation of ``once`` on these ranks."""
        ...

    def is_watched_here(self, place: str) -> bool:
        """Implementation of ``is_watched_here`` on these ranks."""
        ...


_ranks: Ranks | None = None


@contextmanager
def shared(ranks: Ranks) -> Iterator[None]:
    """Context manager inside which ``once`` is a collective of these ranks. All ranks must enter it."""
    global _ranks
    before = _ranks
    _ranks = ranks
    try:
        yield
    finally:
        _ranks = before


def once(place: str, look: Look, listing: Listing | None = None) -> Any:
    """Call ``look`` and return its result.

    Within ``shared``, only rank 0 calls ``look``, and all ranks return its result or raise its error. If a
    node has its own copy of the data, one rank of this node calls ``look`` for the node.

    Args:
        place: the folder, file or pattern that is read.
        look: reads the storage.
        listing: how to recognize a copy. Pass it in the first call for a place, which lists its files.
    """
    if _ranks is None:
        return look()
    return _ranks.once(place, look, listing)


def is_watched_here(place: str) -> bool:
    """True if this rank must check that files have not changed, for all ranks that use the same result."""
    return _ranks is None or _ranks.is_watched_here(place)


def spread(count: int, most: int = MAX_WITNESSES) -> list[int]:
    """Return at most ``most`` of the numbers below ``count``, evenly spread, with the first and the last.

    >>> spread(3), spread(101, 3)
    ([0, 1, 2], [0, 50, 100])
    """
    if count <= most:
        return list(range(count))
    return [number * (count - 1) // (most - 1) for number in range(most)]


_ARRAY = "array"


def encode(value: Any) -> list[memoryview]:
    """Encode JSON values and arrays as consecutive buffers."""
    # In the JSON, a placeholder with dtype and length represents each array. The arrays follow in the same
    # order. Dicts are encoded as lists of pairs, and lists as dicts. Otherwise a dict of the value could
    # look like a placeholder.
    arrays: list[np.ndarray[Any, Any]] = []

    def to_json(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            arrays.append(np.ascontiguousarray(part).reshape(-1))
            return {_ARRAY: [part.dtype.str, len(arrays[-1])]}
        if isinstance(part, dict):
            return [[key, to_json(one)] for key, one in part.items()]
        if isinstance(part, list | tuple):
            return {"list": [to_json(one) for one in part]}
        return part

    # Pad each buffer to a multiple of 8 bytes, because ``decode`` returns views, which must be aligned.
    text = json.dumps(to_json(value)).encode()
    text += b" " * (-len(text) % 8)
    parts = [memoryview(len(text).to_bytes(8, "little")), memoryview(text)]
    for array in arrays:
        parts += [array.view(np.uint8).data, memoryview(bytes(-array.nbytes % 8))]
    return parts


def decode(data: memoryview) -> Any:
    """Decode the result of ``encode``. Arrays are views of ``data``."""
    size = int.from_bytes(data[:8], "little")
    at = 8 + size

    # Arrays follow the JSON text, in the order of their descriptions.
    def restore(part: Any) -> Any:
        nonlocal at
        if isinstance(part, list):
            return {key: restore(value) for key, value in part}
        if not isinstance(part, dict):
            return part
        if _ARRAY not in part:
            return [restore(value) for value in part["list"]]
        dtype = np.dtype(part[_ARRAY][0])
        count = int(part[_ARRAY][1])
        array = np.frombuffer(data, dtype, count, at) if count else np.array([], dtype)
        at += array.nbytes + -array.nbytes % 8
        return array

    return restore(json.loads(bytes(data[8 : 8 + size])))


class CheckAtSeek:
    """Checks at each seek of a feed, except the first one, that its files have not changed.

    Only one of the ranks that have opened the files together checks them. The others notice a changed file
    when they open it, or through their ``FilesWatch``.
    """

    def __init__(self, check: Callable[[], None], place: str) -> None:
        self._check = check
        self._is_first = True
        self._is_ours = is_watched_here(place)

    def __call__(self) -> None:
        """Raise ConfigError if a file was changed or removed."""
        if self._is_ours and not self._is_first:
            self._check()
        self._is_first = False
