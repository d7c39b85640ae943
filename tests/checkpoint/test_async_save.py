"""Saves that continue while training does: the same bytes, one at a time, and a failure that every rank hears of."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patience
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_checkpoint import assert_is_of_its_step, checkpoints, facts, rest, save, weights, world_of_one
from tiny import Ended, assert_bitwise, shallow_config, train_whole

from shardtrain.checkpoint import async_save, files, manifest
from shardtrain.checkpoint import save as saves
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Checkpoint, Config, Job
from shardtrain.launch.stop_request import StopRequest
from shardtrain.resilience.resilience import Resilience
from shardtrain.train import shutdown
from shardtrain.utils.errors import ConfigError, NotSaved, Preempted, StorageError

WAIT_SECONDS = 60.0


def eventually(condition: Callable[[], bool]) -> None:
    patience.wait_for(condition, WAIT_SECONDS)


def hear(kept: Checkpoints) -> None:
    """What the sum that begins a step does."""
    sums = torch.tensor(kept.saving.pack_flags(), dtype=torch.float64)
    dist.all_reduce(sums)
    kept.saving.unpack_flags(sums.tolist())


@contextlib.contextmanager
def held() -> Iterator[threading.Event]:
    """Threads that write wait until the event is set."""
    go, write = threading.Event(), files.write_hashed

    def late(*arguments: Any) -> Any:
        assert go.wait(patience.seconds(WAIT_SECONDS))
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_hashed", late)
        try:
            yield go
        finally:
            go.set()


@pytest.fixture
def group() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture
def kept(tmp_path: Path, group: None) -> Iterator[Checkpoints]:
    found = checkpoints(tmp_path, async_mode="async", max_stall_seconds=0.0, keep_latest_k=2)
    yield found
    found.close()


def test_what_is_saved_is_what_the_tensors_were_at_that_moment(kept: Checkpoints, tmp_path: Path) -> None:
    first, second = weights(1), rest(1)
    with held() as go:
        kept.save(1, first, second, facts(1), last=False)
        for tensor in (*first.values(), *second.values()):
            tensor.add_(1000)
        assert kept.steps() == [] and kept.saved_step == 0
        go.set()
        assert kept.finish()
    assert kept.steps() == [1] and kept.saved_step == 1
    assert_is_of_its_step(tmp_path / "checkpoint/step-1")


def test_a_save_in_flight_is_known_to_be_done_at_the_next_step(kept: Checkpoints) -> None:
    with held() as go:
        save(kept, 1)
        hear(kept)
        kept.poll()
        assert kept.saving.writing is not None and kept.saved_step == 0
        go.set()
        eventually(lambda: kept.saving.writing is not None and kept.saving.writing.ended)
        hear(kept)
        kept.poll()
    assert kept.saving.writing is None and kept.saved_step == 1


def test_there_are_never_two_and_what_is_skipped_is_counted(
    kept: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with held() as go, caplog.at_level(logging.WARNING, logger="shardtrain"):
        save(kept, 1)
        save(kept, 2)
        save(kept, 3)
        assert kept.skipped == 2
        assert "skipped the save of step 3: the save of step 1 is still in progress" in caplog.text
        assert "max_stall_seconds=0.0 (2 skipped in total)" in caplog.text
        go.set()
        kept.finish()
    save(kept, 4)
    kept.finish()
    assert kept.steps() == [1, 4]


def test_the_last_save_waits_for_the_one_before_and_is_on_disk_when_it_returns(kept: Checkpoints) -> None:
    with held() as go:
        save(kept, 1)
        threading.Timer(0.2, go.set).start()
        kept.save(2, weights(2), rest(2), facts(2), last=True)
    assert kept.steps() == [1, 2] and kept.saved_step == 2 and kept.saving.writing is None


def test_the_copy_is_made_in_the_same_memory_again(kept: Checkpoints) -> None:
    places = set()
    for step in (1, 2, 3):
        save(kept, step)
        kept.finish()
        assert kept._staging._buffer is not None
        places.add(kept._staging._buffer.data_ptr())
    assert len(places) == 1


def test_a_run_that_ends_with_an_error_gives_the_save_in_flight_a_moment(tmp_path: Path, group: None) -> None:
    kept = checkpoints(tmp_path, async_mode="async")
    with held() as go:
        save(kept, 1)
        threading.Timer(0.1, go.set).start()
        kept.close()
    assert kept.steps() == [1]


def test_and_no_more_than_a_moment(tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "CRASH_SECONDS", 0.05)
    monkeypatch.setattr(saves, "CANCEL_SECONDS", 0.05)
    kept = checkpoints(tmp_path, async_mode="async")
    with held():
        save(kept, 1)
        writing = kept.saving.writing
        kept.close()
        assert kept.steps() == [] and not list((tmp_path / "checkpoint").glob("lease*"))
    assert writing is not None and writing.wait(patience.seconds(WAIT_SECONDS)) and writing.failed
    assert kept.steps() == [], "a writer without its lease does not commit"


def fail(code: int = errno.ENOSPC) -> Callable[..., Any]:
    def full(path: Path, *_: Any) -> Any:
        raise OSError(code, "No space left on device", str(path))

    return full


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_may_continue_after_two_failed_saves_in_a_row_and_no_more(
    tmp_path: Path, group: None, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kept = checkpoints(tmp_path, async_mode=mode, on_save_error="continue")

    def attempt(step: int, fails: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(files, "write_hashed", fail())
            save(kept, step)
            kept.finish()

    for step, fails in enumerate([False, True, True, False, True, True], 1):
        attempt(step, fails)
    assert kept.steps() == [1, 4] and kept.saved_step == 4
    assert (
        "training continues, and the newest checkpoint is that of step 4 (checkpoint.on_save_error; 2 of" in caplog.text
    )
    with pytest.raises(StorageError, match=r"rank-00000\.bin.*No space left on device"):
        attempt(7, True)
    assert not list((tmp_path / "checkpoint").glob("*.tmp-*"))


def test_the_last_save_must_succeed_whatever_is_tolerated(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = checkpoints(tmp_path, on_save_error="continue")
    monkeypatch.setattr(files, "write_hashed", fail())
    with pytest.raises(StorageError):
        kept.save(1, weights(1), rest(1), facts(1), last=True)


def test_a_writer_that_lost_its_lease_stops_whatever_is_tolerated(tmp_path: Path, group: None) -> None:
    kept = checkpoints(tmp_path, async_mode="async", on_save_error="continue")
    with held() as go:
        save(kept, 1)
        (tmp_path / "checkpoint/lease.json").write_text(json.dumps({"nonce": "another", "host": "h", "pid": 1}))
        go.set()
        with pytest.raises(ConfigError, match="was taken over by"):
            kept.finish()
    assert kept.steps() == []


# -- several ranks -----------------------------------------------------------------------------------------------------


def shared_out(step: int) -> dict[str, torch.Tensor]:
    """Each rank holds a tensor of its own, and all hold others that one of them writes; rank 2 has nothing to write."""
    rank = dist.get_rank()
    own = {f"model.own{rank}": torch.arange(1000, dtype=torch.float32).add(rank + step)} if rank < 2 else {}
    return {**own, "model.common": torch.full((7,), step, dtype=torch.int64), "model.odd": torch.ones(3).bool()}


def three_ranks(rank: int, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("disabled", "async"):
        kept = checkpoints(root / mode, async_mode=mode)
        for step in (1, 2):
            kept.save(step, shared_out(step), {}, facts(step), last=False)
            kept.finish()
        kept.close()
    kept = checkpoints(root / "fail", async_mode="async", max_stall_seconds=0.0)
    write = files.write_hashed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_hashed", fail() if rank == 1 else write)
        kept.save(1, shared_out(1), {}, facts(1), last=False)
        if rank == 1:
            eventually(lambda: kept.saving.writing is not None and kept.saving.writing.failed)
        dist.barrier()
        hear(kept)  # the first sum after it has failed
        try:
            kept.poll()
        except StorageError as error:
            found["told"] = str(error)
    dist.barrier()
    found["left"] = sorted(path.name for path in (root / "fail/checkpoint").glob("step-*"))
    # the slowest rank decides that the next is skipped
    with held() if rank == 1 else contextlib.nullcontext() as go:
        kept.save(2, shared_out(2), {}, facts(2), last=False)
        if rank == 2:  # it has nothing to write
            eventually(lambda: kept.saving.writing is not None and kept.saving.writing.ended)
        kept.save(3, shared_out(3), {}, facts(3), last=False)
        found["skipped"] = kept.skipped
        if go:
            go.set()
        kept.finish()
    found["steps"], found["saved"] = kept.steps(), kept.saved_step
    kept.close()
    return found


def test_ranks_save_in_the_background_what_they_save_at_once_and_fail_together(tmp_path: Path) -> None:
    answers = run_ranks(3, three_ranks, tmp_path)
    for step in (1, 2):
        one, other = (tmp_path / mode / f"checkpoint/step-{step}" for mode in ("disabled", "async"))
        names = sorted(path.name for path in one.iterdir())
        assert names == sorted(path.name for path in other.iterdir()) == ["manifest.json", *names[1:]]
        assert names[1:] == ["rank-00000.bin", "rank-00001.bin", "rank-00002.bin"][: len(names) - 1]
        for name in names[1:]:
            assert (one / name).read_bytes() == (other / name).read_bytes()
        now, later = (manifest.read(path) for path in (one, other))
        assert (now.tensors, now.files, now.facts) == (later.tensors, later.files, later.facts)
    assert len({answer["told"] for answer in answers}) == 1
    assert "rank 1 on" in answers[0]["told"] and f"errno {errno.ENOSPC}" in answers[0]["told"]
    for answer in answers:
        assert answer["left"] == [] and answer["skipped"] == 1 and (answer["steps"], answer["saved"]) == ([2], 2)


def run(rank: int, folder: Path, mode: str, stop_after: int | None = None) -> Ended:
    checkpoint = {"enable": True, "interval": 2, "async_mode": mode, "keep_latest_k": 0}
    training = {"steps": 7, "local_batch_size": 4}
    return train_whole(
        rank, shallow_config(job={"dump_folder": str(folder)}, training=training, checkpoint=checkpoint), stop_after
    )


def whole_runs(rank: int, root: Path) -> dict[str, Ended]:
    found = {"now": run(rank, root / "now", "disabled"), "async": run(rank, root / "async", "async")}
    run(rank, root / "cut", "async", stop_after=5)
    found["continued"] = run(rank, root / "cut", "async")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(files, "write_hashed", fail())
        begin = Checkpoints._begin

        def and_wait(self: Checkpoints, *arguments: Any) -> None:
            begin(self, *arguments)
            assert rank == 0 or (self.saving.writing and self.saving.writing.wait(patience.seconds(WAIT_SECONDS)))
            dist.barrier()

        patch.setattr(Checkpoints, "_begin", and_wait)
        found["failed"] = run(rank, root / "failed", "async")
    return found


def test_a_run_that_saves_in_the_background_has_the_same_numbers_and_hears_of_a_failure_within_a_step(
    tmp_path: Path,
) -> None:
    for answer in run_ranks(2, whole_runs, tmp_path):
        now = answer["now"]
        assert now.error is None and answer["async"].error is None
        assert answer["async"].losses == now.losses
        assert_bitwise(answer["async"].weights, now.weights)
        assert_bitwise(answer["continued"].weights, now.weights)
        assert_bitwise(answer["continued"].optimizer, now.optimizer)
        assert answer["continued"].losses == now.losses[-len(answer["continued"].losses) :]
        failed = answer["failed"]
        assert isinstance(failed.error, StorageError) and "rank 1 on" in str(failed.error)
        assert failed.state["step"] == 3, "the save of step 2 failed"
    for name in ("now", "async"):
        assert len(list((tmp_path / name / "checkpoint").glob("step-*"))) == 4


# -- leaving -----------------------------------------------------------------------------------------------------------


def leaving(root: Path, kept: Checkpoints, grace_seconds: float) -> Any:
    stop = StopRequest(grace_seconds)
    stop.note("SIGTERM")
    options = Config(job=Job(dump_folder=str(root)), checkpoint=Checkpoint(enable=True))
    state = SimpleNamespace(step=2)
    return SimpleNamespace(config=options, state=state, resilience=Resilience(stop=stop, stop_flag=1.0))


def test_who_is_asked_to_stop_waits_for_the_save_in_flight_and_saves_the_newest_step(
    kept: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutdown, "save", lambda run, kept, last, wait: kept.save(2, weights(2), rest(2), facts(2), last, wait)
    )
    with held() as go:
        save(kept, 1)
        threading.Timer(0.2, go.set).start()
        with pytest.raises(Preempted, match="everything is saved in .*step-2"):
            shutdown.leave(leaving(tmp_path, kept, 60.0), kept)
    assert kept.steps() == [1, 2]


def test_where_the_save_in_flight_takes_all_the_time_nothing_else_is_begun(
    kept: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "CRASH_SECONDS", 0.05)
    monkeypatch.setattr(saves, "CANCEL_SECONDS", 0.05)
    monkeypatch.setattr(shutdown, "save", lambda *_, **__: pytest.fail("no time"))
    with held():
        save(kept, 1)
        with pytest.raises(NotSaved, match="the last checkpoint is none"):
            shutdown.leave(leaving(tmp_path, kept, 0.5), kept)


# -- words -------------------------------------------------------------------------------------------------------------


def test_markers_of_other_saves_are_ignored_and_broken_ones_are_errors(tmp_path: Path) -> None:
    file = files.TensorFile("rank-00001.bin", 4, "ab")
    async_save.write_marker(tmp_path, 1, "old", file)
    async_save.write_marker(tmp_path, 2, "new", file)
    looks = 0

    def check_cancelled() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise async_save.Cancelled

    with pytest.raises(async_save.Cancelled):
        async_save.wait_for_marker(tmp_path, 1, "new", check_cancelled)
    assert async_save.wait_for_marker(tmp_path, 2, "new", lambda: None) == file
    assert not (tmp_path / "rank-00002.done").exists(), "it is not part of the checkpoint"
    for text in ("", "[]", "{", "3", '["new"]', '["new", "a", "b", "c"]', "[" * 4000):
        (tmp_path / "rank-00003.done").write_text(text)
        with pytest.raises(StorageError, match=r"rank-00003\.done: it is not a valid marker"):
            async_save.wait_for_marker(tmp_path, 3, "new", lambda: None)
