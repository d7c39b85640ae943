"""Whatever happens to a folder, the newest whole checkpoint of a run is never deleted."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from small_checkpoint import assert_is_of_its_step, checkpoints, save, world_of_one

from shardtrain.checkpoint import files, retention
from shardtrain.checkpoint.retention import is_whole, to_delete
from shardtrain.errors import StorageError

RUNS = int(os.environ.get("SHARDTRAIN_RETENTION_RUNS", "20"))


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with world_of_one():
        yield


@settings(max_examples=300 if RUNS <= 20 else RUNS)
@given(st.sets(st.integers(0, 50)), st.integers(0, 6), st.data())
def test_the_k_newest_whole_ones_stay_and_nothing_newer_than_they_goes(
    steps: set[int], keep: int, data: st.DataObject
) -> None:
    own = sorted(steps)
    whole = set(data.draw(st.lists(st.sampled_from(own)))) if own else set()
    gone = to_delete(own, keep, whole)
    kept_whole = sorted(whole - {*gone})
    assert kept_whole[-keep:] == sorted(whole)[-keep:] if keep else gone == []
    assert not gone or len(kept_whole) >= keep
    assert to_delete([step for step in own if step not in gone], keep, whole) == [], "twice is once"


class Folder(RuleBasedStateMachine):
    """A run that saves, is cut short, loses files, goes back, and starts again."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="shardtrain-retention-"))
        self.kept = checkpoints(self.root, keep_latest_k=2)
        self.step = 0
        self.damaged: set[int] = set()

    @property
    def folder(self) -> Path:
        return self.root / "checkpoint"

    @rule(further=st.integers(1, 5))
    def save(self, further: int) -> None:
        before = {s for s in self.kept.steps() if s not in self.damaged}
        self.step += further
        save(self.kept, self.step)
        self.damaged.discard(self.step)
        after = {s for s in self.kept.steps() if s not in self.damaged}
        assert self.step in after
        assert {s for s in before if s > self.step} <= after, "a later history is not ours to delete"

    @precondition(lambda self: self.step)
    @rule(stage=st.sampled_from(["write", "manifest", "rename", "trash"]))
    def save_is_cut_short(self, stage: str) -> None:
        """The process dies there: nothing after it is done, and no clean-up."""
        before = {s for s in self.kept.steps() if s not in self.damaged}
        names = {"write": "write_hashed", "manifest": "write_whole", "rename": "rename"}
        patched = pytest.MonkeyPatch()
        with patched.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            if stage == "trash":
                save(self.kept, self.step + 1)
                self.step += 1
                self.damaged.discard(self.step)
                return
            patch.setattr(files, names[stage], self._die)
            with pytest.raises(StorageError):
                save(self.kept, self.step + 1)
        assert before <= {*self.kept.steps()}
        self.kept.close()  # the lease of a dead process is free; see test_lease.py
        self.kept = checkpoints(self.root, keep_latest_k=2)

    @staticmethod
    def _die(*_: object) -> None:
        raise OSError(5, "cut short")

    @precondition(lambda self: len({*self.kept.steps()} - self.damaged) > 1)
    @rule(data=st.data(), how=st.sampled_from(["cut", "unlink", "manifest"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        step = data.draw(st.sampled_from(sorted({*self.kept.steps()} - self.damaged)))
        path = self.folder / f"step-{step}"
        file = path / "rank-00000.bin"
        if how == "cut":
            file.write_bytes(file.read_bytes()[:-1])
        elif how == "unlink":
            file.unlink()
        else:
            (path / "manifest.json").write_text("{}")
        self.damaged.add(step)

    @precondition(lambda self: {*self.kept.steps()} - self.damaged)
    @rule()
    def start_again(self) -> None:
        self.kept.close()
        self.kept = checkpoints(self.root, keep_latest_k=2)
        found = self.kept.to_continue()
        assert found is not None
        assert int(found.name[5:]) == max({*self.kept.steps()} - self.damaged)
        self.step = assert_is_of_its_step(found)

    @precondition(lambda self: {*self.kept.steps()} - self.damaged)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted({*self.kept.steps()} - self.damaged)))
        self.kept.close()
        self.kept = checkpoints(self.root, keep_latest_k=2, load_step=step)
        found = self.kept.to_continue()
        assert found is not None
        self.step = assert_is_of_its_step(found)

    @invariant()
    def one_good_one_is_there_once_there_was_one(self) -> None:
        good = [s for s in self.kept.steps() if s not in self.damaged]
        assert good or not self.step
        assert all(is_whole(self.folder / f"step-{s}") for s in good)
        assert not any(is_whole(self.folder / f"step-{s}") for s in self.damaged if s in self.kept.steps())

    def teardown(self) -> None:
        self.kept.close()
        shutil.rmtree(self.root, ignore_errors=True)


TestFolder = Folder.TestCase
TestFolder.settings = settings(
    max_examples=RUNS, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_deleting_is_a_rename_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = checkpoints(tmp_path)
    save(kept, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    retention.discard(tmp_path / "checkpoint/step-2")
    assert kept.steps() == []
    names = [path.name for path in (tmp_path / "checkpoint").glob("step-*")]
    assert len(names) == 1 and names[0].startswith("step-2.trash-")


def test_what_cannot_be_deleted_is_said_and_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = checkpoints(tmp_path, keep_latest_k=2)
    for step in (1, 2):
        save(kept, step)

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(retention, "discard", refused)
    save(kept, 3)
    assert kept.steps() == [1, 2, 3] and "cannot delete the old checkpoint" in caplog.text
