"""Shared memory for the processes of one machine: a file in /dev/shm that each process maps."""

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
    """Create a file that only this user can open, reserve its memory, and map it.

    Return None if the system is not Linux, or there is not enough memory.
    """
    if not sys.platform.startswith("linux"):
        return None
    _remove_leftovers()
    try:
        file = os.open(path(token), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        # Reserve all memory now, where a failure can be handled. Otherwise a later write could exceed the
        # limit of the container, and the kernel would kill the rank.
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    except OSError:
        with suppress(OSError):
            path(token).unlink()
        return None
    finally:
        os.close(file)


def _remove_leftovers() -> None:
    """Remove this user's old files, which killed ranks could not remove.

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
