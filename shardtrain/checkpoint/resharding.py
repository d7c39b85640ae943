"""Operations on boxes of a tensor: their overlap, and the check that boxes cover a tensor exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one number per dimension each."""

_MAX_COMPARISONS = 5_000_000
"""Largest number of comparisons of pieces, which takes about two seconds. 10,000 pieces on a grid need far fewer."""


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None.

    >>> overlap(((0, 0), (4, 4)), ((2, 1), (4, 2)))
    ((2, 1), (2, 2))
    """
    starts = []
    sizes = []
    for a, m, b, n in zip(one[0], one[1], other[0], other[1], strict=True):
        start = max(a, b)
        size = min(a + m, b + n) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return tuple(starts), tuple(sizes)


def check_tiling(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Return the reason why boxes do not cover a tensor of this shape exactly once, or "".

    >>> check_tiling((4,), [((0,), (2,)), ((2,), (2,))])
    ''
    >>> check_tiling((4,), [((0,), (3,)), ((2,), (1,))])
    'overlap'
    """
    covered_elements = 0
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return "have a wrong number of dimensions"
        for offset, size, full_size in zip(offsets, sizes, shape, strict=True):
            if offset + size > full_size or size == 0:
                return "are outside of it or empty"
        covered_elements += math.prod(sizes)
    if covered_elements != math.prod(shape):
        return "do not cover it exactly"
    if len(boxes) < 2:
        return ""
    if not shape:
        return "overlap"

    # The boxes have as many elements as the tensor, so they cover it if they do not overlap. Sweep
    # along the dimension with most cuts, and compare each box only with those that reach beyond its
    # start.
    along = 0
    most_cuts = 0
    for dim in range(len(shape)):
        cuts = {offsets[dim] for offsets, _ in boxes}
        if len(cuts) > most_cuts:
            most_cuts = len(cuts)
            along = dim
    open_boxes: list[Box] = []
    comparisons = 0
    for box in sorted(boxes, key=lambda box: box[0][along]):
        start = box[0][along]
        open_boxes = [other for other in open_boxes if other[0][along] + other[1][along] > start]
        comparisons += len(open_boxes)
        if comparisons > _MAX_COMPARISONS:
            return "are too many to check"
        if any(overlap(box, other) for other in open_boxes):
            return "overlap"
        open_boxes.append(box)
    return ""
