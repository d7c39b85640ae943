"""A checkpoint written once more in another format: in the background, cancelled when time is short, whole or not."""

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
    """Writes until it is told to stop."""

    begun = False

    def is_due(self, step: int, last: bool) -> bool:
        return True

    def write_share(
        self, checkpoint: Path, draft: Path, rank: int, size: int, check_cancelled: Callable[[], None]
    ) -> None:
        (draft / "half").write_text("")
        self.begun = True
        end = time.monotonic() + patience.seconds(WAIT_SECONDS)
        while time.monotonic() < end:
            check_cancelled()
            time.sleep(0.005)

    def write_rest(self, checkpoint: Path, draft: Path) -> None:
        raise AssertionError("it was cancelled before")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Checkpoints]:
    with world_of_one():
        found = checkpoints(tmp_path, async_mode="async", keep_latest_k=0)
        yield found
        found.close()


def names(kept: Checkpoints) -> list[str]:
    assert isinstance(kept._folder, Path)
    return sorted(path.name for path in kept._folder.glob("step-*"))


def begin(kept: Checkpoints) -> Slow:
    """Save step 1, and let its export begin."""
    exporter = kept.exporter = Slow()
    kept.save(1, weights(1), rest(1), facts(1), last=False)
    assert kept._finish_one(), "the save"
    end = time.monotonic() + patience.seconds(WAIT_SECONDS)
    while not exporter.begun and time.monotonic() < end:
        time.sleep(0.005)
    return exporter


def test_an_export_is_cancelled_where_there_is_no_time_for_it(kept: Checkpoints) -> None:
    begin(kept)
    assert any("-hf.tmp-" in name for name in names(kept)) and kept.saved_step == 1
    kept.cancel_export()
    assert names(kept) == ["step-1"]
    kept.save(2, weights(2), rest(2), facts(2), last=False, wait=True)
    assert names(kept) == ["step-1", "step-2"], "and none is begun any more"


def test_a_run_that_ends_with_an_error_leaves_no_half_of_one(
    kept: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardtrain.checkpoint.save.CRASH_SECONDS", 0.0)
    begin(kept)
    kept.close()
    assert names(kept) == ["step-1"]
