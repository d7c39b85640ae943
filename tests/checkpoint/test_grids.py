"""Grids are a compact form of many boxes: same boxes, same files, and only the requested boxes are visited."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.checkpoint.grids import Axis, Chunk, Grid
from shardtrain.checkpoint.resharding import overlap
from shardtrain.checkpoint.save_plan import compress


def cut(cells: list[list[int]]) -> tuple[Any, Any]:
    """Return offsets and sizes of the boxes that result from these sizes along each dimension."""
    intervals = []  # for each dimension, the (start, size) pairs
    for sizes in cells:
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        intervals.append([*zip(starts, sizes, strict=True)])
    boxes = [*itertools.product(*intervals)]
    box_array = np.array(boxes, np.int64).reshape(len(boxes), len(cells), 2)
    return box_array[:, :, 0], box_array[:, :, 1]


@settings(max_examples=200)
@given(st.data())
def test_compressed_boxes_round_trip(data: st.DataObject) -> None:
    dims = data.draw(st.integers(0, 3))
    cells = [data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)) for _ in range(dims)]
    offsets, sizes = cut(cells)
    count = len(offsets)
    files = data.draw(st.sampled_from([np.arange(count), np.arange(count)[::-1].copy(), None]))
    if files is None:
        files = np.array(data.draw(st.permutations(range(count))), np.int64).reshape(count)
    begins = np.array(
        data.draw(st.lists(st.sampled_from([0, 0, 0, 8]), min_size=count, max_size=count)), np.int64
    )
    grids = compress(offsets, sizes, files, begins)
    expected = [
        Chunk(tuple(o), tuple(s), f, b)
        for o, s, f, b in zip(
            offsets.tolist(), sizes.tolist(), files.tolist(), begins.tolist(), strict=True
        )
    ]
    chunks = [chunk for grid in grids for chunk in grid.chunks()]
    assert sorted(chunks, key=lambda chunk: chunk.offsets) == expected
    for grid in grids:
        own_chunks = [*grid.chunks()]
        assert len(own_chunks) == grid.count
        assert math.prod(grid.box[1]) == grid.count * grid.numel
        assert all(overlap(grid.box, (chunk.offsets, chunk.sizes)) for chunk in own_chunks)
        assert [file for file in range(-1, count + 1) if grid.is_in(file)] == sorted(
            chunk.file for chunk in own_chunks
        )
    shape = [sum(sizes_of_dim) for sizes_of_dim in cells]
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    box = (
        tuple(low),
        tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, low, strict=True)),
    )
    overlaps = [pair for grid in grids for pair in grid.overlapping(box)]
    expected_overlaps = [
        (chunk, shared_box)
        for chunk in expected
        if (shared_box := overlap((chunk.offsets, chunk.sizes), box))
    ]
    assert sorted(overlaps, key=lambda pair: pair[0].offsets) == expected_overlaps


def test_evenly_split_tensor_is_one_grid_on_any_number_of_ranks() -> None:
    offsets, sizes = cut([[2] * 1024])
    grids = compress(offsets, sizes, np.arange(1024), np.zeros(1024, np.int64))
    assert grids == [Grid((0,), (2,), 0, 0, (Axis(1024, 0, 1),))]
    # FSDP splits dimension 0 and tensor parallelism dimension 1; the last FSDP rank has a shorter part
    offsets, sizes = cut([[3] * 127 + [1], [4] * 8])
    grids = compress(offsets, sizes, np.arange(1024), np.zeros(1024, np.int64))
    assert grids == [
        Grid((0, 0), (3, 4), 0, 0, (Axis(8, 1, 1), Axis(127, 0, 8))),
        Grid((381, 0), (1, 4), 1016, 0, (Axis(8, 1, 1),)),
    ]


def test_only_overlapping_boxes_are_visited() -> None:
    grid = Grid((0,), (2,), 0, 0, (Axis(10**12, 0, 1),))
    assert [chunk.file for chunk, _ in grid.overlapping(((2 * 10**11 + 1,), (4,)))] == [
        10**11,
        10**11 + 1,
        10**11 + 2,
    ]
