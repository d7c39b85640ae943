"""Bytes that are on disk when a function returns: hashed while written, flushed, and renamed as one.

All bytes of a checkpoint go through ``os.open``, ``os.write``, ``os.fsync`` and ``os.rename`` here; an OSError of any
of them is raised as it is, with the path in it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardtrain import moving, whole_file
from shardtrain.checkpoint.manifest import StoredFile

PIECE_BYTES = 2**23
"""Written and hashed at a time: while one thread writes a piece another hashes it."""

SEEN_SECONDS = 60.0
"""How long a network filesystem may take until one node sees what another has made."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path into an OSError that does not name one: those of write and fsync do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_hashed(path: Path, blocks: Iterable[memoryview], wait_seconds: float = 0.0) -> StoredFile:
    """Write a new file from blocks of bytes; when this returns it is on disk. Gives its name, size and SHA-256.

    ``wait_seconds`` is how long its folder, which another node may have made, may take to be seen from here.
    """
    digest, size = hashlib.sha256(), 0
    with naming(path), ThreadPoolExecutor(1, "checkpoint-hash") as pool:
        descriptor = _create(path, wait_seconds)
        try:
            for block in blocks:
                for start in range(0, len(block), PIECE_BYTES):
                    piece = block[start : start + PIECE_BYTES]
                    hashed = pool.submit(digest.update, piece)
                    try:
                        _write_all(descriptor, piece)
                    finally:
                        hashed.result()
                    size += len(piece)
                    moving.tick()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return StoredFile(path.name, size, digest.hexdigest())


def write_whole(path: Path, data: bytes) -> None:
    """Write a new small file; when this returns it is on disk."""
    with naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _create(path: Path, wait_seconds: float) -> int:
    """Open a new file in a folder that another node may have made a moment ago."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        written = os.write(descriptor, data)
        data = data[written:]


def sync_folder(path: Path) -> None:
    """Put the names in a folder on disk: a file or rename is durable only after this."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Rename, durably: the names are on disk when this returns."""
    os.rename(old, new)
    sync_folder(new.parent)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write below a folder."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def open_stored(path: Path) -> int:
    """A descriptor of a regular file for reading; a pipe or device raises OSError instead of waiting for ever."""
    return whole_file.without_waiting(str(path), os.O_RDONLY)


def find_damage(folder: Path, file: StoredFile) -> str:
    """What is wrong with the bytes of a file, read whole; empty when they are those that were written."""
    path = folder / file.name
    digest, size = hashlib.sha256(), 0
    try:
        descriptor = open_stored(path)
        try:
            found = os.fstat(descriptor).st_size
            if found != file.bytes:
                return f"{file.name} has {found} bytes instead of {file.bytes}"
            while piece := os.read(descriptor, PIECE_BYTES):
                digest.update(piece)
                size += len(piece)
                moving.tick()
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror or error}"
    if size != file.bytes or digest.hexdigest() != file.sha256:
        return f"{file.name} is damaged: its bytes are not those that were written"
    return ""
