"""Whatever happens to a folder, the newest whole checkpoint of a run is never deleted."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import patience
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small_checkpoint import assert_is_of_its_step, checkpoints, facts, rest, save, weights, world_of_one

from shardtrain.checkpoint import files, manifest, retention
from shardtrain.checkpoint import save as saves
from shardtrain.checkpoint.best import read_pointer
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.retention import is_complete, to_delete
from shardtrain.utils.errors import StorageError

RUNS = int(os.environ.get("SHARDTRAIN_RETENTION_RUNS", "20"))
if RUNS > 20:
    pytestmark = pytest.mark.timeout(0)


GO = threading.Event()
"""Threads that write wait for it."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    write = files.write_hashed

    def late(*arguments: Any) -> Any:
        assert GO.wait(patience.seconds(60.0))
        return write(*arguments)

    GO.set()
    with world_of_one(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_hashed", late)
        patch.setattr(saves, "CRASH_SECONDS", 0.0)
        patch.setattr(saves, "CANCEL_SECONDS", 0.0)
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
    """A run that saves, now or in the background, is cut short, loses files, goes back, and starts again."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="shardtrain-retention-"))
        self.mode = "disabled"
        self.kept = self.made()
        self.step = 0
        self.flying = False
        self.damaged: set[int] = set()
        self.forever: set[int] = set()

    def made(self, **options: Any) -> Checkpoints:
        return checkpoints(
            self.root,
            keep_latest_k=2,
            keep_every_n_steps=4,
            keep_best="validation.loss",
            async_mode=self.mode,
            **options,
        )

    @initialize(mode=st.sampled_from(["disabled", "async"]))
    def choose(self, mode: str) -> None:
        self.mode = mode
        self.kept = self.made()

    @property
    def folder(self) -> Path:
        return self.root / "checkpoint"

    def good(self) -> set[int]:
        return {*self.kept.steps()} - self.damaged

    def begin(self, step: int) -> None:
        self.kept.save(step, weights(step), rest(step), {**facts(step), "best": self.kept.best.to_dict()}, last=False)

    def land(self) -> None:
        """What is in flight comes to its end."""
        GO.set()
        if self.flying:
            self.flying = False
            self.kept.finish()
            self.saved(self.step)

    def saved(self, step: int) -> None:
        self.step = step
        self.damaged.discard(step)
        if step % 4 == 0:
            self.forever.add(step)

    @rule(further=st.integers(1, 5), loss=st.sampled_from([None, 1.0, 2.0, 3.0]))
    def save(self, further: int, loss: float | None) -> None:
        self.land()
        before = self.good()
        step = self.step + further
        if loss is not None:
            self.kept.best.observe(step, {"loss": loss})
        self.begin(step)
        self.kept.finish()
        self.saved(step)
        after = self.good()
        assert step in after
        assert {s for s in before if s > step} <= after, "a later history is not ours to delete"
        if self.kept.best.is_new(step):
            assert self.kept.best.kept == step == read_pointer(self.folder)["step"]

    @precondition(lambda self: self.mode == "async")
    @rule(further=st.integers(1, 5), loss=st.sampled_from([None, 1.0, 2.0, 3.0]))
    def save_and_continue(self, further: int, loss: float | None) -> None:
        self.land()
        self.step += further
        if loss is not None:
            self.kept.best.observe(self.step, {"loss": loss})
        GO.clear()
        self.begin(self.step)
        self.flying = True

    @precondition(lambda self: self.flying)
    @rule()
    def die_in_flight(self) -> None:
        before, writing = self.good(), self.kept.saving.writing
        assert writing is not None
        self.kept.close()
        GO.set()
        assert writing.wait(patience.seconds(60.0)) and writing.failed, "without its lease nobody commits"
        assert self.good() == before
        self.flying = False
        self.continue_from(self.made())

    @precondition(lambda self: self.step)
    @rule(stage=st.sampled_from(["write", "manifest", "rename", "trash"]))
    def save_is_cut_short(self, stage: str) -> None:
        """The process dies there: nothing after it is done, and no clean-up."""
        self.land()
        before = self.good()
        names = {"write": "write_hashed", "manifest": "write_durable", "rename": "rename"}
        rmtree, patched = shutil.rmtree, pytest.MonkeyPatch()

        def only_left(path: Path, **options: Any) -> None:
            if stage == "trash" and ".trash-" not in path.name:
                rmtree(path, **options)

        with patched.context() as patch:
            patch.setattr(shutil, "rmtree", only_left)
            if stage == "trash":
                self.begin(self.step + 1)
                self.kept.finish()
                self.saved(self.step + 1)
                return
            patch.setattr(files, names[stage], self._die)
            with pytest.raises(StorageError):
                self.begin(self.step + 1)
                self.kept.finish()
        assert before <= {*self.kept.steps()}
        self.kept.close()  # the lease of a dead process is free; see test_lease.py

    @staticmethod
    def _die(*_: object) -> None:
        raise OSError(5, "cut short")

    @precondition(lambda self: len(self.good()) > 1)
    @rule(data=st.data(), how=st.sampled_from(["cut", "unlink", "manifest"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.good())))
        path = self.folder / f"step-{step}"
        file = path / "rank-00000.bin"
        if how == "cut":
            file.write_bytes(file.read_bytes()[:-1])
        elif how == "unlink":
            file.unlink()
        else:
            (path / "manifest.json").write_text("{}")
        self.damaged.add(step)

    def continue_from(self, kept: Checkpoints, wanted: int | None = None) -> None:
        self.kept = kept
        found = kept.to_continue()
        good = self.good()
        if found is None:
            assert not good
            self.step = 0
            return
        assert int(found.name[5:]) == (max(good) if wanted is None else wanted)
        self.step = assert_is_of_its_step(found)
        kept.best.load(manifest.read(found).facts["best"], self.folder)

    @precondition(lambda self: self.good())
    @rule()
    def start_again(self) -> None:
        self.land()
        self.kept.close()
        self.continue_from(self.made())

    @precondition(lambda self: self.good())
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        self.land()
        step = data.draw(st.sampled_from(sorted(self.good())))
        self.kept.close()
        self.continue_from(self.made(load_step=step), step)

    @invariant()
    def one_good_one_is_there_once_there_was_one(self) -> None:
        good = self.good()
        assert good or not self.step or self.flying
        assert all(is_complete(self.folder / f"step-{s}") for s in good)
        assert not any(is_complete(self.folder / f"step-{s}") for s in self.damaged if s in self.kept.steps())

    @invariant()
    def what_is_to_stay_is_there(self) -> None:
        there = {*retention.step_folders(self.folder)}
        assert self.forever <= there
        assert self.kept.best.kept in {-1, *there}

    def teardown(self) -> None:
        self.land()
        self.kept.close()
        shutil.rmtree(self.root, ignore_errors=True)


TestFolder = Folder.TestCase
TestFolder.settings = settings(max_examples=RUNS, stateful_step_count=15, suppress_health_check=list(HealthCheck))


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
    assert kept.steps() == [1, 2, 3] and "cannot delete old checkpoint" in caplog.text


def test_what_a_dead_writer_left_goes_at_once_and_what_a_living_one_may_still_write_stays(tmp_path: Path) -> None:
    for name in ("step-4.tmp-dead01", "step-6.tmp-0abc01", "step-2.tmp-0123ab"):
        (tmp_path / name).mkdir()
    for name in ("lease.json.dead01", "best.json.dead01", "lease.json.0abc01", "lease.json", "best.json", "notes"):
        (tmp_path / name).touch()
    retention.sweep(tmp_path, "0123ab", time.time(), {"dead01"})
    left = ["best.json", "lease.json", "lease.json.0abc01", "notes", "step-2.tmp-0123ab", "step-6.tmp-0abc01"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    retention.sweep(tmp_path, "0123ab", time.time() + 3700, ())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "lease.json", "notes", "step-2.tmp-0123ab"]


def test_a_manifest_is_read_once_however_many_saves_come_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Path] = []
    monkeypatch.setattr(retention, "read", lambda path: parsed.append(path) or manifest.read(path))
    kept = checkpoints(tmp_path, keep_latest_k=3)
    for step in range(1, 9):
        save(kept, step)
    kept.close()
    assert kept.steps() == [6, 7, 8]
    assert len(parsed) == len(set(parsed)) <= 8
    (tmp_path / "checkpoint/step-8/rank-00000.bin").write_bytes(b"")
    assert not is_complete(tmp_path / "checkpoint/step-8"), (
        "what is remembered are sizes, and files are looked at each time"
    )


def test_a_save_looks_at_as_many_checkpoints_as_it_keeps_whatever_stays_for_ever(tmp_path, monkeypatch):
    for step in range(10, 3010, 10):
        (tmp_path / f"step-{step}").mkdir()
    looked: list[str] = []
    monkeypatch.setattr(retention, "is_complete", lambda path, origin: (looked.append(path.name), True)[1])
    monkeypatch.setattr(retention, "is_of", lambda path, origin: True)
    retention.delete_old(tmp_path, saved=3000, keep=2, forever=10, spare=0, origin="")
    assert looked == ["step-3000", "step-2990"]
    assert len(list(tmp_path.iterdir())) == 300
