"""Storage of checkpoints: a folder of a filesystem, or an object store.

They commit differently. A folder is written under a temporary name and renamed. An object store
cannot rename. Its objects have unique names, and the manifest is written last, atomically. Objects
without a manifest are not a checkpoint.
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
"""A folder or file in either storage."""

SPARE = 1.2
"""A save starts only if the free space is at least this multiple of its size."""

_OBJECT = re.compile(r"rank-\d{5}(-[0-9a-f]+-\d+\.bin|_.+-[0-9a-f]+-\d+\.done)")
"""Names of the objects of a save: files of tensors, and markers of ``async_save.write_marker``."""


class Storage(Protocol):
    """Storage interface of a save. Only rank 0 calls it, except ``draft``."""

    folder: Place
    lease: Lease

    def draft(self, step: int, nonce: str, number: int) -> Place:
        """Return the place to which all ranks write save ``number`` of the process with lease ``nonce``."""

    def prepare(self, draft: Place, planned_bytes: int) -> None:
        """Check the free space and create an empty draft. Raises StorageError or OSError."""

    def publish(self, draft: Place, stored: Manifest, check: Callable[[], None]) -> Place:
        """Turn a complete draft into the checkpoint of its step, atomically and durably.

        ``check`` is called immediately before, and raises if the lease was lost.
        """

    def abandon(self, draft: Place) -> None:
        """Remove a failed draft. Never raises."""

    def abandon_all(self) -> None:
        """Remove all drafts of this process, before it releases its lease. Never raises."""

    def sweep(self) -> None:
        """Remove the leftovers of interrupted saves."""


def place(path: str | Path) -> Place:
    """Open a path or an address such as ``s3://bucket/run``. Raises ConfigError."""
    if isinstance(path, str) and MARK in path:
        return open_address(path)
    return Path(path)


def folder_of(dump_folder: str, folder: str) -> Place:
    """Return the folder of a run's checkpoints: below job.dump_folder, or an address."""
    if MARK in folder:
        return place(folder)
    return Path(dump_folder) / folder


def storage_of(dump_folder: str, folder: str) -> Storage:
    """Return the storage of a run's checkpoints, without accessing it."""
    place = folder_of(dump_folder, folder)
    if isinstance(place, Path):
        return LocalStorage(place)
    return ObjectStorage(place)


class LocalStorage:
    """A folder that all ranks can access. It relies on fsync and rename for durability."""

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
        # Put all files of the draft and their names on disk before the rename makes it a checkpoint.
        _check_sizes(draft, stored)
        files.write_durable(draft / MANIFEST, _readable(stored, draft))
        files.sync_folder(draft)
        # Check the lease last: another run may have taken over the folder in the meantime.
        check()
        with storage_errors.naming(final):
            # A run that resumed from an older step replaces its later checkpoints.
            retention.make_room(final, stored.origin)
            files.rename(draft, final)
        # The folder of checkpoints may be new. Its name must survive a power loss, too.
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
        retention.sweep(
            self.folder, self.lease.nonce, (self.folder / LEASE).stat().st_mtime, self.lease.dead
        )
        atomic_io.sweep(self.folder)


class ObjectStorage:
    """A bucket and a prefix. An acknowledged write is durable. The lease is best effort, see ObjectLease."""

    def __init__(self, folder: ObjectPath) -> None:
        self.folder: Place = folder
        self.lease: Lease = ObjectLease(folder)

    def draft(self, step: int, nonce: str, number: int) -> Place:
        final = self.folder / f"step-{step}"
        assert isinstance(final, ObjectPath)
        return ObjectPath(final.store, final.address, f"-{nonce}-{number}")

    def prepare(self, draft: Place, planned_bytes: int) -> None:
        """No-op: a store has no size limit, and the names of a draft are unique."""

    def publish(self, draft: Place, stored: Manifest, check: Callable[[], None]) -> Place:
        assert isinstance(draft, ObjectPath)
        final = ObjectPath(draft.store, draft.address)
        _check_sizes(final, stored)
        text = _readable(stored, final)
        target = final / MANIFEST
        # A run that resumed from an older step replaces its later checkpoints, and so their manifests.
        replaces = target.is_file()
        check()
        target.put(text, new=not replaces)
        retention.forget(final)
        # Read the manifest back, because two runs that both believe to hold the lease may write it
        # simultaneously.
        if target.read_bytes() != text:
            raise StorageError(
                f"cannot write checkpoint {target}: its content differs from what this run wrote; start again"
            )
        # Remove the objects of the replaced checkpoint. If the store does not answer, the next start does it.
        if replaces:
            with contextlib.suppress(OSError):
                self._remove_unnamed(final, {file.name for file in stored.files})
        return final

    def abandon(self, draft: Place) -> None:
        """Keep objects that a manifest names: it may have been written although the request failed."""
        assert isinstance(draft, ObjectPath)
        with contextlib.suppress(OSError, CheckpointError):
            final = ObjectPath(draft.store, draft.address)
            named: set[str] = set()
            if (final / MANIFEST).is_file():
                named = {file.name for file in manifest.read(final).files}
            endings = (f"{draft.suffix}.bin", f"{draft.suffix}.done")
            leftovers = []
            for path in final.list_below():
                if path.name not in named and path.name.endswith(endings):
                    leftovers.append(path)
            unlink_all(leftovers)

    def abandon_all(self) -> None:
        """No-op: the next start removes objects that no manifest names."""

    def sweep(self) -> None:
        for final in self.folder.glob("step-*"):
            if not isinstance(final, ObjectPath) or retention.step_of(final) is None:
                continue
            # Keep the objects of a damaged manifest, because a user may be able to repair it.
            with contextlib.suppress(CheckpointError):
                named: set[str] = set()
                if (final / MANIFEST).is_file():
                    named = {file.name for file in manifest.read(final).files}
                self._remove_unnamed(final, named)

    def _remove_unnamed(self, final: ObjectPath, named: set[str]) -> None:
        unnamed = []
        for path in final.list_below():
            if path.name not in named and _OBJECT.fullmatch(path.name):
                unnamed.append(path)
        unlink_all(unnamed)
        for path in unnamed:
            logger.info(f"removed {path}, which belongs to no checkpoint")


def _check_sizes(folder: Place, stored: Manifest) -> None:
    """Wait until rank 0's node sees all bytes that the ranks have written.

    Raises:
        StorageError: a file is missing or short after ``files.SEEN_SECONDS``. It names the file and
            this node.
    """
    sizes = {file.name: file.bytes for file in stored.files}
    wrong, waited = files.wait_for_sizes(folder, sizes)
    host = os.uname().nodename
    for name, size in wrong.items():
        raise StorageError(
            f"cannot write checkpoint {folder / name}: {host}, the node of rank 0, "
            f"sees {max(0, size)} of its {sizes[name]} bytes after {waited:.1f} s; {files.REMOUNT}, "
            "then start again"
        )
    if waited > files.LATE_SECONDS:
        logger.warning(
            f"{folder}: {host}, the node of rank 0, saw files of other nodes {waited:.1f} s late, "
            f"which delays each save; {files.REMOUNT}"
        )


def _readable(stored: Manifest, folder: Place) -> bytes:
    text = stored.to_bytes()
    manifest.parse(text, folder)  # raise now if a start could not read it
    return text
