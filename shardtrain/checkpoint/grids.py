"""Grids: the pieces of a sharded tensor that follow each other with equal sizes, written down as one.

FSDP over 2,048 ranks cuts a tensor into 2,048 boxes of one size, each in the next rank's file at the same place. A
``Grid`` says so once: the first box, and along which dimension it is repeated how often, with what step between files.
Axes are nested, the innermost first, and each repeats what the ones before it cover, so a grid covers a box too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from shardtrain.checkpoint.resharding import Box, Ints, overlap


class Chunk(NamedTuple):
    """A box of a tensor, and where its bytes begin in a file; rows are stored one after the other, little-endian."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    begin: int

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.sizes)


class Axis(NamedTuple):
    """So many repeats along a dimension, each as far from the last as what is repeated is long."""

    repeats: int
    dim: int
    file_step: int


class Overlaps(NamedTuple):
    """Boxes of a grid that share something with another box, as one row each of arrays."""

    files: Ints
    """(n,)"""
    offsets: Ints
    """(n, dims): where each begins"""
    shared_offsets: Ints
    """(n, dims): where what it shares begins"""
    shared_sizes: Ints
    """(n, dims)"""


@dataclass(frozen=True)
class Grid:
    """Boxes of equal sizes that begin at the same byte of different files; without axes a single one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    begin: int
    axes: tuple[Axis, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of one of its boxes."""
        return math.prod(self.sizes)

    @property
    def count(self) -> int:
        """How many boxes."""
        return math.prod(axis.repeats for axis in self.axes)

    @cached_property
    def box(self) -> Box:
        """What all its boxes cover together."""
        whole = list(self.sizes)
        for axis in self.axes:
            whole[axis.dim] *= axis.repeats
        return self.offsets, tuple(whole)

    def is_in(self, file: int) -> bool:
        """Whether one of its boxes is in a file."""
        return file - self.file in _file_offsets(self.axes)

    def overlaps(self, box: Box) -> Overlaps | None:
        """The boxes that share something with another, in order, and what they share; None where none does."""
        import numpy as np  # here, since whoever looks at a folder needs no NumPy

        wanted = overlap(self.box, box)
        if wanted is None:
            return None
        # From the whole grid inwards: of what is left along an axis, keep the repeats that reach into what is wanted.
        # ``files`` and ``offsets`` are of what is kept so far, ``extent`` is how large each of it is.
        low = np.array(wanted[0], np.int64)
        high = low + wanted[1]
        files = np.array([self.file])
        offsets = np.array([self.offsets], np.int64)
        extent = list(self.box[1])
        for repeats, dim, file_step in reversed(self.axes):
            step = extent[dim] // repeats
            start = offsets[:, dim]
            first = (np.maximum(low[dim], start) - start) // step
            number, which = ranges(first, -((start - np.minimum(high[dim], start + extent[dim])) // step))
            offsets = offsets[which]
            files = files[which] + number * file_step
            offsets[:, dim] += number * step
            extent[dim] = step
        shared = np.maximum(offsets, low)
        return Overlaps(files, offsets, shared, np.minimum(offsets + self.sizes, high) - shared)

    def overlapping(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """The same one by one."""
        overlaps = self.overlaps(box)
        for file, *rows in zip(*(field.tolist() for field in overlaps), strict=True) if overlaps else ():
            offsets, starts, sizes = map(tuple, rows)
            yield Chunk(offsets, self.sizes, file, self.begin), (starts, sizes)

    def chunks(self) -> Iterator[Chunk]:
        """All its boxes one by one."""
        steps = []
        extent = list(self.sizes)
        for repeats, dim, _ in self.axes:
            steps.append(extent[dim])
            extent[dim] *= repeats
        outermost_first = [*zip(self.axes, steps, strict=True)][::-1]
        for numbers in itertools.product(*(range(axis.repeats) for axis, _ in outermost_first)):
            offsets = list(self.offsets)
            file = self.file
            for number, (axis, step) in zip(numbers, outermost_first, strict=True):
                offsets[axis.dim] += number * step
                file += number * axis.file_step
            yield Chunk(tuple(offsets), self.sizes, file, self.begin)


def ranges(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """The numbers of many ranges, one after the other, and which range each is of.

    >>> import numpy as np
    >>> [found.tolist() for found in ranges(np.array([5, 0]), np.array([7, 1]))]
    [[5, 6, 0], [0, 0, 1]]
    """
    import numpy as np

    counts = stops - starts
    which = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(which)) + (starts + counts - np.cumsum(counts))[which], which


def file_numbers(first: int, axes: tuple[Axis, ...]) -> list[int]:
    """The file of each box of a grid whose first box is in file ``first``."""
    numbers = [first]
    for axis in axes:
        numbers = [number * axis.file_step + file for number in range(axis.repeats) for file in numbers]
    return numbers


@lru_cache(maxsize=64)
def _file_offsets(axes: tuple[Axis, ...]) -> frozenset[int]:
    return frozenset(file_numbers(0, axes))
