"""Where checkpoints lie: a folder of a filesystem, or an object store.

The two commit in different ways. A folder is written under another name and renamed. An object store cannot rename, so
objects are written under names of their own, and the manifest, put last and at once, is what makes them a checkpoint:
without one there is none.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

from shardtrain.checkpoint import files, manifest, retention
from shardtrain.checkpoint.lease import LEASE, Lease
from shardtrain.checkpoint.manifest import MANIFEST, Manifest
from shardtrain.checkpoint.object_lease import ObjectLease
from shardtrain.checkpoint.objects import MARK, ObjectPath, open_address, unlink_all
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.errors import CheckpointError, StorageError, fix_first
from shardtrain.utils.log import logger

Place: TypeAlias = Path | ObjectPath
"""A folder or file of checkpoints, wherever it is."""

SPARE = 1.2
"""A save begins only where this many times its size is free."""

_OBJECT = re.compile(r"rank-\d{5}-[0-9a-f]+-\d+\.(bin|done)")


class Storage(Protocol):
    """What a save needs. All methods are the first rank's alone, but ``draft``."""

    folder: Place
    lease: Lease

    def draft(self, step: int, nonce: str, number: int) -> Place:
        """Where all ranks write the files of a save: the ``number``-th of the holder of the lease ``nonce``."""

    def prepare(self, draft: Place, planned_bytes: int) -> None:
        """Make sure that there is room, and that the draft is empty. Raises StorageError, OSError."""

    def publish(self, draft: Place, stored: Manifest, check: Callable[[], None]) -> Place:
        """Make a draft that every rank has written the checkpoint of its step, at once and durably.

        ``check`` is called last before that, and raises when the lease was lost.
        """

    def abandon(self, draft: Place) -> None:
        """Remove a draft that failed; raises nothing."""

    def abandon_all(self) -> None:
        """Remove the drafts of this holder of the lease, which is about to give it back; raises nothing."""

    def sweep(self) -> None:
        """Remove what saves cut short have left."""


def place(path: str | Path) -> Place:
    """A path as the user writes it, or an address such as ``s3://bucket/run``; raises ConfigError."""
    return open_address(path) if isinstance(path, str) and MARK in path else Path(path)


def folder_of(dump_folder: str, folder: str) -> Place:
    """The folder of a run's checkpoints: below job.dump_folder, unless it is an address."""
    return place(folder) if MARK in folder else Path(dump_folder) / folder


def storage_of(dump_folder: str, folder: str) -> Storage:
    """The storage of a run's checkpoints; touches nothing yet."""
    place = folder_of(dump_folder, folder)
    return LocalStorage(place) if isinstance(place, Path) else ObjectStorage(place)


class LocalStorage:
    """A folder that all ranks see; durability is that of fsync and rename."""

    def __init__(self, folder: Path) -> None:
        self.folder: Place = folder
        self.lease = Lease(folder)

    def draft(self, step: int, nonce: str, number: int) -> Place:
        return self.folder / f"step-{step}.tmp-{nonce}"

    def prepare(self, draft: Place, planned_bytes: int) -> None:
        assert isinstance(draft, Path)
        with storage_errors.naming(draft):
            free = files.free_bytes(draft.parent)
        needed = int(SPARE * planned_bytes)
        if free < needed:
            raise StorageError(
                fix_first(
                    f"cannot write checkpoint {draft}",
                    "free space, or keep fewer checkpoints with checkpoint.keep_latest_k",
                    f"{free} bytes are free and {needed} are needed",
                    "nothing was changed",
                )
            )
        retention.remove(draft)
        files.make_draft(draft)

    def publish(self, draft: Place, stored: Manifest, check: Callable[[], None]) -> Place:
        assert isinstance(draft, Path)
        final = draft.with_name(f"step-{stored.step}")
        # Everything in the draft is on disk, its names too, before the rename makes it a checkpoint.
        _check_sizes(draft, stored)
        files.write_whole(draft / MANIFEST, _readable(stored, draft))
        files.sync_folder(draft)
        # The lease last: another run may have taken the folder over while this one wrote.
        check()
        with storage_errors.naming(final):
            # A run that went back to an older step writes its own history.
            retention.make_room(final, stored.origin)
            files.rename(draft, final)
        # The folder of checkpoints may be new itself.
        with contextlib.suppress(OSError):
            files.sync_folder(final.parents[1])
        return final

    def abandon(self, draft: Place) -> None:
        assert isinstance(draft, Path)
        retention.remove(draft)

    def abandon_all(self) -> None:
        assert isinstance(self.folder, Path)
        with contextlib.suppress(OSError):
            for path in list(self.folder.glob(f"step-*.tmp-{self.lease.nonce}")):
                retention.remove(path)

    def sweep(self) -> None:
        assert isinstance(self.folder, Path)
        retention.sweep(self.folder, self.lease.nonce, (self.folder / LEASE).stat().st_mtime, self.lease.dead)
        atomic_io.sweep(self.folder)


class ObjectStorage:
    """A bucket and a prefix. The store keeps what it has acknowledged; the lease is best effort, see ObjectLease."""

    def __init__(self, folder: ObjectPath) -> None:
        self.folder: Place = folder
        self.lease: Lease = ObjectLease(folder)

    def draft(self, step: int, nonce: str, number: int) -> Place:
        final = self.folder / f"step-{step}"
        assert isinstance(final, ObjectPath)
        return ObjectPath(final.store, final.address, f"-{nonce}-{number}")

    def prepare(self, draft: Place, planned_bytes: int) -> None:
        """A store has room, and a draft's names have never been used."""

    def publish(self, draft: Place, stored: Manifest, check: Callable[[], None]) -> Place:
        assert isinstance(draft, ObjectPath)
        final = ObjectPath(draft.store, draft.address)
        _check_sizes(final, stored)
        text = _readable(stored, final)
        target = final / MANIFEST
        # A run that went back to an older step writes its own history: the new manifest takes the old one's place.
        replaces = target.is_file()
        check()
        target.put(text, new=not replaces)
        retention.forget(final)
        # Read back, since two runs that both believe to hold the lease may put theirs at one moment.
        if target.read_bytes() != text:
            raise StorageError(f"cannot write checkpoint {target}: what is there is not what was written; start again")
        # Objects of the old one go now or, if the store does not answer, at the next start.
        if replaces:
            with contextlib.suppress(OSError):
                self._remove_unnamed(final, {file.name for file in stored.files})
        return final

    def abandon(self, draft: Place) -> None:
        """What a manifest names stays: its put may have arrived although the answer was an error."""
        assert isinstance(draft, ObjectPath)
        with contextlib.suppress(OSError, CheckpointError):
            final = ObjectPath(draft.store, draft.address)
            named = {file.name for file in manifest.read(final).files} if (final / MANIFEST).is_file() else set()
            own = (f"{draft.suffix}.bin", f"{draft.suffix}.done")
            unlink_all([path for path in final.list_below() if path.name not in named and path.name.endswith(own)])

    def abandon_all(self) -> None:
        """The next start sweeps what no manifest names."""

    def sweep(self) -> None:
        for final in self.folder.glob("step-*"):
            if not isinstance(final, ObjectPath) or retention.step_of(final) is None:
                continue
            with contextlib.suppress(CheckpointError):  # a damaged manifest may be fixed: nothing of it is touched
                named: set[str] = set()
                if (final / MANIFEST).is_file():
                    named = {file.name for file in manifest.read(final).files}
                self._remove_unnamed(final, named)

    def _remove_unnamed(self, final: ObjectPath, named: set[str]) -> None:
        unnamed = [path for path in final.list_below() if path.name not in named and _OBJECT.fullmatch(path.name)]
        unlink_all(unnamed)
        for path in unnamed:
            logger.info(f"removed {path}, which no checkpoint names")


def _check_sizes(folder: Place, stored: Manifest) -> None:
    """Wait until rank 0's node sees all bytes that the ranks have written.

    Raises:
        StorageError: a file is missing or short after ``files.SEEN_SECONDS``. It names the file and this node.
    """
    sizes = {file.name: file.bytes for file in stored.files}
    wrong, waited = files.wait_for_sizes(folder, sizes)
    host = os.uname().nodename
    for name, size in wrong.items():
        raise StorageError(
            f"cannot write checkpoint {folder / name}: {host}, the node of rank 0, sees {max(0, size)} of its "
            f"{sizes[name]} bytes after {waited:.1f} s; {files.REMOUNT}, then start again"
        )
    if waited > files.LATE_SECONDS:
        logger.warning(
            f"{folder}: {host}, the node of rank 0, saw files of other nodes {waited:.1f} s late, and each save waits "
            f"for them; {files.REMOUNT}"
        )


def _readable(stored: Manifest, folder: Place) -> bytes:
    text = stored.to_bytes()
    manifest.parse(text, folder)  # what could not be read is not called saved
    return text
