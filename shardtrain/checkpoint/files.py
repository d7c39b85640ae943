"""Durable file operations of checkpoints: when a function returns, its result is on disk.

All bytes of a checkpoint in a folder are written by ``atomic_io``, ``os.write``, ``os.fsync`` and
``os.rename`` here. Their OSErrors are raised unchanged, with the path. ``objects.py`` writes to
object stores.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from shardtrain.checkpoint import objects
from shardtrain.checkpoint.manifest import TensorFile
from shardtrain.checkpoint.objects import ObjectPath
from shardtrain.utils import activity, atomic_io, storage_errors
from shardtrain.utils.errors import StorageError

PIECE_BYTES = objects.PIECE_BYTES

SEEN_SECONDS = 60.0
"""Longest time until a node of a network filesystem sees the files of another node."""
LATE_SECONDS = 1.0
"""Longer waits for files of other nodes are reported."""
REMOUNT = "mount the folder with a shorter attribute cache (NFS: actimeo=1)"
"""Usual fix if a node sees files of other nodes late."""
NOT_SEEN_YET = (errno.ENOENT, errno.ESTALE)
"""Error numbers that are normal for a file that another node has just created."""
_FEW = 32
_AT_A_TIME = 16
MOST_VIEWS = 512
"""Largest number of buffers of a read. Linux allows 1,024."""


def sizes_of(folder: Path | ObjectPath, names: Sequence[str]) -> list[int]:
    """Return the sizes of files of a folder in bytes, or -1 for a file that does not exist. Raises OSError.

    Requests run in threads: over a network each takes about a millisecond, and a large run has
    thousands of files.
    """
    # A store lists all objects with one request.
    if isinstance(folder, ObjectPath):
        sizes = folder.sizes_below()
        return [sizes.get(name, -1) for name in names]

    def few(start: int) -> list[int]:
        sizes = []
        for name in names[start : start + _FEW]:
            try:
                sizes.append(os.stat(os.path.join(folder, name)).st_size)
            except OSError as error:
                if error.errno not in NOT_SEEN_YET:
                    raise
                sizes.append(-1)
        return sizes

    # Starting threads takes longer than a few requests.
    if len(names) <= _FEW:
        return few(0)
    all_sizes: list[int] = []
    with ThreadPoolExecutor(_AT_A_TIME, "checkpoint-stat") as pool:
        for part in pool.map(few, range(0, len(names), _FEW)):
            all_sizes += part
    return all_sizes


def wait_for_sizes(
    folder: Path | ObjectPath, sizes: Mapping[str, int]
) -> tuple[dict[str, int], float]:
    """Wait up to ``SEEN_SECONDS`` until this node sees files of other nodes at their full ``sizes``.

    Return the current sizes of the files that are still wrong (-1 for a missing file), and the
    seconds waited.
    """
    begun = time.monotonic()
    while True:
        # List the folder first. Without this some network filesystems answer a stat from an old cache.
        if isinstance(folder, Path):
            with contextlib.suppress(OSError):
                os.listdir(folder)
        current_sizes = sizes_of(folder, list(sizes))
        wrong = {}
        for name, size in zip(sizes, current_sizes, strict=True):
            if size != sizes[name]:
                wrong[name] = size
        waited = time.monotonic() - begun
        if not wrong or waited > SEEN_SECONDS:
            return wrong, waited
        activity.tick()
        time.sleep(0.1)


def write_hashed(
    path: Path | ObjectPath,
    blocks: Iterable[memoryview],
    wait_seconds: float = 0.0,
) -> TensorFile:
    """Write a new file from blocks of bytes, durably. Return its name, size and SHA-256.

    Args:
        wait_seconds: Time to wait for its folder, which another node may have created.
    """
    if isinstance(path, ObjectPath):
        return TensorFile(path.name, *path.write_hashed(blocks))
    # SHA-256 and write release the GIL, so another thread hashes a piece while this one writes the
    # next. Only one thread can hash, because the order of the pieces matters.
    digest = hashlib.sha256()
    size = 0
    with storage_errors.naming(path), ThreadPoolExecutor(1, "checkpoint-hash") as pool:
        descriptor = _create(path, wait_seconds)
        try:
            for block in blocks:
                hashing: list[Future[None]] = []
                try:
                    for start in range(0, len(block), PIECE_BYTES):
                        piece = block[start : start + PIECE_BYTES]
                        hashing.append(pool.submit(digest.update, piece))
                        _write_all(descriptor, piece)
                        activity.tick()
                finally:
                    # The caller may reuse the memory of the block after this.
                    for future in hashing:
                        future.result()
                size += len(block)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return TensorFile(path.name, size, digest.hexdigest())


def write_unhashed(path: Path, blocks: Iterable[memoryview]) -> None:
    """Write a new file that the caller reads back and compares. It is durable after ``sync``. Raises OSError."""
    with storage_errors.naming(path):
        descriptor = _create(path, 0.0)
        try:
            for block in blocks:
                _write_all(descriptor, block)
                activity.tick()
        finally:
            os.close(descriptor)


def sync(path: Path) -> None:
    """Make the content of a file durable. Raises OSError."""
    with storage_errors.naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_durable(path: Path, data: bytes) -> None:
    """Write a new small file durably. Raises OSError."""
    with storage_errors.naming(path):
        descriptor = _create(path, 0.0)
        try:
            _write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _create(path: Path, wait_seconds: float) -> int:
    """Create a file in a folder that another node may have just created."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            # O_EXCL: never write into a file that exists, or through a link.
            return atomic_io.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            if error.errno not in NOT_SEEN_YET or time.monotonic() > deadline:
                raise
        activity.tick()
        time.sleep(0.2)


def _write_all(descriptor: int, data: memoryview) -> None:
    # ``os.write`` may write only a part, for example at most 2 GiB on Linux.
    while data:
        written = os.write(descriptor, data)
        data = data[written:]


def replace_durable(path: Path | ObjectPath, data: bytes) -> None:
    """Replace a small file, atomically and durably. Raises OSError."""
    if isinstance(path, ObjectPath):
        path.put(data, new=False)
    else:
        atomic_io.write(path, data, durable=True)


def read_small(path: Path | ObjectPath, limit_bytes: int = 4096) -> bytes:
    """Return the first ``limit_bytes`` bytes of a file. Raises OSError."""
    data = memoryview(bytearray(limit_bytes))
    with contextlib.closing(open_stored(path)) as reader:
        return bytes(data[: reader.read_into(data, 0)])


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable. A new file or a rename is durable only after this. Raises OSError."""
    with storage_errors.naming(path), atomic_io.folder(path) as descriptor:
        os.fsync(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename within a folder, durably. Raises OSError."""
    # All three calls use the same opened folder, also if its path is replaced in between.
    with storage_errors.naming(old), atomic_io.folder(new.parent) as parent:
        os.rename(old.name, new.name, src_dir_fd=parent, dst_dir_fd=parent)
        os.fsync(parent)


@contextlib.contextmanager
def new_folder(path: Path, keep: bool = True) -> Iterator[Path]:
    """Yield a temporary folder next to ``path``, and rename it durably to ``path`` at the end.

    The folder at ``path`` is therefore complete or absent. Without ``keep`` it is deleted instead.

    Raises:
        StorageError: the folder cannot be written. It is deleted.
    """
    # A folder cannot be renamed onto a link. Refuse it now, because the rename comes only after all is written.
    if path.is_symlink():
        rule = f"it is a link to {os.readlink(path)}"
        raise StorageError(f"cannot write {path}: {rule}; remove it, or choose another folder")
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(6)}")
    try:
        with storage_errors.writing(temporary):
            temporary.mkdir(parents=True)
            yield temporary
            if keep:
                sync_folder(temporary)
                rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_draft(path: Path) -> None:
    """Create the folder of a draft. Raises OSError, also if the folder exists."""
    with storage_errors.naming(path), atomic_io.folder(path.parent) as parent:
        os.mkdir(path.name, dir_fd=parent)


def free_bytes(path: Path) -> int:
    """Return the number of bytes that this user can still write below a folder."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class StoredFileReader(Protocol):
    """Reader of a file in either storage, with random access. ``size`` is in bytes."""

    size: int

    def read_into(self, view: memoryview, position: int) -> int:
        """Fill a view with the bytes from ``position`` on. Return the number of bytes read. Raises
        OSError.
        """

    def read_into_all(self, views: Sequence[memoryview], position: int) -> int:
        """Fill up to ``MOST_VIEWS`` views with consecutive bytes of the file, in one request."""

    def close(self) -> None:
        """Close the file."""


class FileReader:
    """Reader of a regular file. Raises OSError for a pipe or device instead of blocking."""

    def __init__(self, path: Path) -> None:
        self._descriptor = atomic_io.without_waiting(str(path), os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, view: memoryview, position: int) -> int:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], position + done)
            if not count:
                break
            done += count
        return done

    def read_into_all(self, views: Sequence[memoryview], position: int) -> int:
        # The system returns less than 2 GiB at a time, and fewer bytes than requested at the end of a file.
        wanted = sum(map(len, views))
        if os.preadv(self._descriptor, views, position) == wanted:
            return wanted
        return _one_by_one(self, views, position)

    def close(self) -> None:
        os.close(self._descriptor)


class ObjectReader:
    """Reader of an object of a store. A request reads at most ``PIECE_BYTES``."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self.size = path.stat().st_size

    def read_into(self, view: memoryview, position: int) -> int:
        done = 0
        wanted = min(len(view), max(0, self.size - position))
        while done < wanted:
            begin = position + done
            end = position + min(wanted, done + PIECE_BYTES)
            data = self._path.read_range(begin, end)
            if not data:
                break
            view[done : done + len(data)] = data
            done += len(data)
        return done

    def read_into_all(self, views: Sequence[memoryview], position: int) -> int:
        wanted = sum(map(len, views))
        if len(views) == 1 or wanted > PIECE_BYTES:
            return _one_by_one(self, views, position)
        # One request for all views, because the latency of a request is longer than the copy.
        data = memoryview(self._path.read_range(position, position + wanted))
        done = 0
        for view in views:
            part = data[done : done + len(view)]
            view[: len(part)] = part
            done += len(part)
        return done

    def close(self) -> None:
        """No-op: each read is a separate request, so there is nothing to close."""


def _one_by_one(reader: StoredFileReader, views: Sequence[memoryview], position: int) -> int:
    """Fill each view with a separate read. Return the number of bytes read."""
    done = 0
    for view in views:
        count = reader.read_into(view, position + done)
        done += count
        if count < len(view):
            break
    return done


def open_stored(path: Path | ObjectPath) -> StoredFileReader:
    """Open a stored file for reading. Raises OSError."""
    if isinstance(path, Path):
        return FileReader(path)
    return ObjectReader(path)


def find_damage(folder: Path | ObjectPath, file: TensorFile) -> str:
    """Read a file completely and compare its hash. Return a description of the damage, or ""."""
    digest = hashlib.sha256()
    size = 0
    piece = memoryview(bytearray(min(PIECE_BYTES, max(1, file.bytes))))
    try:
        with contextlib.closing(open_stored(folder / file.name)) as reader:
            # A wrong size is found without reading the file.
            if reader.size != file.bytes:
                return f"{file.name} has {reader.size} bytes instead of {file.bytes}"
            while count := reader.read_into(piece, size):
                digest.update(piece[:count])
                size += count
                activity.tick()
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror or error}"
    if size != file.bytes or digest.hexdigest() != file.sha256:
        return f"{file.name} is damaged: its bytes have changed since it was written"
    return ""
