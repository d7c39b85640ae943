"""Grids: the pieces of a sharded tensor that follow each other with equal sizes, written down as one.

FSDP over 2,048 ranks cuts a tensor into 2,048 boxes of one size, each in the next rank's file at the same place. A
``Grid`` says so once: the first box, and along which dimension it is repeated how often, with what step between files.
Axes are nested, the innermost first, and each repeats what the ones before it cover, so a grid covers a box too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from shardtrain.checkpoint.resharding import Box, overlap


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

    def overlapping(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """The boxes that share something with another, in order, and what they share."""
        wanted = overlap(self.box, box)
        if wanted is None:
            return
        if not self.axes:
            yield Chunk(self.offsets, self.sizes, self.file, self.begin), wanted
            return
        *inner, (repeats, dim, file_step) = self.axes
        step, start = self.box[1][dim] // repeats, self.offsets[dim]
        low, high = wanted[0][dim], wanted[0][dim] + wanted[1][dim]
        before, after = slice(dim), slice(dim + 1, None)
        for number in range((low - start) // step, -((start - high) // step)):
            at, file = start + number * step, self.file + number * file_step
            offsets = (*self.offsets[before], at, *self.offsets[after])
            if inner:
                yield from Grid(offsets, self.sizes, file, self.begin, tuple(inner)).overlapping(box)
                continue
            begin, end = max(at, low), min(at + step, high)  # along the other dimensions all share the same
            shared = (
                (*wanted[0][before], begin, *wanted[0][after]),
                (*wanted[1][before], end - begin, *wanted[1][after]),
            )
            yield Chunk(offsets, self.sizes, file, self.begin), shared

    def chunks(self) -> Iterator[Chunk]:
        """All its boxes one by one."""
        return (chunk for chunk, _ in self.overlapping(self.box))


def file_numbers(first: int, axes: tuple[Axis, ...]) -> list[int]:
    """The file of each box of a grid whose first box is in file ``first``."""
    found = [first]
    for axis in axes:
        found = [number * axis.file_step + file for number in range(axis.repeats) for file in found]
    return found


@lru_cache(maxsize=64)
def _file_offsets(axes: tuple[Axis, ...]) -> frozenset[int]:
    return frozenset(file_numbers(0, axes))
