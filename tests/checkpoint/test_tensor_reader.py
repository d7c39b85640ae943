"""Reading a rank's shards of tensors that another mesh saved: exact values, at a cost that identical layers share."""

from __future__ import annotations

import hashlib
import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.checkpoint import files, tensor_reader
from shardtrain.checkpoint.grids import Axis, Grid
from shardtrain.checkpoint.manifest import Manifest, StoredTensor, TensorFile
from shardtrain.checkpoint.save_plan import compress
from shardtrain.facts.dtypes import ITEM_BYTES

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)


def write_tensors(
    folder: Path, tensors: dict[str, tuple[torch.Tensor, list[list[int]]]], rng: Any = None
) -> Manifest:
    """Write tensors in shards with the given sizes along each dimension.

    Box i is in file i, or in a file drawn by ``rng``.
    """
    counts = []
    for _, cells in tensors.values():
        counts.append(math.prod(len(sizes) for sizes in cells))
    num_files = max(counts)
    order = np.arange(num_files) if rng is None else rng.permutation(num_files)
    written = [bytearray() for _ in range(num_files)]
    stored = {}
    for name, (tensor, cells) in tensors.items():
        intervals = []
        for sizes in cells:
            starts = np.cumsum([0, *sizes[:-1]]).tolist()
            intervals.append([*zip(starts, sizes, strict=True)])

        # A box is a shard of the tensor: an interval (start, size) along each dimension. Append the bytes of each
        # box to the file that ``order`` selects.
        boxes = [*itertools.product(*intervals)]
        begins = []
        for box, file in zip(boxes, order.tolist(), strict=False):
            begins.append(len(written[file]))
            slices = tuple(slice(start, start + size) for start, size in box)
            part = tensor[slices].contiguous()
            written[file] += part.reshape(-1).view(torch.uint8).numpy().tobytes()

        box_array = np.array(boxes, np.int64).reshape(len(boxes), len(cells), 2)
        files_of_boxes = order[: len(boxes)]
        begin_array = np.array(begins, np.int64)
        grids = compress(box_array[:, :, 0], box_array[:, :, 1], files_of_boxes, begin_array)
        dtype = str(tensor.dtype).removeprefix("torch.")
        stored[name] = StoredTensor(dtype, tuple(tensor.shape), tuple(grids))

    listed = []
    for number, data in enumerate(written):
        file_name = f"rank-{number:05d}.bin"
        (folder / file_name).write_bytes(data)
        listed.append(TensorFile(file_name, len(data), hashlib.sha256(data).hexdigest()))
    return Manifest(1, num_files, "run", "test", tuple(listed), stored, {})


def draw_tensor(data: st.DataObject) -> tuple[torch.Tensor, list[list[int]]]:
    """Draw a tensor and the sizes of its shards along each dimension."""
    dims = data.draw(st.integers(0, 3))
    sizes_along_a_dim = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    cells = [data.draw(sizes_along_a_dim) for _ in range(dims)]
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = [sum(sizes) for sizes in cells]
    # Numbers up to 120 are exact in every dtype.
    num_values = 2 if dtype == torch.bool else 120
    numbers = torch.arange(np.prod(shape, dtype=int)).reshape(shape) % num_values
    return numbers.to(dtype), cells


def draw_box(data: st.DataObject, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Draw the first index and the length of a box along each dimension."""
    low = [data.draw(st.integers(0, size - 1)) for size in shape]
    lengths = []
    for size, first in zip(shape, low, strict=True):
        lengths.append(data.draw(st.integers(1, size - first)))
    return low, lengths


def draw_target(data: st.DataObject, saved: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Draw a tensor of zeros to read into: its dtype and its memory layout."""
    # Floating-point tensors may be read into float32.
    dtypes = [saved.dtype, torch.float32] if saved.is_floating_point() else [saved.dtype]
    dtype = data.draw(st.sampled_from(dtypes))
    if not data.draw(st.booleans()):
        return torch.zeros(sizes, dtype=dtype)
    # Use column-major memory, in which rows are not contiguous.
    reversed_dims = tuple(reversed(range(len(sizes))))
    return torch.zeros(sizes[::-1], dtype=dtype).permute(reversed_dims)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_box_of_tensors_saved_by_any_mesh_is_read_exactly(data: st.DataObject) -> None:
    """Cover all dtypes, numbers of dimensions and memory layouts, with reads in small parts."""
    tensors = {}
    boxes = {}
    for name in ("model.a", "model.b"):
        tensors[name] = draw_tensor(data)
        boxes[name] = draw_box(data, tensors[name][0].shape)
    most_bytes = data.draw(st.sampled_from([8, 20, 64, 2**23]))
    most_pieces = data.draw(st.sampled_from([1, 5, 2**17]))

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        manifest = write_tensors(Path(folder), tensors, rng)
        filled = {}
        expected = {}
        box_of_tensor = {}
        for name, (low, sizes) in boxes.items():
            saved = tensors[name][0]
            slices = tuple(slice(at, at + size) for at, size in zip(low, sizes, strict=True))
            expected[name] = saved[slices]
            filled[name] = draw_target(data, saved, sizes)
            box_of_tensor[id(filled[name])] = tuple(low), tuple(sizes)
        # Plain tensors do not know their box in the full tensor, so ``box_of`` must look it up.
        patch.setattr(tensor_reader, "box_of", lambda tensor: box_of_tensor[id(tensor)])
        patch.setattr(files, "PIECE_BYTES", most_bytes)
        patch.setattr(tensor_reader, "MOST_PIECES", most_pieces)
        tensor_reader.read(filled, manifest, Path(folder))

    for name, tensor in filled.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype))


def write_layers(folder: Path, count: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Write ``count`` tensors of shape [8, 6], each split by rows into 8 files."""
    weights = {f"model.layers.{n}.w": torch.arange(48.0).reshape(8, 6) + n for n in range(count)}
    split_weights = {name: (tensor, [[1] * 8, [6]]) for name, tensor in weights.items()}
    return write_tensors(folder, split_weights), weights


def test_overlaps_are_computed_once_for_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 layers take as many overlap computations and opened files as one layer."""
    computed = []
    opened = []
    overlaps = Grid.overlaps
    open_stored = files.open_stored

    def counted_overlaps(grid: Grid, box: Any) -> Any:
        computed.append(grid)
        return overlaps(grid, box)

    def counted_open(path: Any) -> Any:
        opened.append(path)
        return open_stored(path)

    # Count the computations and the opened files for 1 layer and for 40.
    monkeypatch.setattr(Grid, "overlaps", counted_overlaps)
    monkeypatch.setattr(files, "open_stored", counted_open)
    for count in (1, 40):
        folder = tmp_path / str(count)
        folder.mkdir()
        manifest, saved = write_layers(folder, count)
        filled = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
        computed.clear()
        opened.clear()
        tensor_reader.read(filled, manifest, folder)

        assert (len(computed), len(opened)) == (1, 8)
        for name in saved:
            assert torch.equal(filled[name], saved[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_most_one_piece_is_read_at_a_time(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger rows are read in parts, both directly into the tensor and into a buffer for conversion."""
    saved = torch.arange(2 * 5 * 7.0).reshape(2, 5, 7)
    manifest = write_tensors(tmp_path, {"model.experts": (saved, [[2], [5], [7]])})
    bytes_read: list[int] = []

    class Counted(files.FileReader):
        def read_into_all(self, views: Sequence[memoryview], position: int) -> int:
            bytes_read.append(sum(map(len, views)))
            return super().read_into_all(views, position)

    monkeypatch.setattr(files, "FileReader", Counted)
    # With a limit of 60 bytes, a read has two rows of 7 float32 values: 2 + 2 + 1 rows per 5 x 7 matrix.
    monkeypatch.setattr(files, "PIECE_BYTES", 60)
    filled = {"model.experts": torch.zeros_like(saved, dtype=dtype)}
    tensor_reader.read(filled, manifest, tmp_path)

    assert torch.equal(filled["model.experts"], saved.to(dtype))
    assert bytes_read == 2 * [56, 56, 28]
    assert sum(bytes_read) == saved.numel() * ITEM_BYTES["float32"]


def test_pieces_of_16384_files_are_stored_in_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that are not yet read take about 40 bytes each, and no Python object."""
    grid = Grid((0, 0), (1, 4), 0, 0, (Axis(16384, 0, 1),))
    stored = {f"model.layers.{n}.w": StoredTensor("float32", (16384, 4), (grid,)) for n in range(8)}
    manifest = Manifest(1, 16384, "run", "test", (), stored, {})
    filled = {name: torch.empty(16384, 4) for name in stored}
    pieces = tensor_reader._next_pieces(tensor_reader._find(filled, manifest))

    assert pieces is not None
    assert len(pieces.files) == 8 * 16384 == tensor_reader.MOST_PIECES
    assert sum(column.nbytes for column in pieces[:5]) == 40 * len(pieces.files)
    assert len({id(cut) for _, cut in pieces.cuts}) == 1
