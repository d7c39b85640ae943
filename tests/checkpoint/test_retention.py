"""Retention never deletes the newest complete checkpoint of a run, whatever happens to its folder."""

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
from small_checkpoint import (
    assert_is_of_its_step,
    checkpoints,
    facts,
    rest,
    save,
    weights,
    world_of_one,
)

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
"""Writer threads wait until it is set."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    write = files.write_hashed

    def write_late(*arguments: Any) -> Any:
        assert GO.wait(patience.seconds(60.0))
        return write(*arguments)

    GO.set()
    with world_of_one(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_hashed", write_late)
        patch.setattr(saves, "CRASH_SECONDS", 0.0)
        patch.setattr(saves, "CANCEL_SECONDS", 0.0)
        yield


@settings(max_examples=300 if RUNS <= 20 else RUNS)
@given(st.sets(st.integers(0, 50)), st.integers(0, 6), st.data())
def test_newest_k_complete_checkpoints_and_all_later_ones_are_kept(
    steps: set[int], keep: int, data: st.DataObject
) -> None:
    own_steps = sorted(steps)
    complete = set(data.draw(st.lists(st.sampled_from(own_steps)))) if own_steps else set()
    deleted = to_delete(own_steps, keep, complete)
    kept_complete = sorted(complete - {*deleted})

    if keep:
        assert kept_complete[-keep:] == sorted(complete)[-keep:]
    else:
        assert deleted == []
    assert not deleted or len(kept_complete) >= keep

    # Retention is idempotent: a second pass deletes nothing.
    remaining = [step for step in own_steps if step not in deleted]
    assert to_delete(remaining, keep, complete) == []


class Folder(RuleBasedStateMachine):
    """A run that saves (blocking or in the background), is killed, loses files, rolls back and restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="shardtrain-retention-"))
        self.mode = "disabled"
        self.manager = self.start()
        self.step = 0
        self.in_flight = False
        self.damaged: set[int] = set()
        self.forever: set[int] = set()

    def start(self, **options: Any) -> Checkpoints:
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
        self.manager = self.start()

    @property
    def folder(self) -> Path:
        return self.root / "checkpoint"

    def valid_steps(self) -> set[int]:
        return {*self.manager.steps()} - self.damaged

    def begin(self, step: int) -> None:
        self.manager.save(
            step,
            weights(step),
            rest(step),
            {**facts(step), "best": self.manager.best.to_dict()},
            last=False,
        )

    def finish_save(self) -> None:
        """Let the save in flight finish."""
        GO.set()
        if self.in_flight:
            self.in_flight = False
            self.manager.finish()
            self.note_saved(self.step)

    def note_saved(self, step: int) -> None:
        self.step = step
        self.damaged.discard(step)
        if step % 4 == 0:
            self.forever.add(step)

    @rule(further=st.integers(1, 5), loss=st.sampled_from([None, 1.0, 2.0, 3.0]))
    def save(self, further: int, loss: float | None) -> None:
        self.finish_save()
        before = self.valid_steps()
        step = self.step + further
        if loss is not None:
            self.manager.best.observe(step, {"loss": loss})
        self.begin(step)
        self.manager.finish()
        self.note_saved(step)
        after = self.valid_steps()
        assert step in after
        assert {s for s in before if s > step} <= after, (
            "later steps of an abandoned history must not be deleted"
        )
        if self.manager.best.is_new(step):
            assert self.manager.best.kept == step == read_pointer(self.folder)["step"]

    @precondition(lambda self: self.mode == "async")
    @rule(further=st.integers(1, 5), loss=st.sampled_from([None, 1.0, 2.0, 3.0]))
    def save_and_continue(self, further: int, loss: float | None) -> None:
        self.finish_save()
        self.step += further
        if loss is not None:
            self.manager.best.observe(self.step, {"loss": loss})
        GO.clear()
        self.begin(self.step)
        self.in_flight = True

    @precondition(lambda self: self.in_flight)
    @rule()
    def die_in_flight(self) -> None:
        before = self.valid_steps()
        writing = self.manager.saving.writing
        assert writing is not None
        self.manager.close()
        GO.set()
        assert writing.wait(patience.seconds(60.0)) and writing.failed, (
            "a writer without its lease must not commit"
        )
        assert self.valid_steps() == before
        self.in_flight = False
        self.continue_from(self.start())

    @precondition(lambda self: self.step)
    @rule(stage=st.sampled_from(["write", "manifest", "rename", "trash"]))
    def die_during_save(self, stage: str) -> None:
        """Let the process die at a stage of a save: nothing after it runs, not even cleanup."""
        self.finish_save()
        before = self.valid_steps()
        functions = {"write": "write_hashed", "manifest": "write_durable", "rename": "rename"}
        rmtree = shutil.rmtree
        patched = pytest.MonkeyPatch()

        def keep_trash(path: Path, **options: Any) -> None:
            if stage == "trash" and ".trash-" not in path.name:
                rmtree(path, **options)

        with patched.context() as patch:
            patch.setattr(shutil, "rmtree", keep_trash)
            if stage == "trash":
                self.begin(self.step + 1)
                self.manager.finish()
                self.note_saved(self.step + 1)
                return
            patch.setattr(files, functions[stage], self._die)
            with pytest.raises(StorageError):
                self.begin(self.step + 1)
                self.manager.finish()
        assert before <= {*self.manager.steps()}
        self.manager.close()  # the lease of a dead process is free; see test_lease.py

    @staticmethod
    def _die(*_: object) -> None:
        raise OSError(5, "killed")

    @precondition(lambda self: len(self.valid_steps()) > 1)
    @rule(data=st.data(), how=st.sampled_from(["cut", "unlink", "manifest"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.valid_steps())))
        path = self.folder / f"step-{step}"
        file = path / "rank-00000.bin"
        if how == "cut":
            file.write_bytes(file.read_bytes()[:-1])
        elif how == "unlink":
            file.unlink()
        else:
            (path / "manifest.json").write_text("{}")
        self.damaged.add(step)

    def continue_from(self, manager: Checkpoints, expected_step: int | None = None) -> None:
        self.manager = manager
        newest = manager.to_continue()
        valid = self.valid_steps()
        if newest is None:
            assert not valid
            self.step = 0
            return
        assert int(newest.name[5:]) == (max(valid) if expected_step is None else expected_step)
        self.step = assert_is_of_its_step(newest)
        manager.best.load(manifest.read(newest).facts["best"], self.folder)

    @precondition(lambda self: self.valid_steps())
    @rule()
    def restart(self) -> None:
        self.finish_save()
        self.manager.close()
        self.continue_from(self.start())

    @precondition(lambda self: self.valid_steps())
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        self.finish_save()
        step = data.draw(st.sampled_from(sorted(self.valid_steps())))
        self.manager.close()
        self.continue_from(self.start(load_step=step), step)

    @invariant()
    def a_valid_checkpoint_exists_after_the_first_save(self) -> None:
        valid = self.valid_steps()
        assert valid or not self.step or self.in_flight
        assert all(is_complete(self.folder / f"step-{s}") for s in valid)
        assert not any(
            is_complete(self.folder / f"step-{s}")
            for s in self.damaged
            if s in self.manager.steps()
        )

    @invariant()
    def permanent_and_best_checkpoints_exist(self) -> None:
        present = {*retention.step_folders(self.folder)}
        assert self.forever <= present
        assert self.manager.best.kept in {-1, *present}

    def teardown(self) -> None:
        self.finish_save()
        self.manager.close()
        shutil.rmtree(self.root, ignore_errors=True)


TestFolder = Folder.TestCase
TestFolder.settings = settings(
    max_examples=RUNS, stateful_step_count=15, suppress_health_check=list(HealthCheck)
)


def test_deletion_renames_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = checkpoints(tmp_path)
    save(manager, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    retention.discard(tmp_path / "checkpoint/step-2")

    assert manager.steps() == []

    names = [path.name for path in (tmp_path / "checkpoint").glob("step-*")]
    assert len(names) == 1
    assert names[0].startswith("step-2.trash-")


def test_a_save_does_not_wait_until_old_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint may have 16,384 files. Their removal at 1 ms each would delay a save by 16 seconds on all ranks."""
    may_remove = threading.Event()
    removed: list[str] = []

    def slow_rmtree(path: Path, **_: Any) -> None:
        assert may_remove.wait(patience.seconds(30))
        removed.append(path.name)

    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **_: slow_rmtree(path) if ".trash-" in path.name else None
    )
    manager = checkpoints(tmp_path, keep_latest_k=2)
    for step in (1, 2, 3, 4):
        save(manager, step)

    # All four saves have ended, although the removal of the first old file is still blocked.
    assert manager.steps() == [3, 4]
    assert not removed

    may_remove.set()
    patience.wait_for(lambda: len(removed) == 2, 10)
    manager.close()

    assert sorted(name.partition(".")[0] for name in removed) == ["step-1", "step-2"]


def test_a_process_without_threads_removes_old_checkpoints_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    (tmp_path / "step-1.trash-0").mkdir()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    retention.Removals().start(tmp_path / "step-1.trash-0")

    assert not list(tmp_path.iterdir())


def test_failed_deletion_is_logged_and_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = checkpoints(tmp_path, keep_latest_k=2)
    for step in (1, 2):
        save(manager, step)

    def fail(path: Path, _: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(retention, "discard", fail)
    save(manager, 3)
    assert manager.steps() == [1, 2, 3]
    assert "cannot delete old checkpoint" in caplog.text


def test_leftovers_of_a_dead_writer_are_deleted_immediately_and_others_after_an_hour(
    tmp_path: Path,
) -> None:
    for name in ("step-4.tmp-dead01", "step-6.tmp-0abc01", "step-2.tmp-0123ab"):
        (tmp_path / name).mkdir()
    for name in (
        "lease.json.dead01",
        "best.json.dead01",
        "lease.json.0abc01",
        "lease.json",
        "best.json",
        "notes",
    ):
        (tmp_path / name).touch()
    retention.sweep(tmp_path, "0123ab", time.time(), {"dead01"})
    remaining = [
        "best.json",
        "lease.json",
        "lease.json.0abc01",
        "notes",
        "step-2.tmp-0123ab",
        "step-6.tmp-0abc01",
    ]

    assert sorted(path.name for path in tmp_path.iterdir()) == remaining

    # An hour later, the leftovers of unknown writers are deleted too. Those of this writer stay.
    retention.sweep(tmp_path, "0123ab", time.time() + 3700, ())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.json",
        "lease.json",
        "notes",
        "step-2.tmp-0123ab",
    ]


def test_manifest_is_read_once_however_many_saves_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Path] = []
    monkeypatch.setattr(retention, "read", lambda path: parsed.append(path) or manifest.read(path))
    manager = checkpoints(tmp_path, keep_latest_k=3)
    for step in range(1, 9):
        save(manager, step)
    manager.close()

    assert manager.steps() == [6, 7, 8]
    assert len(parsed) == len(set(parsed))
    assert len(parsed) <= 8

    (tmp_path / "checkpoint/step-8/rank-00000.bin").write_bytes(b"")
    assert not is_complete(tmp_path / "checkpoint/step-8"), (
        "only manifests are cached: file sizes must be checked each time"
    )


def test_save_checks_only_keep_checkpoints_however_many_are_permanent(tmp_path, monkeypatch):
    for step in range(10, 3010, 10):
        (tmp_path / f"step-{step}").mkdir()
    checked: list[str] = []
    monkeypatch.setattr(
        retention, "is_complete", lambda path, origin: (checked.append(path.name), True)[1]
    )
    monkeypatch.setattr(retention, "is_of", lambda path, origin: True)
    retention.delete_old(
        tmp_path, saved=3000, keep=2, forever=10, spare=0, origin="", removals=retention.Removals()
    )

    assert checked == ["step-3000", "step-2990"]
    assert len(list(tmp_path.iterdir())) == 300
