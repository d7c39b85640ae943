"""Memory that processes of one machine share: a file without a disk, which each maps."""

from __future__ import annotations

import mmap
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"shardtrain-[0-9a-f]{32}")
LEFTOVER_SECONDS = 3600.0
"""Ranks remove the name as soon as all have mapped the file: an older one is of ranks that were killed meanwhile."""


def path(token: bytes) -> Path:
    """The file's name, which a token makes hard to guess."""
    return FOLDER / f"shardtrain-{token.hex()}"


def create(token: bytes, size: int) -> mmap.mmap | None:
    """A new file of the user's alone, with its memory set aside; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    _sweep()
    try:
        file = os.open(path(token), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, size)  # else a rank would be killed where a container allows less
        return mmap.mmap(file, size)
    except OSError:
        with suppress(OSError):
            path(token).unlink()
        return None
    finally:
        os.close(file)


def _sweep() -> None:
    """Remove this user's files that killed ranks have left: each is memory of the machine until it starts again."""
    with suppress(OSError):
        for entry in os.scandir(FOLDER):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                old = time.time() - status.st_mtime > LEFTOVER_SECONDS
                if _NAME.fullmatch(entry.name) and status.st_uid == os.geteuid() and old:
                    os.unlink(entry.path)


def open_(token: bytes, size: int) -> mmap.mmap | None:
    """The file that the first rank has made; None where it is on another machine, or is not the user's."""
    try:
        file = os.open(path(token), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        # a file that another user has put there is not taken
        return mmap.mmap(file, size) if status.st_uid == os.geteuid() and status.st_size == size else None
    except OSError:
        return None
    finally:
        os.close(file)
