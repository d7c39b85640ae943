"""Temporary folders on disk or in host memory. The next start removes those of killed processes.

A process holds a lock on each of its folders. Its forks share the lock, and the kernel releases it when
the last of them has ended. A lock is more reliable than a process ID, which may be reused or belong to
another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardtrain.utils.process_identity import boot_id

PREFIX = "shardtrain-"
SHARED_MEMORY = Path("/dev/shm")
"""Filesystem in host memory, which all processes of a Linux machine share."""
MARK = ".removed-by-next-start"
"""File in each folder that may be removed once nobody holds its lock.

It has the boot ID of the locking machine.
"""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_held: dict[Path, tuple[int, int]] = {}
"""Folder -> descriptor that holds the lock, and ID of the process that created the folder."""


def make(purpose: str = "", in_memory: bool = False) -> Path:
    """Create a folder for this user only, in ``SHARED_MEMORY`` if ``in_memory`` is set.

    Remove folders of killed processes. See ``remove`` and ``keep``. Raises OSError.
    """
    for parent in (tempfile.gettempdir(), SHARED_MEMORY):
        with contextlib.suppress(OSError):
            for entry in os.scandir(parent):
                if entry.name.startswith(PREFIX):
                    _remove_if_left(entry.path)
    prefix = f"{PREFIX}{purpose}-" if purpose else PREFIX
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=SHARED_MEMORY if in_memory else None))
    descriptor = os.open(folder, _FOLDER)
    # Lock the folder before marking it: a marked folder without a lock belongs to a process that has ended.
    # without locks the folder stays unmarked, and is never removed by others
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / MARK).write_text(boot_id(), encoding="ascii")
    _held[folder] = descriptor, os.getpid()
    return folder


def remove(folder: Path) -> None:
    """Remove a folder of ``make``. No-op in a fork of the process that created it."""
    descriptor, owner = _held[folder]
    if owner == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
        del _held[folder]


def remove_all() -> None:
    """Remove all folders of this process, before an exit that runs no ``finally`` block."""
    for folder in list(_held):
        remove(folder)


def keep(folder: Path) -> None:
    """Keep a folder of ``make`` for the user: the next start does not remove it."""
    (folder / MARK).unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_folder(purpose: str = "") -> Iterator[Path]:
    """Yield a folder of ``make`` that is removed at the end of the block."""
    folder = make(purpose)
    try:
        yield folder
    finally:
        remove(folder)


def _remove_if_left(path: str) -> None:
    """Remove a folder if this user marked it during the current boot of this machine and nobody holds its lock."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, _FOLDER)
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
                return
            mark = os.open(MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
            with open(mark, encoding="ascii", errors="replace") as file:
                if file.read(100) != boot_id():
                    return
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Delete by descriptor: other users may have replaced the path in a shared directory. Delete
            # the mark last.
            for name in sorted(os.listdir(descriptor), key=MARK.__eq__):
                try:
                    os.unlink(name, dir_fd=descriptor)
                except OSError:
                    shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
            os.rmdir(path)
        finally:
            os.close(descriptor)
