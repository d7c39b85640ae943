"""Background saves write the same bytes as blocking ones, one save at a time, and report failures on every rank."""

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
from small_checkpoint import (
    assert_is_of_its_step,
    checkpoints,
    facts,
    rest,
    save,
    weights,
    world_of_one,
)
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


def exchange_flags(manager: Checkpoints) -> None:
    """Exchange save flags between ranks, as the all-reduce at the beginning of a step does."""
    sums = torch.tensor(manager.saving.pack_flags(), dtype=torch.float64)
    dist.all_reduce(sums)
    manager.saving.unpack_flags(sums.tolist())


@contextlib.contextmanager
def blocked_writers() -> Iterator[threading.Event]:
    """Block the writer threads until the yielded event is set."""
    released = threading.Event()
    write = files.write_hashed

    def write_late(*arguments: Any) -> Any:
        assert released.wait(patience.seconds(WAIT_SECONDS))
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_hashed", write_late)
        try:
            yield released
        finally:
            released.set()


@pytest.fixture
def group() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.fixture
def manager(tmp_path: Path, group: None) -> Iterator[Checkpoints]:
    manager = checkpoints(tmp_path, async_mode="async", max_stall_seconds=0.0, keep_latest_k=2)
    yield manager
    manager.close()


def test_background_save_writes_the_values_at_the_time_of_the_call(
    manager: Checkpoints, tmp_path: Path
) -> None:
    first = weights(1)
    second = rest(1)
    with blocked_writers() as go:
        manager.save(1, first, second, facts(1), last=False)
        for tensor in (*first.values(), *second.values()):
            tensor.add_(1000)
        assert manager.steps() == []
        assert manager.saved_step == 0
        go.set()
        assert manager.finish()

    assert manager.steps() == [1]
    assert manager.saved_step == 1
    assert_is_of_its_step(tmp_path / "checkpoint/step-1")


def test_end_of_a_background_save_is_noticed_at_the_next_step(manager: Checkpoints) -> None:
    with blocked_writers() as go:
        save(manager, 1)
        exchange_flags(manager)
        manager.poll()
        assert manager.saving.writing is not None
        assert manager.saved_step == 0
        go.set()
        eventually(lambda: manager.saving.writing is not None and manager.saving.writing.ended)
        exchange_flags(manager)
        manager.poll()

    assert manager.saving.writing is None
    assert manager.saved_step == 1


def test_second_background_save_is_skipped_and_counted(
    manager: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    with blocked_writers() as go, caplog.at_level(logging.WARNING, logger="shardtrain"):
        save(manager, 1)
        save(manager, 2)
        save(manager, 3)
        assert manager.skipped == 2
        assert "skipped the save of step 3: the save of step 1 is still in progress" in caplog.text
        assert "max_stall_seconds=0.0 (2 skipped in total)" in caplog.text
        go.set()
        manager.finish()
    save(manager, 4)
    manager.finish()

    assert manager.steps() == [1, 4]


def test_last_save_waits_for_the_previous_one_and_blocks_until_written(
    manager: Checkpoints,
) -> None:
    with blocked_writers() as go:
        save(manager, 1)
        threading.Timer(0.2, go.set).start()
        manager.save(2, weights(2), rest(2), facts(2), last=True)

    assert manager.steps() == [1, 2]
    assert manager.saved_step == 2
    assert manager.saving.writing is None


def test_staging_buffer_is_reused(manager: Checkpoints) -> None:
    places = set()
    for step in (1, 2, 3):
        save(manager, step)
        manager.finish()
        assert manager._staging._buffer is not None
        places.add(manager._staging._buffer.data_ptr())

    assert len(places) == 1


def test_close_after_an_error_waits_briefly_for_the_save_in_flight(
    tmp_path: Path, group: None
) -> None:
    manager = checkpoints(tmp_path, async_mode="async")
    with blocked_writers() as go:
        save(manager, 1)
        threading.Timer(0.1, go.set).start()
        manager.close()

    assert manager.steps() == [1]


def test_close_after_an_error_cancels_a_save_that_takes_too_long(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "CRASH_SECONDS", 0.05)
    monkeypatch.setattr(saves, "CANCEL_SECONDS", 0.05)
    manager = checkpoints(tmp_path, async_mode="async")
    with blocked_writers():
        save(manager, 1)
        writing = manager.saving.writing
        manager.close()
        assert manager.steps() == []
        assert not list((tmp_path / "checkpoint").glob("lease*"))

    assert writing is not None
    assert writing.wait(patience.seconds(WAIT_SECONDS))
    assert writing.failed
    assert manager.steps() == [], "a writer without its lease must not commit"


def fail(code: int = errno.ENOSPC) -> Callable[..., Any]:
    def full(path: Path, *_: Any) -> Any:
        raise OSError(code, "No space left on device", str(path))

    return full


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_two_failed_saves_in_a_row_are_tolerated_and_a_third_is_not(
    tmp_path: Path, group: None, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    manager = checkpoints(tmp_path, async_mode=mode, on_save_error="continue")

    def attempt(step: int, fails: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(files, "write_hashed", fail())
            save(manager, step)
            manager.finish()

    # The success of step 4 resets the count, so only the third failure after it is an error.
    for step, fails in enumerate([False, True, True, False, True, True], 1):
        attempt(step, fails)
    assert manager.steps() == [1, 4]
    assert manager.saved_step == 4
    assert (
        "training continues, and the newest checkpoint is that of step 4 (checkpoint.on_save_error; 2 of"
        in caplog.text
    )
    with pytest.raises(StorageError, match=r"rank-00000\.bin.*No space left on device"):
        attempt(7, True)
    assert not list((tmp_path / "checkpoint").glob("*.tmp-*"))


def test_failure_of_the_last_save_is_never_tolerated(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoints(tmp_path, on_save_error="continue")
    monkeypatch.setattr(files, "write_hashed", fail())
    with pytest.raises(StorageError):
        manager.save(1, weights(1), rest(1), facts(1), last=True)


def test_loss_of_the_lease_is_never_tolerated(tmp_path: Path, group: None) -> None:
    manager = checkpoints(tmp_path, async_mode="async", on_save_error="continue")
    with blocked_writers() as go:
        save(manager, 1)
        (tmp_path / "checkpoint/lease.json").write_text(
            json.dumps({"nonce": "another", "host": "h", "pid": 1})
        )
        go.set()
        with pytest.raises(ConfigError, match="was taken over by"):
            manager.finish()

    assert manager.steps() == []


# -- several ranks -----------------------------------------------------------------------------------------------------


def tensors_of_rank(step: int) -> dict[str, torch.Tensor]:
    """Return the tensors of this rank. All ranks hold two replicated tensors.

    Ranks 0 and 1 also hold a private tensor each. Rank 2 has nothing to write.
    """
    rank = dist.get_rank()
    private = (
        {f"model.own{rank}": torch.arange(1000, dtype=torch.float32).add(rank + step)}
        if rank < 2
        else {}
    )
    return {
        **private,
        "model.common": torch.full((7,), step, dtype=torch.int64),
        "model.odd": torch.ones(3).bool(),
    }


def save_in_both_modes(root: Path) -> None:
    for mode in ("disabled", "async"):
        manager = checkpoints(root / mode, async_mode=mode)
        for step in (1, 2):
            manager.save(step, tensors_of_rank(step), {}, facts(step), last=False)
            manager.finish()
        manager.close()


def three_ranks(rank: int, root: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    save_in_both_modes(root)

    # Rank 1 cannot write. All ranks raise its error at the first step after the failure.
    manager = checkpoints(root / "fail", async_mode="async", max_stall_seconds=0.0)
    write = files.write_hashed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_hashed", fail() if rank == 1 else write)
        manager.save(1, tensors_of_rank(1), {}, facts(1), last=False)
        if rank == 1:
            eventually(lambda: manager.saving.writing is not None and manager.saving.writing.failed)
        dist.barrier()
        exchange_flags(manager)
        try:
            manager.poll()
        except StorageError as error:
            results["error"] = str(error)
    dist.barrier()
    step_folders = (root / "fail/checkpoint").glob("step-*")
    results["step_folders"] = sorted(path.name for path in step_folders)

    # One slow rank makes all ranks skip the next save.
    with blocked_writers() if rank == 1 else contextlib.nullcontext() as go:
        manager.save(2, tensors_of_rank(2), {}, facts(2), last=False)
        if rank == 2:  # this rank has nothing to write, so its save ends immediately
            eventually(lambda: manager.saving.writing is not None and manager.saving.writing.ended)
        manager.save(3, tensors_of_rank(3), {}, facts(3), last=False)
        results["skipped"] = manager.skipped
        if go:
            go.set()
        manager.finish()
    results["steps"] = manager.steps()
    results["saved"] = manager.saved_step
    manager.close()
    return results


def test_background_save_on_ranks_matches_a_blocking_one_and_fails_on_all_ranks(
    tmp_path: Path,
) -> None:
    answers = run_ranks(3, three_ranks, tmp_path)

    # Both modes write the same files.
    for step in (1, 2):
        blocking = tmp_path / f"disabled/checkpoint/step-{step}"
        background = tmp_path / f"async/checkpoint/step-{step}"
        names = sorted(path.name for path in blocking.iterdir())
        assert names == sorted(path.name for path in background.iterdir())
        assert names[0] == "manifest.json"
        assert names[1:] == ["rank-00000.bin", "rank-00001.bin", "rank-00002.bin"][: len(names) - 1]
        for name in names[1:]:
            assert (blocking / name).read_bytes() == (background / name).read_bytes()

        blocking_manifest = manifest.read(blocking)
        background_manifest = manifest.read(background)
        assert blocking_manifest.tensors == background_manifest.tensors
        assert blocking_manifest.files == background_manifest.files
        assert blocking_manifest.facts == background_manifest.facts
    assert len({answer["error"] for answer in answers}) == 1
    assert "rank 1 on" in answers[0]["error"]
    assert f"errno {errno.ENOSPC}" in answers[0]["error"]
    for answer in answers:
        assert answer["step_folders"] == []
        assert answer["skipped"] == 1
        assert (answer["steps"], answer["saved"]) == ([2], 2)


def run(rank: int, folder: Path, mode: str, stop_after: int | None = None) -> Ended:
    checkpoint = {"enable": True, "interval": 2, "async_mode": mode, "keep_latest_k": 0}
    training = {"steps": 7, "local_batch_size": 4}
    return train_whole(
        rank,
        shallow_config(job={"dump_folder": str(folder)}, training=training, checkpoint=checkpoint),
        stop_after,
    )


def runs_of_each_mode(rank: int, root: Path) -> dict[str, Ended]:
    runs = {
        "blocking": run(rank, root / "blocking", "disabled"),
        "async": run(rank, root / "async", "async"),
    }
    run(rank, root / "cut", "async", stop_after=5)
    runs["continued"] = run(rank, root / "cut", "async")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(files, "write_hashed", fail())
        begin = Checkpoints._begin

        def begin_and_wait(self: Checkpoints, *arguments: Any) -> None:
            begin(self, *arguments)
            assert rank == 0 or (
                self.saving.writing and self.saving.writing.wait(patience.seconds(WAIT_SECONDS))
            )
            dist.barrier()

        patch.setattr(Checkpoints, "_begin", begin_and_wait)
        runs["failed"] = run(rank, root / "failed", "async")
    return runs


def test_background_saves_change_no_numbers_and_failures_are_reported_within_a_step(
    tmp_path: Path,
) -> None:
    for answer in run_ranks(2, runs_of_each_mode, tmp_path):
        blocking = answer["blocking"]
        assert blocking.error is None
        assert answer["async"].error is None
        assert answer["async"].losses == blocking.losses
        assert_bitwise(answer["async"].weights, blocking.weights)
        assert_bitwise(answer["continued"].weights, blocking.weights)
        assert_bitwise(answer["continued"].optimizer, blocking.optimizer)
        assert answer["continued"].losses == blocking.losses[-len(answer["continued"].losses) :]
        failed = answer["failed"]
        assert isinstance(failed.error, StorageError)
        assert "rank 1 on" in str(failed.error)
        assert failed.state["step"] == 3, (
            "the failed save is that of step 2, reported one step later"
        )

    for name in ("blocking", "async"):
        assert len(list((tmp_path / name / "checkpoint").glob("step-*"))) == 4


# -- shutdown ----------------------------------------------------------------------------------------------------------


def stopping_run(root: Path, manager: Checkpoints, grace_seconds: float) -> Any:
    stop = StopRequest(grace_seconds)
    stop.note("SIGTERM")
    config = Config(job=Job(dump_folder=str(root)), checkpoint=Checkpoint(enable=True))
    state = SimpleNamespace(step=2)
    return SimpleNamespace(
        config=config, state=state, resilience=Resilience(stop=stop, stop_flag=1.0)
    )


def test_stop_request_waits_for_the_save_in_flight_and_saves_the_newest_step(
    manager: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutdown,
        "save",
        lambda run, manager, last, wait: manager.save(2, weights(2), rest(2), facts(2), last, wait),
    )
    with blocked_writers() as go:
        save(manager, 1)
        threading.Timer(0.2, go.set).start()
        with pytest.raises(Preempted, match="everything is saved in .*step-2"):
            shutdown.leave(stopping_run(tmp_path, manager, 60.0), manager)

    assert manager.steps() == [1, 2]


def test_stop_request_begins_no_save_when_the_one_in_flight_uses_up_the_grace_time(
    manager: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "CRASH_SECONDS", 0.05)
    monkeypatch.setattr(saves, "CANCEL_SECONDS", 0.05)
    monkeypatch.setattr(shutdown, "save", lambda *_, **__: pytest.fail("no time"))
    with blocked_writers():
        save(manager, 1)
        with pytest.raises(NotSaved, match="the last checkpoint is none"):
            shutdown.leave(stopping_run(tmp_path, manager, 0.5), manager)


# -- markers -----------------------------------------------------------------------------------------------------------


def test_markers_of_other_saves_are_ignored_and_broken_ones_are_errors(tmp_path: Path) -> None:
    file = files.TensorFile("rank-00001.bin", 4, "ab")
    write_marker = async_save.write_marker
    write_marker(tmp_path, 1, "old", file)
    write_marker(tmp_path, 2, "new", file)
    looks = 0

    def check_cancelled() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise async_save.Cancelled

    with pytest.raises(async_save.Cancelled):
        async_save.wait_for_markers(tmp_path, [1], "new", check_cancelled)
    assert async_save.wait_for_markers(tmp_path, [2], "new", lambda: None) == [file]
    assert not (tmp_path / "rank-00002.done").exists(), "the marker is not part of the checkpoint"

    for text in ("", "[]", "{", "3", '["new"]', '["new", "a", "b", "c"]', "[" * 4000):
        (tmp_path / "rank-00003.done").write_text(text)
        with pytest.raises(StorageError, match=r"rank-00003\.done: it is not a valid marker"):
            async_save.wait_for_markers(tmp_path, [3], "new", lambda: None)
