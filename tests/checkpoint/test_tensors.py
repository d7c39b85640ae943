"""Reads of checkpoint files: the damage check reads each byte once over all ranks, and few files are open at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from shardtrain.checkpoint import files, tensor_reader, tensors
from shardtrain.checkpoint.grids import Axis, Grid
from shardtrain.checkpoint.manifest import Manifest, StoredTensor, TensorFile
from shardtrain.utils.errors import CheckpointError

FILES = 11


def write_checkpoint(folder: Path) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Write two tensors in eleven files, as eleven ranks do."""
    saved = {
        "model.a": torch.arange(FILES * 6.0).reshape(FILES * 2, 3),
        "model.b": torch.arange(FILES * 4.0) * 10,
    }
    # A file has 24 bytes of the first tensor, followed by its part of the second tensor.
    stored = {}
    listed = []
    for name, begin in (("model.a", 0), ("model.b", 24)):
        tensor = saved[name]
        sizes = (tensor.shape[0] // FILES, *tensor.shape[1:])
        grid = Grid((0,) * tensor.ndim, sizes, 0, begin, (Axis(FILES, 0, 1),))
        stored[name] = StoredTensor("float32", tuple(tensor.shape), (grid,))
    for number in range(FILES):
        # Each file contains one shard of every tensor.
        content = b""
        for tensor in saved.values():
            content += tensor.chunk(FILES)[number].numpy().tobytes()
        path = folder / f"rank-{number:05d}.bin"
        if not path.exists():
            path.write_bytes(content)
        listed.append(TensorFile(path.name, len(content), hashlib.sha256(content).hexdigest()))
    return Manifest(1, FILES, "run", "test", tuple(listed), stored, {}), saved


@pytest.mark.parametrize("most", [1, 3, 2 * FILES])
def test_only_one_file_is_open_at_a_time(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, saved = write_checkpoint(tmp_path)
    opened: list[files.StoredFileReader] = []
    closed: list[files.StoredFileReader] = []

    class Counted(files.FileReader):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            opened.append(self)
            assert len(opened) - len(closed) <= 1

        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(files, "FileReader", Counted)
    monkeypatch.setattr(tensor_reader, "MOST_PIECES", most)
    filled = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    tensor_reader.read(filled, manifest, tmp_path)

    for name in saved:
        assert torch.equal(filled[name], saved[name])
    # If all pieces fit into one round, each file is opened once, and otherwise once per tensor.
    expected_opens = FILES if most == 2 * FILES else 2 * FILES
    assert len(opened) == expected_opens
    assert len(closed) == expected_opens


@pytest.mark.parametrize("most_bytes", [16, 40, 2**23])
def test_adjacent_pieces_are_read_together(
    most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the stored dtype are filled in place; other dtypes and transposed tensors use a buffer."""
    manifest, saved = write_checkpoint(tmp_path)
    buffers_per_read: list[int] = []

    class Counted(files.FileReader):
        def read_into_all(self, views: Sequence[memoryview], position: int) -> int:
            buffers_per_read.append(len(views))
            return super().read_into_all(views, position)

    monkeypatch.setattr(files, "FileReader", Counted)
    monkeypatch.setattr(files, "PIECE_BYTES", most_bytes)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        filled = {name: torch.full_like(tensor, -1, dtype=dtype) for name, tensor in saved.items()}
        # A transposed memory layout cannot be filled in place.
        filled["model.a"] = filled["model.a"].T.contiguous().T
        tensor_reader.read(filled, manifest, tmp_path)
        for name in saved:
            assert torch.equal(filled[name], saved[name].to(dtype))

    # With a limit of 16 bytes, the reader can only read one row at a time.
    buffers_of_a_dtype = [2] * FILES if most_bytes >= 40 else [1] * 3 * FILES
    assert buffers_per_read == 3 * buffers_of_a_dtype


def test_truncated_file_is_rejected(tmp_path: Path) -> None:
    manifest, saved = write_checkpoint(tmp_path)
    last = tmp_path / manifest.files[-1].name
    last.write_bytes(last.read_bytes()[:-1])

    with pytest.raises(CheckpointError, match="became shorter"):
        tensor_reader.read(
            {name: torch.zeros_like(tensor) for name, tensor in saved.items()}, manifest, tmp_path
        )


def read_by_check(rank: int, folder: Path) -> dict[str, int]:
    manifest, _ = write_checkpoint(folder)
    read: dict[str, int] = {}

    class Counted(files.FileReader):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.name = path.name

        def read_into(self, view: memoryview, position: int) -> int:
            count = super().read_into(view, position)
            read[self.name] = read.get(self.name, 0) + count
            return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "FileReader", Counted)
        assert tensors.find_damaged_file(manifest, folder) == ""
    return read


def test_damage_check_reads_each_byte_once_over_all_ranks(tmp_path: Path) -> None:
    manifest, _ = write_checkpoint(tmp_path)
    by_rank = run_ranks(3, read_by_check, tmp_path)
    # No file is read by two ranks.
    assert sum(len(read) for read in by_rank) == FILES

    together = {name: count for read in by_rank for name, count in read.items()}
    assert together == {file.name: file.bytes for file in manifest.files}

    shares = [sum(read.values()) for read in by_rank]
    assert max(shares) - min(shares) <= max(file.bytes for file in manifest.files)
