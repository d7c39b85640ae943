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
    intervals = []
    for sizes in cells:
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        intervals.append([*zip(starts, sizes, strict=True)])
    # A box has one interval, a start and a size, along each dimension.
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

    # The numbers of files ascend, descend or have any order. Most boxes begin at the start of their file.
    files = data.draw(st.sampled_from([np.arange(count), np.arange(count)[::-1].copy(), None]))
    if files is None:
        files = np.array(data.draw(st.permutations(range(count))), np.int64).reshape(count)
    list_of_begins = st.lists(st.sampled_from([0, 0, 0, 8]), min_size=count, max_size=count)
    begins = np.array(data.draw(list_of_begins), np.int64)

    # The grids contain exactly the given boxes.
    grids = compress(offsets, sizes, files, begins)
    expected = []
    for number in range(count):
        offset = tuple(offsets[number].tolist())
        size = tuple(sizes[number].tolist())
        expected.append(Chunk(offset, size, int(files[number]), int(begins[number])))
    chunks = [chunk for grid in grids for chunk in grid.chunks()]

    assert sorted(chunks, key=lambda chunk: chunk.offsets) == expected

    # Each grid knows its own boxes and files.
    for grid in grids:
        own_chunks = [*grid.chunks()]
        assert len(own_chunks) == grid.count
        assert math.prod(grid.box[1]) == grid.count * grid.numel
        assert all(overlap(grid.box, (chunk.offsets, chunk.sizes)) for chunk in own_chunks)
        files_of_grid = [file for file in range(-1, count + 1) if grid.is_in(file)]
        assert files_of_grid == sorted(chunk.file for chunk in own_chunks)

    # For a requested box, the grids return the boxes that overlap with it, and the overlaps.
    low = []
    lengths = []
    for sizes_of_dim in cells:
        size = sum(sizes_of_dim)
        low.append(data.draw(st.integers(0, size - 1)))
        lengths.append(data.draw(st.integers(1, size - low[-1])))
    box = (tuple(low), tuple(lengths))
    overlaps = [pair for grid in grids for pair in grid.overlapping(box)]
    expected_overlaps = []
    for chunk in expected:
        shared_box = overlap((chunk.offsets, chunk.sizes), box)
        if shared_box:
            expected_overlaps.append((chunk, shared_box))

    assert sorted(overlaps, key=lambda pair: pair[0].offsets) == expected_overlaps


def test_evenly_split_tensor_is_one_grid_on_any_number_of_ranks() -> None:
    offsets, sizes = cut([[2] * 1024])
    grids = compress(offsets, sizes, np.arange(1024), np.zeros(1024, np.int64))
    assert grids == [Grid((0,), (2,), 0, 0, (Axis(1024, 0, 1),))]

    # FSDP splits dimension 0, and tensor parallelism dimension 1. The last FSDP rank has a shorter part.
    offsets, sizes = cut([[3] * 127 + [1], [4] * 8])
    grids = compress(offsets, sizes, np.arange(1024), np.zeros(1024, np.int64))

    assert grids == [
        Grid((0, 0), (3, 4), 0, 0, (Axis(8, 1, 1), Axis(127, 0, 8))),
        Grid((381, 0), (1, 4), 1016, 0, (Axis(8, 1, 1),)),
    ]


def test_only_overlapping_boxes_are_visited() -> None:
    """A grid of 10^12 boxes would take hours if it visited all of them."""
    grid = Grid((0,), (2,), 0, 0, (Axis(10**12, 0, 1),))
    files = [chunk.file for chunk, _ in grid.overlapping(((2 * 10**11 + 1,), (4,)))]
    assert files == [10**11, 10**11 + 1, 10**11 + 2]
