"""Exports of checkpoints in another format: in the background, canceled when time is short, and never partial."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import patience
import pytest
from small_checkpoint import checkpoints, facts, rest, weights, world_of_one

from shardtrain.checkpoint.folder import Checkpoints

WAIT_SECONDS = 60.0


class Slow:
    """Export that writes until it is canceled."""

    begun = False

    def is_due(self, step: int, last: bool) -> bool:
        return True

    def write_share(
        self,
        checkpoint: Path,
        draft: Path,
        rank: int,
        size: int,
        check_cancelled: Callable[[], None],
    ) -> None:
        (draft / "half").write_text("")
        self.begun = True
        end = time.monotonic() + patience.seconds(WAIT_SECONDS)
        while time.monotonic() < end:
            check_cancelled()
            time.sleep(0.005)

    def write_rest(self, checkpoint: Path, draft: Path) -> None:
        raise AssertionError("must have been canceled before")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Checkpoints]:
    with world_of_one():
        manager = checkpoints(tmp_path, async_mode="async", keep_latest_k=0)
        yield manager
        manager.close()


def names(manager: Checkpoints) -> list[str]:
    assert isinstance(manager._folder, Path)
    return sorted(path.name for path in manager._folder.glob("step-*"))


def begin(manager: Checkpoints) -> Slow:
    """Save step 1 and wait until its export begins."""
    exporter = manager.exporter = Slow()
    manager.save(1, weights(1), rest(1), facts(1), last=False)
    assert manager._finish_one(), "the save"
    end = time.monotonic() + patience.seconds(WAIT_SECONDS)
    while not exporter.begun and time.monotonic() < end:
        time.sleep(0.005)
    return exporter


def test_export_is_canceled_when_time_is_short(manager: Checkpoints) -> None:
    begin(manager)
    assert any("-hf.tmp-" in name for name in names(manager))
    assert manager.saved_step == 1

    manager.cancel_export()
    assert names(manager) == ["step-1"]

    manager.save(2, weights(2), rest(2), facts(2), last=False, wait=True)
    assert names(manager) == ["step-1", "step-2"], "step 2 is saved without an export"


def test_run_that_ends_with_an_error_leaves_no_partial_export(
    manager: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardtrain.checkpoint.save.CRASH_SECONDS", 0.0)
    begin(manager)
    manager.close()
    assert names(manager) == ["step-1"]
