"""Small files that are replaced as one: a reader sees the old content or the new, and no name is known beforehand."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
import time
from pathlib import Path

LEFTOVER_SECONDS = 3600.0
"""Nobody takes so long to write a small file: one that is older has no writer any more."""
_LINKS = 100
"""So many links are removed before giving up against somebody who plants them as fast."""
_LEFT = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp")


def write(path: Path, content: bytes | str, durable: bool = False, mode: int = 0o666) -> None:
    """Replace ``path`` by a file with this content; ``durable`` puts it on disk first. Raises OSError.

    The new file is made beside it under a name that nobody can foresee, and only if there is none of that name: a link
    planted by somebody else is neither followed nor written through. Its mode is what the umask leaves of ``mode``.
    """
    data = content.encode() if isinstance(content, str) else content
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode & ~umask())
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            error.filename = str(path)  # not the temporary name, or none
        raise


def sweep(folder: Path) -> None:
    """Remove what ``write`` has left in a folder, cut short by a kill an hour ago or more; raises nothing."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _LEFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > LEFTOVER_SECONDS:
                        os.unlink(entry.path)


def umask() -> int:
    """The umask of this process.

    Linux tells it; elsewhere asking needs setting it for a moment, in which another thread's files have that one.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def not_through_a_link(path: str, flags: int, mode: int = 0o666) -> int:
    """An opener for files that are appended to: a link planted in the place of one is removed, and not written through.

    Raises:
        OSError: it cannot be opened, or is a link again and again.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(_LINKS):
        try:
            return os.open(path, flags, mode)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK) or not os.path.islink(path):
                raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def without_waiting(path: str, flags: int) -> int:
    """An opener for ``open``: a regular file, or OSError; a pipe planted in its place would be waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", path)
    return descriptor
