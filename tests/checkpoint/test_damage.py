"""Damaged checkpoints are never loaded: flipped bits, truncated, swapped, missing and foreign files."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_checkpoint import assert_is_of_its_step, checkpoints, save, world_of_one

from shardtrain.utils.errors import CheckpointError

FLIPS = int(os.environ.get("SHARDTRAIN_FLIPS", "1000"))


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a run folder with checkpoints of steps 2 and 4."""
    manager = checkpoints(tmp_path)
    save(manager, 2)
    save(manager, 4)
    manager.close()
    return tmp_path


def assert_rejected(root: Path, step: int, name: str) -> None:
    """Check that ``checkpoint.load_step`` rejects the step in one line that names the file."""
    with pytest.raises(CheckpointError) as caught:
        checkpoints(root, load_only=True, load_step=step).to_continue()
    assert name in str(caught.value)
    assert f"step-{step}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_flipped_bits_are_rejected(folder: Path) -> None:
    dice = random.Random(3)
    files = sorted((folder / "checkpoint/step-4").iterdir())
    assert {path.suffix for path in files} == {".json", ".bin"}

    contents = {path: path.read_bytes() for path in files}
    for number in range(FLIPS):
        path = files[number % len(files)]
        changed = bytearray(contents[path])
        place = dice.randrange(len(changed))
        bit = dice.randrange(8)
        changed[place] ^= 1 << bit

        path.write_bytes(changed)
        assert_rejected(folder, 4, path.name)
        path.write_bytes(contents[path])

    # With its files restored, the checkpoint loads. So only the flipped bits caused the rejections.
    assert_is_of_its_step(folder / "checkpoint/step-4")


def test_truncated_and_extended_files_are_rejected(folder: Path) -> None:
    for path in sorted((folder / "checkpoint/step-4").iterdir()):
        content = path.read_bytes()
        for length in [*range(0, len(content), 7), len(content) - 1]:
            path.write_bytes(content[:length])
            assert_rejected(folder, 4, path.name)
        path.write_bytes(content + b"\0")
        assert_rejected(folder, 4, path.name)
        path.write_bytes(content)


def test_files_of_another_checkpoint_are_rejected(folder: Path) -> None:
    old, new = (folder / f"checkpoint/step-{step}" for step in (2, 4))
    shutil.copy(old / "rank-00000.bin", new / "rank-00000.bin")
    assert_rejected(folder, 4, "rank-00000.bin")


def test_manifest_of_another_step_is_rejected(folder: Path) -> None:
    old, new = (folder / f"checkpoint/step-{step}" for step in (2, 4))
    shutil.rmtree(new)
    shutil.copytree(old, new)
    assert_rejected(folder, 4, "manifest.json")


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device"])
def test_special_files_are_rejected_without_blocking(folder: Path, kind: str) -> None:
    path = folder / "checkpoint/step-4/rank-00000.bin"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")

    assert_rejected(folder, 4, path.name)


def test_foreign_files_are_never_read(folder: Path) -> None:
    os.mkfifo(folder / "checkpoint/step-4/rank-00001.bin")
    (folder / "checkpoint/step-4/.metadata").write_bytes(b"cos\nsystem\n")
    assert checkpoints(folder, load_only=True).to_continue() == folder / "checkpoint/step-4"


def test_newest_valid_checkpoint_is_used_and_skipped_ones_are_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "checkpoint/step-4/rank-00000.bin").write_bytes(b"short")
    (folder / "checkpoint/step-6").mkdir()
    newest = checkpoints(folder).to_continue()

    assert newest == folder / "checkpoint/step-2"

    lines = [record.message for record in caplog.records if "skipped" in record.message]
    assert len(lines) == 2
    assert all("continuing from step-2" in line for line in lines)
    assert "step-6 has no manifest.json" in lines[0]
    assert "step-4: rank-00000.bin has 5 bytes" in lines[1]


def test_run_without_any_valid_checkpoint_does_not_silently_restart(folder: Path) -> None:
    for step in (2, 4):
        (folder / f"checkpoint/step-{step}/rank-00000.bin").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be used: .*step-4: rank-00000\.bin"
    ):
        checkpoints(folder).to_continue()
