"""Open and replace the files that a run writes, without following a link that somebody has planted.

``open_file`` opens every file that a run writes. Below the folders that ``guard`` names no part of a path may be a
link: each folder is opened relative to the handle of the folder before it.
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
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

LEFTOVER_SECONDS = 3600.0
"""Nobody takes so long to write a small file: one that is older has no writer any more."""
_ATTEMPTS = 100
"""How many links are removed before giving up against somebody who plants them as fast."""
_LEFT = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_IN_THE_WAY = (errno.ELOOP, errno.EMLINK, errno.ENXIO)
"""Errors of opening a link (EMLINK on FreeBSD), and of opening a pipe or a socket that nobody reads."""
_guarded: tuple[str, ...] = ()


def guard(*folders: str | os.PathLike[str]) -> None:
    """Name the folders that this process's run writes: below them no function of this module follows a link."""
    global _guarded
    _guarded = tuple(os.path.abspath(one) for one in folders)


@contextlib.contextmanager
def folder(path: str | os.PathLike[str], create: bool = False) -> Iterator[int]:
    """Open a folder and yield its descriptor; ``create`` makes it and its parents where they do not exist.

    Raises:
        OSError: it cannot be opened, or a part of its path below a guarded folder is a link.
    """
    wanted = os.path.abspath(path)
    at = next((root for root in _guarded if wanted == root or wanted.startswith(root + os.sep)), wanted)
    names = wanted[len(at) :].split(os.sep)[1:]
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
    """Make a folder and its parents where they do not exist. Raises OSError as ``folder``."""
    with folder(path, create=True):
        pass


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the whole path into an OSError of a call that was given a name in a folder only."""
    try:
        yield
    except OSError as error:
        name = os.fspath(path)
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and os.path.islink(name):
            rule = f"{name} is a link to {os.readlink(name)}, which a run does not follow"
            raise OSError(errno.ELOOP, rule, name) from None
        error.filename = name
        error.filename2 = None
        raise


def open_file(
    path: str | os.PathLike[str], flags: int, mode: int = 0o666, create_folder: bool = False, fresh: bool = False
) -> int:
    """Open a file for writing and return its descriptor; also an ``opener`` for ``open``.

    A link, a pipe or a device in its place is removed, not written through. A file with
    a second name (a hard link) is replaced by a copy first. ``fresh`` removes any file that is there; truncating it
    would destroy the content under its other names.

    Raises:
        OSError: it cannot be opened, or is a link again and again; names the path.
    """
    parent, name = os.path.split(os.path.abspath(path))
    with _naming(path), folder(parent, create_folder) as at:
        if fresh:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=at)
        for _ in range(_ATTEMPTS):
            try:
                descriptor = os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=at)
            except OSError as error:
                if error.errno not in _IN_THE_WAY:
                    raise
            else:
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode) and status.st_nlink < 2:
                    return descriptor
                os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                _clear(name, at)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _clear(name: str, at: int) -> None:
    """Remove a link, a pipe or a device. Replace a file that has a second name by a copy."""
    status = os.stat(name, dir_fd=at, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        os.unlink(name, dir_fd=at)
    elif status.st_nlink > 1:
        reader = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        with open(reader, "rb") as source, _replacing(name, at, stat.S_IMODE(status.st_mode)) as copy:
            shutil.copyfileobj(source, copy)


@contextlib.contextmanager
def _replacing(name: str, at: int, mode: int) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of ``name`` when the block ends, and is removed when it raises."""
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
    content: bytes | str,
    durable: bool = False,
    mode: int = 0o666,
    create_folder: bool = False,
) -> None:
    """Replace ``path`` by a file with this content; ``durable`` puts content and name on disk. Raises OSError.

    A reader sees the old content or the new. The new file is made beside it under a name that nobody can foresee, so
    that a planted link is neither followed nor written through. Its mode is what the umask leaves of ``mode``.
    """
    parent, name = os.path.split(os.path.abspath(path))
    with _naming(path), folder(parent, create_folder) as at:
        with _replacing(name, at, mode) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if durable:
            os.fsync(at)


@contextlib.contextmanager
def for_library(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the path of a new file for a library that opens it by itself; it takes the place of ``path`` at the end.

    The new file is in a private folder of its own, which is named by its handle where the system has ``/proc``.
    Missing parent folders are made. Raises OSError.
    """
    parent, name = os.path.split(os.path.abspath(path))
    part = f".{name}.{secrets.token_hex(4)}"
    with _naming(path), folder(parent, create=True) as at:
        os.mkdir(part, 0o700, dir_fd=at)
        inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
        try:
            by_handle = f"/proc/self/fd/{inner}"
            yield os.path.join(by_handle if os.path.isdir(by_handle) else os.path.join(parent, part), name)
            os.replace(name, name, src_dir_fd=inner, dst_dir_fd=at)
        finally:
            os.close(inner)
            shutil.rmtree(part, ignore_errors=True, dir_fd=at)


def sweep(folder: Path) -> None:
    """Remove what ``write`` has left in a folder, cut short by a kill an hour ago or more; raises nothing."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if _LEFT.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > LEFTOVER_SECONDS:
                        os.unlink(entry.path)


def without_waiting(path: str, flags: int) -> int:
    """An opener for ``open``: a regular file, or OSError; a pipe planted in its place would be waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", path)
    return descriptor
