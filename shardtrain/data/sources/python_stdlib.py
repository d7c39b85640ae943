"""The source code of the running Python's standard library. These are real data that exist on every machine.

The text differs between Python versions, and so does its fingerprint.
So a run cannot resume with another version.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.data import shared_opening
from shardtrain.data.shared_opening import Listing
from shardtrain.data.sources import Request, Row, Table
from shardtrain.data.sources._data_files import File, FileList, FileSource, arrays_of
from shardtrain.utils.errors import ConfigError, DataError, Problem

MAX_BYTES = 16 * 2**20
"""Files are used in order, up to this total size. CPython 3.11 has about 11 MiB."""
# Skip three kinds of folders: installed packages, which differ between machines, tests, which are
# repetitive and a third of the text, and idlelib, which is often a separate package.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
)


def open_source(request: Request) -> Table:
    """Open one row ``{"text": ...}`` per ``.py`` file, in the order of relative paths.

    Bytes that are not UTF-8 become U+FFFD (no file of CPython has any outside its tests).

    Raises:
        ConfigError: a path is given, which this dataset does not support.
        DataError: the files are missing or unreadable, e.g. because the library is a zip of bytecode.
    """
    if request.path is not None:
        raise ConfigError(
            Problem(
                request.option,
                request.path,
                rule="has no effect with the dataset python_stdlib",
                fix='remove it, or use the dataset "text"',
            )
        )
    return open_folder(Path(sysconfig.get_path("stdlib")))


def open_folder(root: Path) -> Table:
    """Open the ``.py`` files below a folder, up to MAX_BYTES."""

    def opened(arrays: Any) -> FileList:
        return FileList(str(root), "training.dataset", arrays)

    listing = Listing(
        witnesses=lambda arrays: opened(arrays).witnesses(),
        content=lambda arrays: opened(arrays).content(),
        difference=lambda arrays, other_arrays: opened(arrays).difference(opened(other_arrays)),
    )
    return Library(opened(shared_opening.once(str(root), lambda: _list(root), listing)))


def _list(root: Path) -> dict[str, Any]:
    """Return the names and sizes of the source files, as arrays (see ``arrays_of``)."""
    try:
        names = _source_files(root)
        if not names:
            raise DataError(
                f"the dataset python_stdlib found no .py files in {root} (removed, or packed in a zip); "
                'install the full Python, or use training.dataset="text" with training.dataset_path'
            )
        # Use files until their total size reaches the limit.
        names_used: list[str] = []
        identities: list[tuple[int, int, int]] = []
        total_bytes = 0
        for name in names:
            status = os.stat(os.path.join(root, name))
            # Skip an empty file, such as an __init__.py that only marks a package.
            if not status.st_size:
                continue
            total_bytes += status.st_size
            if total_bytes > MAX_BYTES:
                break
            names_used.append(name)
            identities.append((status.st_size, status.st_mtime_ns, status.st_ino))
    except OSError as error:
        raise DataError(
            f"the dataset python_stdlib cannot read {error.filename}: {error.strerror}"
        ) from error
    sizes = [size for size, _, _ in identities]
    mtimes = [mtime for _, mtime, _ in identities]
    inodes = [inode for _, _, inode in identities]
    return arrays_of(str(root), names_used, sizes, mtimes, inodes)


@dataclass
class Library(FileSource):
    """A table in which each row is a source file, see ``Table``."""

    @property
    def num_rows(self) -> int:
        """Number of files."""
        return len(self.members)

    def files(self) -> Mapping[str, str]:
        """Return one entry for the library: a hash of all names and contents."""
        if not self._fingerprints:
            digest = shared_opening.once(self.listed_at, self._digest)
            self._fingerprints = {f"standard library of Python {platform.python_version()}": digest}
        return self._fingerprints

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for file in self.members:
            digest.update(f"{file.name}\0{file.size}\0".encode())
            digest.update(_content(file))
        return digest.hexdigest()

    def row(self, index: int) -> Row:
        return {"text": _content(self.members[index]).decode("utf-8", errors="replace")}

    def place(self, index: int) -> str:
        return self.members[index].path


def _content(file: File) -> bytes:
    with os.fdopen(file.open(), "rb") as opened:
        return opened.read()


def _source_files(root: Path) -> list[str]:
    """Return the relative POSIX paths of the .py files below ``root``, sorted.

    Folders to skip are not even listed.
    """

    def stop(error: OSError) -> None:
        # Do not skip the folder: if only some hosts can list it, their ranks would read a different dataset.
        raise error

    names: list[str] = []
    if not root.is_dir():
        return names
    for folder, subfolders, files in os.walk(root, onerror=stop):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        below = folder[len(os.path.join(root, "")) :].replace(os.sep, "/")
        for name in files:
            if name.endswith(".py"):
                names.append(f"{below}/{name}" if below else name)
    return sorted(names)
