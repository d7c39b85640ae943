"""A save that could not write says so on every rank, and leaves what was there: each call, each error, each rank."""

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
    """Counts calls of ``os`` that write, and fails the n-th of a name; ``close`` closes before it fails."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, int] = {}
        self.target: tuple[str, int, int] | None = None
        for name in CALLS:
            patch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT and not arguments[1] & os.O_DIRECTORY:
                return original(*arguments, **options)
            self.counts[name] = self.counts.get(name, 0) + 1
            if self.target and self.target[:2] == (name, self.counts[name]):
                if name == "close":
                    original(*arguments)
                raise OSError(self.target[2], os.strerror(self.target[2]))
            return original(*arguments, **options)

        return call

    def arm(self, target: tuple[str, int, int] | None) -> None:
        self.counts, self.target = {}, target


@pytest.fixture
def group() -> Iterator[None]:
    with world_of_one():
        yield


def save_to_the_end(kept: Checkpoints, step: int) -> None:
    save(kept, step)
    kept.finish()


@pytest.mark.parametrize(("keep", "mode"), [(0, "disabled"), (2, "disabled"), (0, "async"), (2, "async")])
@pytest.mark.usefixtures("group")
def test_no_error_of_any_call_is_a_success_or_harms_what_was_there(tmp_path: Path, keep: int, mode: str) -> None:
    kept = checkpoints(tmp_path, keep_latest_k=keep, async_mode=mode)
    for step in (1, 2):
        save_to_the_end(kept, step)
    folder = tmp_path / "checkpoint"
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        save_to_the_end(kept, 3)  # the third deletes the first: all calls that a save can make
        sites = dict(faults.counts)
    assert sites["write"] >= 2 and sites["fsync"] >= 4 and sites["rename"] >= 1 and sites["mkdir"] == 1, sites
    step, refused = 3, 0
    for name, count in sites.items():
        for number in range(1, count + 1):
            for code in ERRORS:
                step += 1
                before = kept.steps()
                with pytest.MonkeyPatch.context() as patch:
                    Faults(patch).arm((name, number, code))
                    try:
                        save_to_the_end(kept, step)
                        told = ""
                    except StorageError as error:
                        told = str(error)
                newest = kept.steps()[-1]
                assert newest == step or (told and newest == before[-1]), (name, number, told)
                assert_is_of_its_step(folder / f"step-{newest}")
                assert not list(folder.glob("*.tmp-*")), (name, number)
                if told:
                    refused += 1
                    assert f"errno {code}" in told and str(tmp_path) in told and "\n" not in told, told
    if not keep:  # else the calls that delete an old one follow the commit, and stop nothing
        assert refused == len(ERRORS) * (sum(sites.values()) - 3), "all but the folder of the folder, opened and synced"


SITES = [("write", 1, 1), ("fsync", 1, 1), ("open", 1, 1), ("close", 1, 1), ("rename", 0, 1), ("write", 0, 2)]


def faulty_saves(rank: int, root: Path, mode: str) -> list[tuple[str, list[int]]]:
    found = []
    kept = checkpoints(root, keep_latest_k=2, async_mode=mode)
    for step in (1, 2):
        save_split(kept, step)
    for step, (name, culprit, number) in enumerate(SITES, 3):
        with pytest.MonkeyPatch.context() as patch:
            if rank == culprit:
                Faults(patch).arm((name, number, errno.ENOSPC))
            try:
                save_split(kept, step)
                found.append(("saved", kept.steps()))
            except StorageError as error:
                found.append((str(error), kept.steps()))
        dist.barrier()
    save_split(kept, 100)
    found.append(("saved", kept.steps()))
    return found


def save_split(kept: Any, step: int) -> None:
    """Each rank holds a tensor of its own, as stages of a pipeline do."""
    import torch

    own = {f"model.{dist.get_rank()}": torch.full((1000,), float(step))}
    kept.save(step, own, {}, {"state": {"step": step}}, last=False)
    kept.finish()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_an_error_of_one_rank_fails_the_save_on_all_and_nobody_waits(tmp_path: Path, mode: str) -> None:
    answers = run_ranks(2, faulty_saves, tmp_path, mode)
    for first, second, (name, culprit, _) in zip(*answers, SITES, strict=False):
        assert first[0] == second[0], "the same line on all ranks"
        assert f"rank {culprit} on" in first[0] and f"errno {errno.ENOSPC}" in first[0], (name, first)
        assert first[1][-1] == 2 and first[1] == [1, 2]
    assert answers[0][-1] == answers[1][-1] == ("saved", [2, 100])


def save_under_a_limit(rank: int, root: Path) -> str:
    """The kernel itself refuses rank 1 to write more than 2 KB into a file."""
    kept = checkpoints(root)
    save_split(kept, 1)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        save_split(kept, 2)
    except StorageError as error:
        return str(error)
    return "saved"


def test_a_limit_that_the_kernel_enforces_is_met(tmp_path: Path) -> None:
    for told in run_ranks(2, save_under_a_limit, tmp_path):
        assert (
            f"rank 1 on {os.uname().nodename}" in told and f"errno {errno.EFBIG}" in told and "rank-00001.bin" in told
        )
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-1"]


@pytest.mark.usefixtures("group")
def test_a_save_that_will_not_fit_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = checkpoints(tmp_path)
    save(kept, 1)
    monkeypatch.setattr(files, "free_bytes", lambda _: 100)
    made: list[Any] = []
    monkeypatch.setattr(Path, "mkdir", lambda *a, **_: made.append(a))
    with pytest.raises(StorageError, match=r"100 bytes are free and \d+ are needed; nothing was changed"):
        save(kept, 2)
    assert not made and kept.steps() == [1]


@pytest.mark.usefixtures("group")
def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    kept = checkpoints(tmp_path)
    save(kept, 1)
    assert_is_of_its_step(tmp_path / "checkpoint/step-1")
    shutil.rmtree(tmp_path)


@pytest.mark.usefixtures("group")
def test_bytes_are_on_disk_before_the_name_that_promises_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a power loss needs: shards, manifest, their folder, rename, its folder."""
    order: list[str] = []
    opened: dict[int, str] = {}
    os_open, os_fsync, os_rename = os.open, os.fsync, os.rename

    def noted_open(path: Any, *arguments: Any, **options: Any) -> int:
        descriptor = os_open(path, *arguments, **options)
        opened[descriptor] = Path(path).name.partition(".tmp")[0]
        return descriptor

    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "fsync", lambda d: (order.append(f"fsync {opened[d]}"), os_fsync(d))[1])
    monkeypatch.setattr(os, "rename", lambda a, b, **at: (order.append("rename"), os_rename(a, b, **at))[1])
    kept = checkpoints(tmp_path)
    kept.to_continue()
    order.clear()
    save(kept, 5)
    wanted = ["fsync rank-00000.bin", "fsync manifest.json", "fsync step-5", "rename", "fsync checkpoint"]
    assert order[: len(wanted)] == wanted
