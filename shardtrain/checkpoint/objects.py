"""Paths in object stores, through fsspec, with the operations that checkpoints need.

Object stores have no atomic rename, so there is none here. An object appears completely or not at
all when its write ends. Every exception of a store's library becomes an OSError with the address.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from shardtrain.utils.errors import ConfigError, Problem

MARK = "://"
EXTRA = "object-store"
PIECE_BYTES = 2**23
"""Bytes that are written and hashed at a time. One thread writes a piece while another hashes it."""


@contextlib.contextmanager
def _store_errors(address: str) -> Iterator[None]:
    """Convert every exception of the block to an OSError with a number, a reason and the address."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None) or _NUMBERS.get(type(error), errno.EIO)
        text = getattr(error, "strerror", None) or str(error) or os.strerror(number)
        reason = f"{type(error).__name__}: {text}".splitlines()[0]
        if number == errno.ENOENT:
            reason = os.strerror(number)
        raise OSError(number, reason[:300], address) from error


_NUMBERS: dict[type, int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    TimeoutError: errno.ETIMEDOUT,
}


@dataclass(frozen=True)
class ObjectPath:
    """An address in an object store, with a part of the interface of ``pathlib.Path``.

    ``suffix`` is inserted before the extension of files below this path. The files of an
    unpublished save therefore never replace those of an earlier save of the same step.
    """

    store: Any = field(repr=False, compare=False)
    address: str
    suffix: str = ""

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> ObjectPath:
        stem, dot, ending = name.partition(".")
        folder = self.address.rstrip("/")
        return ObjectPath(self.store, f"{folder}/{stem}{self.suffix}{dot}{ending}")

    @property
    def name(self) -> str:
        """The last component."""
        return self.address.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The path without its last component."""
        return ObjectPath(self.store, self.address.rstrip("/").rpartition("/")[0])

    def list_below(self) -> list[ObjectPath]:
        """Return the objects and folders directly below this path. Raises OSError."""
        try:
            with _store_errors(self.address):
                self.store.invalidate_cache()
                keys = self.store.ls(self._key, detail=False)
        except FileNotFoundError:
            return []
        names = {str(key).rstrip("/").rpartition("/")[2] for key in keys}
        # Some stores list the folder itself too.
        names -= {self.name, ""}
        without_suffix = ObjectPath(self.store, self.address)
        return [without_suffix / name for name in sorted(names)]

    iterdir = list_below

    def sizes_below(self) -> dict[str, int]:
        """Return the size of each object directly below, by name. Raises OSError."""
        try:
            with _store_errors(self.address):
                self.store.invalidate_cache()
                entries = self.store.ls(self._key, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {}
        for entry in entries:
            if entry["type"] == "file":
                name = str(entry["name"]).rpartition("/")[2]
                sizes[name] = int(entry["size"] or 0)
        return sizes

    def glob(self, pattern: str) -> list[ObjectPath]:
        """Return the objects and folders directly below whose names match."""
        return [path for path in self.list_below() if fnmatch.fnmatchcase(path.name, pattern)]

    def stat(self) -> SimpleNamespace:
        """Return ``st_size`` in bytes. Raises OSError, also for a folder."""
        with _store_errors(self.address):
            info = self.store.info(self._key)
            if info.get("type") == "directory":
                raise IsADirectoryError
            return SimpleNamespace(st_size=int(info["size"]))

    def is_file(self) -> bool:
        """True if an object has this address. Raises OSError if the store does not answer."""
        try:
            self.stat()
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    exists = is_file

    def read_bytes(self) -> bytes:
        """Return all bytes of a small object."""
        with _store_errors(self.address):
            return bytes(self.store.cat_file(self._key))

    def open(self, mode: str) -> io.BytesIO:
        """Return a file object with the bytes of a small object."""
        return io.BytesIO(self.read_bytes())

    def read_range(self, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` up to ``end``, exclusive."""
        with _store_errors(self.address):
            return bytes(self.store.cat_file(self._key, start=begin, end=end))

    def write_hashed(self, blocks: Iterable[memoryview]) -> tuple[int, str]:
        """Stream a new object. Return its size and SHA-256. A failed write leaves nothing that a
        reader opens.
        """
        digest = hashlib.sha256()
        size = 0
        with _store_errors(self.address):
            # Close the file only after success, without a context manager: closing it creates the object.
            file = self.store.open(self._key, "wb")
            for block in blocks:
                for start in range(0, len(block), PIECE_BYTES):
                    piece = block[start : start + PIECE_BYTES]
                    file.write(piece)
                    digest.update(piece)
                    size += len(piece)
            file.close()
        return size, digest.hexdigest()

    def put(self, data: bytes, new: bool) -> bool:
        """Write a small object atomically.

        With ``new``, fail if it exists. Return False if the store cannot check that.
        """
        with _store_errors(self.address):
            # A store without conditional writes rejects ``mode``, with various errors. Write
            # unconditionally then.
            if new:
                try:
                    self.store.pipe_file(self._key, data, mode="create")
                    return True
                except (TypeError, ValueError, RuntimeError):
                    pass
            self.store.pipe_file(self._key, data)
            return not new

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            with _store_errors(self.address):
                self.store.rm_file(self._key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    @property
    def _key(self) -> str:
        return str(self.store._strip_protocol(self.address))


def unlink_all(paths: Sequence[ObjectPath]) -> None:
    """Delete objects of one store, with one request for many if it supports that.

    Raises:
        OSError: an object cannot be deleted. Others may remain.
    """
    if not paths:
        return
    keys = [path._key for path in paths]
    # fsspec treats a name with these characters as a pattern, and would delete all matching objects.
    has_patterns = any(re.search(r"[*?[]", key) for key in keys)
    if not has_patterns:
        with contextlib.suppress(OSError), _store_errors(paths[0].address):
            paths[0].store.rm(keys)
            return
    # Some S3-compatible stores do not support bulk deletion.
    for path in paths:
        path.unlink(missing_ok=True)


def open_address(address: str) -> ObjectPath:
    """Open an address such as ``s3://bucket/run``. The store's library reads credentials from the
    environment.

    Raises:
        ConfigError: fsspec or the library of this store is not installed, or the store is unknown.
    """
    with _naming_option(address):
        import fsspec

        store, _ = fsspec.url_to_fs(address, use_listings_cache=False)
    return ObjectPath(store, address.rstrip("/"))


def refuse_unknown_store(address: str) -> None:
    """Raise the ConfigError of ``open_address`` for a missing library or an unknown store, without
    opening anything.
    """
    with _naming_option(address):
        import fsspec

        fsspec.get_filesystem_class(address.partition(MARK)[0])


@contextlib.contextmanager
def _naming_option(address: str) -> Iterator[None]:
    """Re-raise fsspec errors as ConfigError of checkpoint.folder, also if fsspec or its backend is
    not installed.
    """
    try:
        yield
    except ImportError as error:
        missing = "fsspec"
        if error.name != "fsspec":
            missing = f"{address.partition(MARK)[0]} ({error})"
        raise ConfigError(
            Problem(
                "checkpoint.folder",
                address,
                rule=f"needs {missing}, not installed",
                fix=f'pip install "shardtrain[{EXTRA}]"',
            )
        ) from error
    except ValueError as error:
        raise ConfigError(
            Problem(
                "checkpoint.folder",
                address,
                rule=f"names a store that fsspec does not know: {error}",
                fix="use for example s3:// or gs://, or a folder",
            )
        ) from error
