"""A failed write during a save is reported on every rank and keeps earlier checkpoints, whatever call or rank fails."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from small_checkpoint import assert_is_of_its_step, checkpoints, save, world_of_one

from shardtrain.checkpoint import files
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.utils.errors import StorageError

CALLS = ("open", "write", "fsync", "rename", "mkdir", "close", "link", "statvfs")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EACCES)


class Faults:
    """Count the writing calls of ``os``, and let one selected call fail.

    A failing ``close`` still closes the file.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, int] = {}
        self.target: tuple[str, int, int] | None = None
        for name in CALLS:
            patch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            # Opening a file for reading cannot fail a save.
            if name == "open" and not arguments[1] & (os.O_CREAT | os.O_DIRECTORY):
                return original(*arguments, **options)
            self.counts[name] = self.counts.get(name, 0) + 1
            if self.target and self.target[:2] == (name, self.counts[name]):
                if name == "close":
                    original(*arguments)
                code = self.target[2]
                raise OSError(code, os.strerror(code))
            return original(*arguments, **options)

        return call

    def arm(self, target: tuple[str, int, int] | None) -> None:
        self.counts, self.target = {}, target


@pytest.fixture
def group() -> Iterator[None]:
    with world_of_one():
        yield


def save_to_the_end(manager: Checkpoints, step: int) -> None:
    save(manager, step)
    manager.finish()


@pytest.mark.parametrize(
    ("keep", "mode"), [(0, "disabled"), (2, "disabled"), (0, "async"), (2, "async")]
)
@pytest.mark.usefixtures("group")
def test_failed_call_is_never_a_success_and_keeps_earlier_checkpoints(
    tmp_path: Path, keep: int, mode: str
) -> None:
    manager = checkpoints(tmp_path, keep_latest_k=keep, async_mode=mode)
    for step in (1, 2):
        save_to_the_end(manager, step)
    folder = tmp_path / "checkpoint"
    # Count the calls of a save that also deletes step 1, so it makes every kind of call.
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        save_to_the_end(manager, 3)
        calls = dict(faults.counts)
    assert calls["write"] >= 2, calls
    assert calls["fsync"] >= 4, calls
    assert calls["rename"] >= 1, calls
    assert calls["mkdir"] == 1, calls

    # Fail each call with each error.
    faults_to_test = []
    for name, count in calls.items():
        for number in range(1, count + 1):
            faults_to_test += [(name, number, code) for code in ERRORS]
    failed_saves = 0
    for step, fault in enumerate(faults_to_test, 4):
        newest_before = manager.steps()[-1]
        message = ""
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch).arm(fault)
            try:
                save_to_the_end(manager, step)
            except StorageError as error:
                message = str(error)

        newest = manager.steps()[-1]
        assert newest == step or (message and newest == newest_before), (fault, message)
        assert_is_of_its_step(folder / f"step-{newest}")
        assert not list(folder.glob("*.tmp-*")), fault
        if message:
            failed_saves += 1
            assert f"errno {fault[2]}" in message
            assert str(tmp_path) in message
            assert "\n" not in message

    # Every fault fails the save, except in the three calls that sync the parent folder. With ``keep``,
    # calls that delete checkpoints after the commit may fail too, without failing the save.
    if not keep:
        assert failed_saves == len(ERRORS) * (sum(calls.values()) - 3)


SITES = [
    ("write", 1, 1),
    ("fsync", 1, 1),
    ("open", 1, 1),
    ("close", 1, 1),
    ("rename", 0, 1),
    ("write", 0, 2),
]


def faulty_saves(rank: int, root: Path, mode: str) -> list[tuple[str, list[int]]]:
    outcomes = []
    manager = checkpoints(root, keep_latest_k=2, async_mode=mode)
    for step in (1, 2):
        save_split(manager, step)
    for step, (name, culprit, number) in enumerate(SITES, 3):
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:
                Faults(patch).arm((name, number, errno.ENOSPC))
            try:
                save_split(manager, step)
                outcomes.append(("saved", manager.steps()))
            except StorageError as error:
                outcomes.append((str(error), manager.steps()))
        dist.barrier()
    save_split(manager, 100)
    outcomes.append(("saved", manager.steps()))
    return outcomes


def save_split(manager: Any, step: int) -> None:
    """Save a different tensor on each rank, like the stages of a pipeline."""
    import torch

    tensors = {f"model.{dist.get_rank()}": torch.full((1000,), float(step))}
    manager.save(step, tensors, {}, {"state": {"step": step}}, last=False)
    manager.finish()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_error_on_one_rank_fails_the_save_on_all_without_blocking(
    tmp_path: Path, mode: str
) -> None:
    answers = run_ranks(2, faulty_saves, tmp_path, mode)
    for first, second, (_, culprit, _) in zip(*answers, SITES, strict=False):
        message, steps = first
        assert message == second[0], "ranks report different messages"
        assert f"rank {culprit} on" in message
        assert f"errno {errno.ENOSPC}" in message
        assert steps == [1, 2]

    # A later save without a fault succeeds.
    assert answers[0][-1] == answers[1][-1] == ("saved", [2, 100])


def save_under_a_limit(rank: int, root: Path) -> str:
    """Save while a kernel limit stops rank 1 from writing more than 2 KB into a file."""
    manager = checkpoints(root)
    save_split(manager, 1)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        save_split(manager, 2)
    except StorageError as error:
        return str(error)
    return "saved"


def test_file_size_limit_of_the_kernel_is_reported(tmp_path: Path) -> None:
    for message in run_ranks(2, save_under_a_limit, tmp_path):
        assert f"rank 1 on {os.uname().nodename}" in message
        assert f"errno {errno.EFBIG}" in message
        assert "rank-00001.bin" in message
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-1"]


@pytest.mark.usefixtures("group")
def test_save_without_enough_free_space_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoints(tmp_path)
    save(manager, 1)
    monkeypatch.setattr(files, "free_bytes", lambda _: 100)
    created: list[Any] = []
    monkeypatch.setattr(Path, "mkdir", lambda *a, **_: created.append(a))

    with pytest.raises(
        StorageError, match=r"100 bytes are free and \d+ are needed; nothing was changed"
    ):
        save(manager, 2)
    assert not created
    assert manager.steps() == [1]


@pytest.mark.usefixtures("group")
def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    manager = checkpoints(tmp_path)
    save(manager, 1)

    assert_is_of_its_step(tmp_path / "checkpoint/step-1")

    shutil.rmtree(tmp_path)


@pytest.mark.usefixtures("group")
def test_files_are_synced_before_the_checkpoint_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To survive a power loss, fsync shards, manifest and draft folder, then rename, then fsync the parent."""
    order: list[str] = []
    name_of_descriptor: dict[int, str] = {}
    os_open = os.open
    os_fsync = os.fsync
    os_rename = os.rename

    def recorded_open(path: Any, *arguments: Any, **options: Any) -> int:
        descriptor = os_open(path, *arguments, **options)
        name_of_descriptor[descriptor] = Path(path).name.partition(".tmp")[0]
        return descriptor

    def recorded_fsync(descriptor: int) -> None:
        order.append(f"fsync {name_of_descriptor[descriptor]}")
        os_fsync(descriptor)

    def recorded_rename(old: Any, new: Any, **options: Any) -> None:
        order.append("rename")
        os_rename(old, new, **options)

    monkeypatch.setattr(os, "open", recorded_open)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    manager = checkpoints(tmp_path)
    manager.to_continue()
    # The start has written a lease, which is not part of the order under test.
    order.clear()
    save(manager, 5)
    expected = [
        "fsync rank-00000.bin",
        "fsync manifest.json",
        "fsync step-5",
        "rename",
        "fsync checkpoint",
    ]

    assert order[: len(expected)] == expected
