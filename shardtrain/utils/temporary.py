"""Temporary folders of this program, in the system's folder for them. The next start removes those of killed processes.

A process holds a lock on each of its folders. Its forks share the lock, and the kernel releases it when the last of
them has ended: neither a number of a process that is used again nor a container makes a living folder look left.
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

from shardtrain.utils.process import boot_id

PREFIX = "shardtrain-"
MARK = ".removed-by-next-start"
"""File of a folder that is removed once nobody holds it. It says on which boot of which machine the lock is known."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_held: dict[Path, tuple[int, int]] = {}
"""Descriptor with the lock, and the process that made the folder."""


def make(purpose: str = "") -> Path:
    """Make a folder for this user only, and remove what killed processes have left. See ``remove`` and ``keep``."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if entry.name.startswith(PREFIX):
                _remove_if_left(entry.path)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-" if purpose else PREFIX))
    descriptor = os.open(folder, _FOLDER)
    # Locked before it is marked: a marked folder without a lock has lost its process.
    with contextlib.suppress(OSError):  # a filesystem without locks: the folder is never called left
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / MARK).write_text(boot_id(), encoding="ascii")
    _held[folder] = descriptor, os.getpid()
    return folder


def remove(folder: Path) -> None:
    """Remove a folder of ``make``; does nothing in a fork of the process that has made it."""
    descriptor, owner = _held[folder]
    if owner == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
        del _held[folder]


def keep(folder: Path) -> None:
    """Leave a folder of ``make`` to the user."""
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
    """Remove a folder that this user's program has marked on this boot of this machine, and that nobody holds."""
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
            # By the handle: a name in the folder of all users may lead elsewhere by now. The mark goes last.
            for name in sorted(os.listdir(descriptor), key=MARK.__eq__):
                try:
                    os.unlink(name, dir_fd=descriptor)
                except OSError:
                    shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
            os.rmdir(path)
        finally:
            os.close(descriptor)
