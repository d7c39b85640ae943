"""Open and replace the files that a run writes, without following a symlink that somebody has planted.

``open_file`` opens every file that a run writes. Below the folders of ``guard`` no part of a path may be
a symlink: each folder is opened relative to the descriptor of its parent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

LEFTOVER_SECONDS = 3600.0
"""Age from which an unfinished file has no writer any more: its writer was killed."""
_ATTEMPTS = 100
"""Attempts to remove a planted link, in case somebody plants it again each time."""
_LEFT = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_IN_THE_WAY = (errno.ELOOP, errno.EMLINK, errno.ENXIO)
"""Error numbers of opening a symlink (EMLINK on FreeBSD), or a pipe or socket without a reader."""
_DEVICES = "/dev"
"""Folder of devices and of links such as ``/dev/stdout``. No file is written there, also not by root."""
_guarded: tuple[str, ...] = ()


def guard(*folders: str | os.PathLike[str]) -> None:
    """Set the folders that this process's run writes. Below them this module follows no symlinks."""
    global _guarded
    _guarded = tuple(_absolute(one) for one in folders)


def _absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path without ``..``. Like the system, go up from the target of a symlink, not from its name.

    ``os.path.abspath("link/../run")`` would be a different folder than the one that ``open`` uses.
    """
    parts = Path(path).parts
    if ".." not in parts:
        return os.path.abspath(path)
    # Resolve the path up to the last "..", and keep the names after it.
    end = len(parts) - parts[::-1].index("..")
    resolved = os.path.realpath(os.path.join(*parts[:end]))
    return os.path.join(resolved, *parts[end:])


@contextlib.contextmanager
def folder(path: str | os.PathLike[str], create: bool = False) -> Iterator[int]:
    """Open a folder and yield its descriptor. ``create`` creates it and its missing parents first.

    Raises:
        OSError: the folder cannot be opened, or a part of its path below a guarded folder is a symlink.
    """
    wanted = _absolute(path)
    # Open each folder below a guarded one relative to its parent. A symlink then cannot replace a part of
    # the path that was checked before.
    at = wanted
    for root in _guarded:
        if wanted == root or wanted.startswith(root + os.sep):
            at = root
            break
    names = wanted[len(at) :].split(os.sep)[1:]
    # Folders above a guarded one belong to the user, who may use symlinks there.
    if create:
        os.makedirs(at, exist_ok=True)
    descriptor = os.open(at, _FOLDER)
    try:
        for name in names:
            at = os.path.join(at, name)
            with _naming(at):
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=descriptor)
                inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder and its missing parents. Raises OSError like ``folder``."""
    with folder(path, create=True):
        pass


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the full path into an OSError of a call that only received a name relative to a descriptor."""
    try:
        yield
    except OSError as error:
        name = os.fspath(path)
        # The errno of a symlink depends on the system, so check for one.
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and os.path.islink(name):
            rule = f"{name} is a link to {os.readlink(name)}, which a run does not follow"
            raise OSError(errno.ELOOP, rule, name) from None
        error.filename = name
        error.filename2 = None
        raise


def open_file(
    path: str | os.PathLike[str],
    flags: int,
    mode: int = 0o666,
    create_folder: bool = False,
    fresh: bool = False,
) -> int:
    """Open a file for writing and return its descriptor; also an ``opener`` for ``open``.

    A symlink or a pipe at ``path`` is removed instead of opened. A file with more hard links is first
    replaced by a copy. ``fresh`` removes an existing file: truncating it would destroy its other hard
    links' content.

    Raises:
        OSError: the file cannot be opened, is a device, or is a link again after each removal. The error
            has the path.
    """
    parent, name = os.path.split(_absolute(path))
    with _naming(path), folder(parent, create_folder) as at:
        _keep_devices(name, at)
        if fresh:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=at)
        # O_NOFOLLOW refuses a symlink, and O_NONBLOCK a pipe without a reader, which would block.
        safe_flags = flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        for _ in range(_ATTEMPTS):
            try:
                descriptor = os.open(name, safe_flags, mode, dir_fd=at)
            except OSError as error:
                if error.errno not in _IN_THE_WAY:
                    raise
            # The file may be replaced between ``open`` and this check, so check the opened one.
            else:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode) and status.st_nlink < 2:
                    return descriptor
                os.close(descriptor)
            # Remove the link or the extra name, and try again.
            with contextlib.suppress(FileNotFoundError):
                _clear(name, at)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _keep_devices(name: str, at: int) -> None:
    """Raise OSError for a device and for a file in ``/dev``: root could replace ``/dev/null`` of all programs."""
    # /dev may be mounted elsewhere, too.
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(at), os.stat(_DEVICES)):
            raise OSError(errno.EOPNOTSUPP, "/dev is for devices, not for files")
    with contextlib.suppress(FileNotFoundError):
        kind = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            raise OSError(errno.EOPNOTSUPP, "it is a device, which a file must not replace")


def _clear(name: str, at: int) -> None:
    """Remove a symlink or a pipe. Replace a file with more hard links by a copy."""
    _keep_devices(name, at)
    status = os.stat(name, dir_fd=at, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        os.unlink(name, dir_fd=at)
    elif status.st_nlink > 1:
        # Other names of the file keep the old content.
        reader = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        with (
            open(reader, "rb") as source,
            _replacing(name, at, stat.S_IMODE(status.st_mode)) as copy,
        ):
            shutil.copyfileobj(source, copy)


@contextlib.contextmanager
def _replacing(name: str, at: int, mode: int) -> Iterator[BinaryIO]:
    """Yield a new file. It replaces ``name`` when the block ends, or is removed if the block raises."""
    _keep_devices(name, at)
    # Nobody can predict this name and plant a link there.
    part = f".{name}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(part, flags, mode, dir_fd=at), "wb") as file:
            yield file
        os.replace(part, name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=at)
        raise


def write(
    path: str | os.PathLike[str],
    content: bytes | str | Iterable[bytes],
    durable: bool = False,
    mode: int = 0o666,
    create_folder: bool = False,
) -> None:
    """Replace ``path`` atomically by a file with this content. Raises OSError.

    The new file is created next to ``path`` under an unpredictable name, where nobody can plant a symlink.

    Args:
        content: The content, or its parts.
        durable: Sync the content and the name to disk before returning.
        mode: Mode of the new file; the umask applies.
        create_folder: Create missing parent folders.
    """
    parent, name = os.path.split(_absolute(path))
    with _naming(path), folder(parent, create_folder) as at:
        with _replacing(name, at, mode) as file:
            if isinstance(content, str):
                content = content.encode()
            # Parts are written one after the other, so large content is never joined.
            if isinstance(content, bytes):
                content = (content,)
            file.writelines(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        # The new name is in the folder, so sync the folder too.
        if durable:
            os.fsync(at)


@contextlib.contextmanager
def for_library(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a new file, for a library that only accepts paths. The file replaces ``path`` at the end.

    The new file is in a separate private folder. On systems with ``/proc`` the yielded path uses the
    descriptor of this folder. Missing parent folders are created. Raises OSError.
    """
    parent, name = os.path.split(_absolute(path))
    part = f".{name}.{secrets.token_hex(4)}"
    with _naming(path), folder(parent, create=True) as at:
        _keep_devices(name, at)
        os.mkdir(part, 0o700, dir_fd=at)
        inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
        try:
            # Through this path, the folder stays the same even if its name is replaced.
            by_handle = f"/proc/self/fd/{inner}"
            yield os.path.join(
                by_handle if os.path.isdir(by_handle) else os.path.join(parent, part), name
            )
            os.replace(name, name, src_dir_fd=inner, dst_dir_fd=at)
        finally:
            os.close(inner)
            shutil.rmtree(part, ignore_errors=True, dir_fd=at)


def sweep(folder: Path) -> None:
    """Remove unfinished files of killed ``write`` calls that are at least an hour old. Never raises."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _LEFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                # Another process may remove the entry at the same time.
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > LEFTOVER_SECONDS:
                        os.unlink(entry.path)


def without_waiting(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file without blocking; an ``opener`` for ``open``. Raises OSError for a pipe or a device.

    Opening a planted pipe normally would wait for its writer forever.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        # "No such file" about a name that ``ls`` shows would be a riddle.
        if os.path.islink(path):
            rule = "is a link to a file that does not exist"
            raise FileNotFoundError(errno.ENOENT, rule, os.fspath(path)) from None
        raise
    except OSError as error:
        if error.errno == errno.ENXIO and stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return descriptor
