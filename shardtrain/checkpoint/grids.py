"""Grids: compact descriptions of the equally sized boxes of a sharded tensor.

FSDP over 2,048 ranks splits a tensor into 2,048 boxes of equal size, each in the next rank's file
at the same offset. A ``Grid`` stores the first box and the axes along which it repeats: a
dimension, a count, and the step between files. Axes are nested, innermost first. Each axis repeats
the box that the axes before it cover, without gaps. So the boxes of a grid together are one large box.
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
    """A box of a tensor and the offset of its bytes in a file. Its elements are contiguous and
    little-endian.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    begin: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


class Axis(NamedTuple):
    """Repeats along a dimension without gaps. ``file_step`` is the distance between the files of
    two repeats.
    """

    repeats: int
    dim: int
    file_step: int


class Overlaps(NamedTuple):
    """Boxes of a grid that overlap another box, with one row per box.

    Attributes:
        files: (n,)
        offsets: (n, dims), of the boxes.
        shared_offsets: (n, dims), of the overlaps.
        shared_sizes: (n, dims), of the overlaps.
    """

    files: Ints
    offsets: Ints
    shared_offsets: Ints
    shared_sizes: Ints


@dataclass(frozen=True)
class Grid:
    """Boxes of equal size at the same byte offset of different files. Without axes it is a single box."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    begin: int
    axes: tuple[Axis, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of one box."""
        return math.prod(self.sizes)

    @property
    def count(self) -> int:
        """Number of boxes."""
        return math.prod(axis.repeats for axis in self.axes)

    @cached_property
    def box(self) -> Box:
        """The box that all boxes of the grid cover together."""
        sizes = list(self.sizes)
        for axis in self.axes:
            sizes[axis.dim] *= axis.repeats
        return self.offsets, tuple(sizes)

    def is_in(self, file: int) -> bool:
        """True if a file contains one of its boxes."""
        return file - self.file in _file_offsets(self.axes)

    def overlaps(self, box: Box) -> Overlaps | None:
        """Return the boxes that overlap ``box``, in order, with the overlaps. None if there are none."""
        import numpy as np  # not at the top, because listing a folder does not need NumPy

        wanted = overlap(self.box, box)
        if wanted is None:
            return None
        wanted_offsets, wanted_sizes = wanted
        low = np.array(wanted_offsets, np.int64)
        high = low + wanted_sizes
        # Start with the entire grid and divide it, outermost axis first. Keep only repeats that
        # reach into ``wanted``. ``files`` and ``offsets`` describe the areas kept so far, and
        # ``extent`` is the size of each of them.
        files = np.array([self.file])
        offsets = np.array([self.offsets], np.int64)
        _, covered_sizes = self.box
        extent = list(covered_sizes)
        for repeats, dim, file_step in reversed(self.axes):
            step = extent[dim] // repeats
            start = offsets[:, dim]
            stop = start + extent[dim]
            wanted_start = np.maximum(low[dim], start)
            wanted_stop = np.minimum(high[dim], stop)
            first_repeat = (wanted_start - start) // step
            # Rounded up, by a division of the negative number.
            stop_repeat = -((start - wanted_stop) // step)
            repeat, area = ranges(first_repeat, stop_repeat)
            files = files[area] + repeat * file_step
            offsets = offsets[area]
            offsets[:, dim] += repeat * step
            extent[dim] = step
        shared_starts = np.maximum(offsets, low)
        shared_stops = np.minimum(offsets + self.sizes, high)
        return Overlaps(files, offsets, shared_starts, shared_stops - shared_starts)

    def overlapping(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """Yield each box that overlaps ``box``, with the overlap as (offsets, sizes)."""
        overlaps = self.overlaps(box)
        if overlaps is None:
            return
        # Lists of Python integers are much faster to iterate than arrays.
        columns = [column.tolist() for column in overlaps]
        for file, offsets, starts, sizes in zip(*columns, strict=True):
            chunk = Chunk(tuple(offsets), self.sizes, file, self.begin)
            yield chunk, (tuple(starts), tuple(sizes))

    def chunks(self) -> Iterator[Chunk]:
        """Yield all boxes."""
        # Two consecutive repeats along an axis are one block apart. A block contains all inner axes, so compute
        # its size from the innermost axis outward.
        steps = []
        extent = list(self.sizes)
        for repeats, dim, _ in self.axes:
            steps.append(extent[dim])
            extent[dim] *= repeats
        outermost_first = [*zip(self.axes, steps, strict=True)][::-1]
        repeats_of_axes = [range(axis.repeats) for axis, _ in outermost_first]
        for numbers in itertools.product(*repeats_of_axes):
            offsets = list(self.offsets)
            file = self.file
            for number, (axis, step) in zip(numbers, outermost_first, strict=True):
                offsets[axis.dim] += number * step
                file += number * axis.file_step
            yield Chunk(tuple(offsets), self.sizes, file, self.begin)


def ranges(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """Return the concatenated numbers of many ranges, and the index of the range of each number.

    >>> import numpy as np
    >>> [result.tolist() for result in ranges(np.array([5, 0]), np.array([7, 1]))]
    [[5, 6, 0], [0, 0, 1]]
    """
    import numpy as np

    counts = stops - starts
    which = np.repeat(np.arange(len(counts)), counts)
    # The i-th number of a range is its start plus i. In the result, i is the position minus that of the
    # range's first number.
    first_positions = np.cumsum(counts) - counts
    numbers = np.arange(len(which)) + (starts - first_positions)[which]
    return numbers, which


def file_numbers(first: int, axes: tuple[Axis, ...]) -> list[int]:
    """Return the file of each box of a grid whose first box is in file ``first``."""
    numbers = [first]
    for axis in axes:
        repeated = []
        for repeat in range(axis.repeats):
            file_offset = repeat * axis.file_step
            repeated += [file_offset + file for file in numbers]
        numbers = repeated
    return numbers


@lru_cache(maxsize=64)
def _file_offsets(axes: tuple[Axis, ...]) -> frozenset[int]:
    return frozenset(file_numbers(0, axes))
