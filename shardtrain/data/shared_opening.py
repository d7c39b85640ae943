"""What opening a dataset asks its storage is asked once, by one rank, and broadcast to all others.

Which files there are, their sizes and times, where their rows begin: a thousand ranks that each asked for themselves
would be a thousand times the work of the storage, at one moment. Code that opens data asks through ``once``, which
alone asks at once; while ``shared`` is in force it is a collective, so that ranks must open the same data in the same
order. JSON values and arrays are broadcast, never pickles.

Storage may be a node's own, and files there have other times than on the first rank's node: see ``Listing``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Look = Callable[[], Any]
"""Asks the storage; gives JSON values and arrays, in lists and in dicts whose keys are texts."""

MOST_WITNESSES = 8
"""Files of a dataset at which a node looks to tell whether its storage is that of the first rank."""


@dataclass(frozen=True)
class Witness:
    """A file as it was listed."""

    option: str
    path: str
    size: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True)
class Listing:
    """How nodes tell whether what was listed is theirs too.

    witnesses:  some files of what ``once`` found.
    difference: what the second of two lists lacks or has more than the first, as the end of a sentence that begins with
                who; empty where they name the same files of equal size.
    """

    witnesses: Callable[[Any], Sequence[Witness]]
    difference: Callable[[Any, Any], str]


class Ranks(Protocol):
    """Those that open data together."""

    def once(self, place: str, look: Look, listing: Listing | None) -> Any:
        """What ``once`` gives, on these ranks."""
        ...

    def is_watched_here(self, place: str) -> bool:
        """What ``is_watched_here`` gives, on these ranks."""
        ...


_ranks: Ranks | None = None


@contextmanager
def shared(ranks: Ranks) -> Iterator[None]:
    """Let these ranks open data together; all of them do the same inside."""
    global _ranks
    before = _ranks
    _ranks = ranks
    try:
        yield
    finally:
        _ranks = before


def once(place: str, look: Look, listing: Listing | None = None) -> Any:
    """What ``look`` gives: of this process where it is alone, else of the first rank, whose errors all ranks raise.

    ``place`` is the folder, file or pattern that is looked at. Whoever lists the files of a place gives a ``listing``
    and goes first; where the place is a node's own, one rank of each such node looks from then on.
    """
    return look() if _ranks is None else _ranks.once(place, look, listing)


def is_watched_here(place: str) -> bool:
    """Whether this rank checks, for all that receive what it found, that files of a place are still what they were."""
    return _ranks is None or _ranks.is_watched_here(place)


def spread(count: int, most: int = MOST_WITNESSES) -> list[int]:
    """At most so many of the numbers below ``count``, evenly spread, with the first and the last.

    >>> spread(3), spread(101, 3)
    ([0, 1, 2], [0, 50, 100])
    """
    if count <= most:
        return list(range(count))
    return [number * (count - 1) // (most - 1) for number in range(most)]


_ARRAY = "array"


def encode(value: Any) -> list[memoryview]:
    """The bytes of JSON values and arrays, as parts that follow each other."""
    # The JSON has a place for each array, of its type and length; the arrays follow it in the order of their places.
    # Dicts are lists of pairs there and lists are dicts, so that no key can look like a place.
    arrays: list[np.ndarray[Any, Any]] = []

    def plain(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            arrays.append(np.ascontiguousarray(part).reshape(-1))
            return {_ARRAY: [part.dtype.str, len(arrays[-1])]}
        if isinstance(part, dict):
            return [[key, plain(one)] for key, one in part.items()]
        if isinstance(part, list | tuple):
            return {"list": [plain(one) for one in part]}
        return part

    # All is filled up to multiples of 8, since arrays of eight-byte numbers are read where they lie.
    text = json.dumps(plain(value)).encode()
    text += b" " * (-len(text) % 8)
    parts = [memoryview(len(text).to_bytes(8, "little")), memoryview(text)]
    for array in arrays:
        parts += [array.view(np.uint8).data, memoryview(bytes(-array.nbytes % 8))]
    return parts


def decode(data: memoryview) -> Any:
    """What ``encode`` was given; arrays lie in ``data``."""
    size = int.from_bytes(data[:8], "little")
    at = 8 + size

    def whole(part: Any) -> Any:
        nonlocal at
        if isinstance(part, list):
            return {key: whole(one) for key, one in part}
        if not isinstance(part, dict):
            return part
        if _ARRAY not in part:
            return [whole(one) for one in part["list"]]
        dtype = np.dtype(part[_ARRAY][0])
        count = int(part[_ARRAY][1])
        array = np.frombuffer(data, dtype, count, at) if count else np.array([], dtype)
        at += array.nbytes + -array.nbytes % 8
        return array

    return whole(json.loads(bytes(data[8 : 8 + size])))


class LooksAtSeek:
    """Looks whether the files of a feed are still what they were when it is sought, but the first time.

    They were just listed then. Of ranks that opened them together one looks: the others find a file changed when they
    open it, or by their ``FilesWatch``.
    """

    def __init__(self, check: Callable[[], None], place: str) -> None:
        self._check = check
        self._is_first = True
        self._is_ours = is_watched_here(place)

    def __call__(self) -> None:
        """Raise ConfigError where a file was changed or removed."""
        if self._is_ours and not self._is_first:
            self._check()
        self._is_first = False
