"""After a power loss at any moment of a save, the reader finds the old or the new checkpoint.

POSIX promises little after a crash: synced files have their bytes, and synced folders have their names. Any other
change may be present or not, in any combination. These tests record every change of the disk that a save makes, build
every state that a crash after it may leave, and read it.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from small_checkpoint import assert_is_of_its_step, checkpoints, save, world_of_one

from shardtrain.utils.errors import CheckpointError


@dataclass
class File:
    data: bytes = b""
    synced: bytes = b""

    def after_crash(self) -> list[bytes]:
        """Return possible contents: the synced bytes, followed by any subset of five parts of the rest.

        A missing part is truncated, or zero like a block that was never written.
        """
        unsynced = self.data[len(self.synced) :]
        size = max(1, -(-len(unsynced) // 5))
        parts = [unsynced[start : start + size] for start in range(0, len(unsynced), size)]
        tails = [unsynced[: size * count] for count in range(len(parts) + 1)]
        for is_kept in itertools.product((False, True), repeat=len(parts)):
            tail = b""
            for part, keep in zip(parts, is_kept, strict=True):
                tail += part if keep else bytes(len(part))
            tails.append(tail)
        return [self.synced + tail for tail in dict.fromkeys(tails)]


@dataclass
class Folder:
    entries: dict[str, Any] = field(default_factory=dict)
    durable: dict[str, Any] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)
    """Changes of names since the last sync. A crash applies each one entirely or not at all. None removes a name."""

    def change(self, **names: Any) -> None:
        self.pending.append(names)
        apply(self.entries, names)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.entries), []

    def after_crash(self) -> Iterator[dict[str, Any]]:
        for applied in itertools.product((False, True), repeat=len(self.pending)):
            entries = dict(self.durable)
            for change in itertools.compress(self.pending, applied):
                apply(entries, change)
            yield entries


def apply(entries: dict[str, Any], change: dict[str, Any]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """Model of the states of a folder after a crash, derived from the ``os`` calls that changed it."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, self.read(root)
        self.opened: dict[int, Any] = {}
        self.paths: dict[int, Path] = {}
        self.seen: set[Any] = set()
        self.states: list[tuple[int, Any]] = []
        self.changes = 0

    def read(self, path: Path) -> Any:
        """Model of an existing file or folder. All of its content is durable."""
        if path.is_file():
            return File(path.read_bytes(), path.read_bytes())
        folder = Folder({entry.name: self.read(entry) for entry in path.iterdir()})
        folder.sync()
        return folder

    def at(self, path: Any) -> tuple[Any, str]:
        """Return the node of a path's parent folder and the last component of the path."""
        node = self.top
        *parents, name = Path(path).relative_to(self.root).parts or ("",)
        for part in parents:
            node = node.entries[part]
        return node, name

    def node(self, path: Any) -> Any:
        folder, name = self.at(path)
        return folder.entries.get(name) if name else self.top

    def keep_states(self) -> None:
        """Record the new states that a crash at this moment may leave."""
        self.changes += 1
        for tree in self.trees(self.top):
            if tree not in self.seen:
                self.seen.add(tree)
                self.states.append((self.changes, tree))

    def trees(self, node: Any) -> Iterator[Any]:
        if isinstance(node, File):
            yield from node.after_crash()
            return
        for entries in node.after_crash():
            names = sorted(entries)
            for below in itertools.product(*(list(self.trees(entries[name])) for name in names)):
                yield tuple(zip(names, below, strict=True))

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        names = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
        real = {name: getattr(os, name) for name in names}

        def is_inside(path: Any) -> bool:
            return isinstance(path, str | Path) and Path(path).is_relative_to(self.root)

        def full_path(path: Any, folder: int | None) -> Any:
            """Path of a name that is relative to an open folder."""
            return path if folder is None else self.paths.get(folder, Path()) / path

        def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            descriptor = real["open"](path, flags, *arguments, **options)
            path = full_path(path, options.get("dir_fd"))
            self.opened.pop(descriptor, None)
            self.paths[descriptor] = Path(path)
            if is_inside(path):
                folder, name = self.at(path)
                if flags & os.O_CREAT and name not in folder.entries:
                    folder.change(**{name: File()})
                    self.keep_states()
                self.opened[descriptor] = self.node(path)
            return descriptor

        def write(descriptor: int, data: Any) -> int:
            count = real["write"](descriptor, data)
            if descriptor in self.opened:
                self.opened[descriptor].data += bytes(data[:count])
                self.keep_states()
            return count

        def fsync(descriptor: int) -> None:
            real["fsync"](descriptor)
            node = self.opened.get(descriptor)
            if isinstance(node, File):
                node.synced = node.data
            elif node is not None:
                node.sync()
            self.keep_states()

        def rename(old: Any, new: Any, **options: Any) -> None:
            real["rename"](old, new, **options)
            old = full_path(old, options.get("src_dir_fd"))
            new = full_path(new, options.get("dst_dir_fd"))
            folder, name = self.at(old)
            assert self.at(new)[0] is folder, "a rename between folders is two changes"
            folder.change(**{name: None, Path(new).name: folder.entries[name]})
            self.keep_states()

        def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
            real["mkdir"](path, *arguments, **options)
            path = full_path(path, options.get("dir_fd"))
            folder, name = self.at(path)
            folder.change(**{name: Folder()})
            self.keep_states()

        def remove(kind: str) -> Any:
            def call(path: Any, **options: Any) -> None:
                real[kind](path, **options)
                path = full_path(path, options.get("dir_fd"))
                folder, name = self.at(path)
                folder.change(**{name: None})
                self.keep_states()

            return call

        patch.setattr(os, "open", open_)
        patch.setattr(os, "write", write)
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", rename)
        patch.setattr(os, "mkdir", mkdir)
        patch.setattr(os, "unlink", remove("unlink"))
        patch.setattr(os, "rmdir", remove("rmdir"))
        patch.setattr(shutil, "rmtree", remove_by_path)


def remove_by_path(path: Any, ignore_errors: bool = False) -> None:
    """Like ``shutil.rmtree``, but with calls that take paths."""
    if not os.path.isdir(path):
        return
    for entry in sorted(os.listdir(path)):
        os.unlink(Path(path) / entry)
    os.rmdir(path)


def build(path: Path, tree: Any) -> None:
    path.mkdir(parents=True)
    for name, below in tree:
        if isinstance(below, bytes):
            (path / name).write_bytes(below)
        else:
            build(path / name, below)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.mark.parametrize(
    "old_step", [0, 2], ids=["the first save", "a save that deletes an old checkpoint"]
)
def test_every_state_after_a_power_loss_has_the_old_or_the_new_checkpoint(
    old_step: int, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    new_step = old_step + 1
    manager = checkpoints(root, keep_latest_k=2)
    manager.to_continue()
    for step in range(1, new_step):
        save(manager, step)

    # Record every state that a power loss during the save could leave, and those after the save.
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(root)
        disk.watch(patch)
        save(manager, new_step)
        total = disk.changes
        disk.seen.clear()
        disk.keep_states()
        final = disk.seen
    manager.close()

    assert total > 10
    assert len(disk.states) > 100

    num_new = 0
    for number, (_, tree) in enumerate(disk.states):
        crashed = tmp_path / f"crash-{number}"
        build(crashed, tree)
        checkpoint = checkpoints(crashed, load_only=True).to_continue()
        step = assert_is_of_its_step(checkpoint) if checkpoint else 0
        assert step in (old_step, new_step), "neither the old nor the new checkpoint"
        if tree in final:
            assert step == new_step, "the checkpoint is lost although its save returned"
        num_new += step == new_step
        shutil.rmtree(crashed)
    print(
        f"\n{total} changes of the disk, {len(disk.states)} states, {num_new} with the new checkpoint"
    )

    # Some states have only the old checkpoint and some have the new one: losses before and after the rename.
    assert 0 < num_new < len(disk.states)


def test_save_without_fsync_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test of the model: a save without fsync loses a checkpoint that it reported as saved."""
    manager = checkpoints(tmp_path / "run")
    manager.to_continue()
    disk = Disk(tmp_path / "run")
    disk.watch(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    save(manager, 1)
    last = [tree for change, tree in disk.states if change == disk.changes]
    monkeypatch.undo()
    manager.close()
    build(tmp_path / "crash", last[0])  # the state with the fewest bytes

    with pytest.raises(CheckpointError, match=r"step-1 has no manifest\.json"):
        checkpoints(tmp_path / "crash", load_only=True).to_continue()
