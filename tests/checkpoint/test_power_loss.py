"""A power loss at any moment of a save: the reader finds the old checkpoint or the new one, in every legal state.

What POSIX promises after a crash is little: bytes of a file are there once it was synced, names in a folder once the
folder was. All else may be there or not, in any combination. Every change of the disk that a save makes is recorded,
and after each of them every such state is built and read.
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
        """What is synced, and of what came after any of five parts, the others cut off or zeros as blocks never
        written are."""
        new = self.data[len(self.synced) :]
        size = max(1, -(-len(new) // 5))
        parts = [new[start : start + size] for start in range(0, len(new), size)]
        tails = [new[: size * count] for count in range(len(parts) + 1)]
        for kept in itertools.product((False, True), repeat=len(parts)):
            tails.append(b"".join(part if keep else bytes(len(part)) for part, keep in zip(parts, kept, strict=True)))
        return [self.synced + tail for tail in dict.fromkeys(tails)]


@dataclass
class Folder:
    entries: dict[str, Any] = field(default_factory=dict)
    durable: dict[str, Any] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)
    """Changes of names since the last sync, each of which is there whole or not; None removes a name."""

    def change(self, **names: Any) -> None:
        self.pending.append(names)
        apply(self.entries, names)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.entries), []

    def after_crash(self) -> Iterator[dict[str, Any]]:
        for kept in itertools.product((False, True), repeat=len(self.pending)):
            found = dict(self.durable)
            for change in itertools.compress(self.pending, kept):
                apply(found, change)
            yield found


def apply(entries: dict[str, Any], change: dict[str, Any]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """What a folder may look like after a crash, from the calls of ``os`` that changed it."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, self.read(root)
        self.opened: dict[int, Any] = {}
        self.paths: dict[int, Path] = {}
        self.seen: set[Any] = set()
        self.states: list[tuple[int, Any]] = []
        self.changes = 0

    def read(self, path: Path) -> Any:
        """What lies there is durable already."""
        if path.is_file():
            return File(path.read_bytes(), path.read_bytes())
        found = Folder({entry.name: self.read(entry) for entry in path.iterdir()})
        found.sync()
        return found

    def at(self, path: Any) -> tuple[Any, str]:
        """The folder of a path, and its name there."""
        node = self.top
        *parents, name = Path(path).relative_to(self.root).parts or ("",)
        for part in parents:
            node = node.entries[part]
        return node, name

    def node(self, path: Any) -> Any:
        folder, name = self.at(path)
        return folder.entries.get(name) if name else self.top

    def keep_states(self) -> None:
        """Every state that a crash at this moment may leave, each once."""
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
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")}

        def inside(path: Any) -> bool:
            return isinstance(path, str | Path) and Path(path).is_relative_to(self.root)

        def whole(path: Any, folder: int | None) -> Any:
            """A name in an open folder, as a path."""
            return path if folder is None else self.paths.get(folder, Path()) / path

        def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            descriptor = real["open"](path, flags, *rest, **options)
            path = whole(path, options.get("dir_fd"))
            self.opened.pop(descriptor, None)
            self.paths[descriptor] = Path(path)
            if inside(path):
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
            old, new = whole(old, options.get("src_dir_fd")), whole(new, options.get("dst_dir_fd"))
            folder, name = self.at(old)
            assert self.at(new)[0] is folder, "a rename between folders is two changes"
            folder.change(**{name: None, Path(new).name: folder.entries[name]})
            self.keep_states()

        def mkdir(path: Any, *rest: Any, **options: Any) -> None:
            real["mkdir"](path, *rest, **options)
            path = whole(path, options.get("dir_fd"))
            folder, name = self.at(path)
            folder.change(**{name: Folder()})
            self.keep_states()

        def remove(kind: str) -> Any:
            def call(path: Any, **options: Any) -> None:
                real[kind](path, **options)
                path = whole(path, options.get("dir_fd"))
                folder, name = self.at(path)
                folder.change(**{name: None})
                self.keep_states()

            return call

        patched = {"open": open_, "write": write, "fsync": fsync, "rename": rename, "mkdir": mkdir}
        for name, function in {**patched, "unlink": remove("unlink"), "rmdir": remove("rmdir")}.items():
            patch.setattr(os, name, function)
        patch.setattr(shutil, "rmtree", remove_by_path)


def remove_by_path(path: Any, ignore_errors: bool = False) -> None:
    """As ``shutil.rmtree``, with calls that take paths."""
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


@pytest.mark.parametrize("before", [0, 2], ids=["the first save", "a save that deletes an old one"])
def test_every_state_after_a_power_loss_is_the_old_or_the_new_checkpoint(before: int, tmp_path: Path) -> None:
    root, new = tmp_path / "run", before + 1
    kept = checkpoints(root, keep_latest_k=2)
    kept.to_continue()
    for step in range(1, new):
        save(kept, step)
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(root)
        disk.watch(patch)
        save(kept, new)
        total = disk.changes
        disk.seen.clear()
        disk.keep_states()
        final = disk.seen
    kept.close()
    assert total > 10 and len(disk.states) > 100
    found_new = 0
    for number, (_, tree) in enumerate(disk.states):
        crashed = tmp_path / f"crash-{number}"
        build(crashed, tree)
        found = checkpoints(crashed, load_only=True).to_continue()
        step = assert_is_of_its_step(found) if found else 0
        assert step in (before, new), "neither the old nor the new one"
        assert step == new or tree not in final, "what was said to be saved is there"
        found_new += step == new
        shutil.rmtree(crashed)
    print(f"\n{total} changes of the disk, {len(disk.states)} states, {found_new} with the new checkpoint")
    assert 0 < found_new < len(disk.states)


def test_a_save_that_does_not_sync_its_files_would_be_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the disk is worth something: the same save with fsync left out loses what it said to be saved."""
    kept = checkpoints(tmp_path / "run")
    kept.to_continue()
    disk = Disk(tmp_path / "run")
    disk.watch(monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    save(kept, 1)
    last = [tree for change, tree in disk.states if change == disk.changes]
    monkeypatch.undo()
    kept.close()
    build(tmp_path / "crash", last[0])  # with as little as the disk may keep
    with pytest.raises(CheckpointError, match=r"step-1 has no manifest\.json"):
        checkpoints(tmp_path / "crash", load_only=True).to_continue()
