"""Read files of other programs with a size limit, and distinguish storage failures from invalid files."""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO, Literal

from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.errors import ConfigError, DataError, Problem, ShardtrainError

MAX_SKIPPED_BYTES = 2**26
"""Maximum size of an invalid line. Finding the end of a line in a hole of terabytes would take hours."""
_NAMES_OF_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def name_of_kind(mode: int) -> str:
    """Return the kind of a file from its mode, with an article: "a pipe"."""
    return _NAMES_OF_KINDS.get(stat.S_IFMT(mode), "a device")


def trouble(path: str | os.PathLike[str], error: OSError) -> ShardtrainError | None:
    """Return a storage error if a later attempt may succeed; None if the path or the user's permissions are wrong."""
    return (
        storage_errors.cannot("read", path, error)
        if storage_errors.is_of_system(error, path)
        else None
    )


def unreadable(
    option: str,
    path: str | os.PathLike[str],
    error: OSError,
    fix: str = "make the file readable",
    kind: type[ConfigError] | type[DataError] = ConfigError,
) -> ShardtrainError:
    """Return the error for a file that cannot be read.

    It is the storage error from ``trouble`` if there is one, and otherwise a ``kind`` that names ``option``.
    """
    problem = Problem(option, os.fspath(path), f"cannot be read ({error.strerror})", fix)
    return trouble(path, error) or (
        ConfigError(problem) if kind is ConfigError else kind(str(problem))
    )


def kind(path: str | os.PathLike[str]) -> Literal["folder", "file", "other", ""]:
    """Return the kind of a path's target. Empty if it does not exist.

    ``os.path.isdir`` and similar functions report that a path on storage that does not answer does not exist.

    Raises:
        StorageError: the storage does not answer.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        failing = trouble(path, error)
        if failing is not None:
            raise failing from error
        return ""
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


def is_present(path: str | os.PathLike[str]) -> bool:
    """True if the folder of a path has an entry of this name, of any kind: also a pipe or a broken link.

    Use it for files that an artefact may omit. ``pathlib.Path.is_file`` is False for a broken link, so the artefact
    would be read as if it did not have the file. Reading the file then names what is wrong with it.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        # The entry may exist. Reading it raises the same error.
        return True
    return True


def read_all(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the bytes of a regular file of at most ``most`` bytes.

    Reading a pipe would block. A device has no end, although its reported size is 0.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger.
    """
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"is larger than {most} bytes", os.fspath(path))
        return file.read(size)


def start(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the first bytes of a regular file, at most ``most``. Raises OSError."""
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        # read(n) allocates n bytes, even for a short file.
        return file.read(min(most, os.fstat(file.fileno()).st_size))


def end(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the last bytes of a regular file, at most ``most``. Raises OSError."""
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def line(file: BinaryIO, most: int) -> bytes:
    """Return the next line, or b"" at the end of the file. A line of more than ``most`` bytes is cut.

    The cut line has ``most + 1`` bytes. The next call returns the line after it.

    Raises:
        OSError: a line has more than ``MAX_SKIPPED_BYTES``, so the file is not a file of lines.
    """
    text = part = file.readline(most + 1)
    num_skipped = 0
    while len(part) > most and not part.endswith(b"\n"):
        num_skipped += len(part)
        if num_skipped > MAX_SKIPPED_BYTES:
            raise OSError(
                errno.EFBIG, f"has a line of more than {MAX_SKIPPED_BYTES} bytes", file.name
            )
        part = file.readline(most + 1)
    return text
