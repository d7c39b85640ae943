"""Memory shared by the processes of one machine: a file in /dev/shm that each process maps."""

from __future__ import annotations

import mmap
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

from shardtrain.utils.atomic_io import LEFTOVER_SECONDS

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"shardtrain-[0-9a-f]{32}")


def path(token: bytes) -> Path:
    """Return the path of the file. The random token makes it hard to guess."""
    return FOLDER / f"shardtrain-{token.hex()}"


def create(token: bytes, size: int) -> mmap.mmap | None:
    """Create and map a file that only this user can open, with its memory reserved.

    Return None if the system is not Linux, or the memory is not available.
    """
    if not sys.platform.startswith("linux"):
        return None
    _remove_leftovers()
    try:
        file = os.open(path(token), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        # Reserve the memory. Otherwise the kernel would kill a rank that exceeds the limit of its container.
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    except OSError:
        with suppress(OSError):
            path(token).unlink()
        return None
    finally:
        os.close(file)


def _remove_leftovers() -> None:
    """Remove files of this user that killed ranks have left.

    Each would occupy memory until the machine restarts.
    """
    with suppress(OSError):
        for entry in os.scandir(FOLDER):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                is_ours = _NAME.fullmatch(entry.name) is not None and status.st_uid == os.geteuid()
                is_old = time.time() - status.st_mtime > LEFTOVER_SECONDS
                if is_ours and is_old:
                    os.unlink(entry.path)


def open_(token: bytes, size: int) -> mmap.mmap | None:
    """Map the file that rank 0 of the group has created.

    Return None if it does not exist (the rank is on another machine), or belongs to another user.
    """
    try:
        file = os.open(path(token), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        # another user may have planted a file of that name
        if status.st_uid != os.geteuid() or status.st_size != size:
            return None
        return mmap.mmap(file, size)
    except OSError:
        return None
    finally:
        os.close(file)
