"""Object stores through fsspec, as the few things that a checkpoint asks of a path: list, sizes, read, write, delete.

No store renames at once, so nothing here does: an object appears whole or not at all when its writing ends. Whatever
a store's library raises becomes an OSError that names the address.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from shardtrain.utils.errors import ConfigError, Problem

MARK = "://"
EXTRA = "object-store"
PIECE_BYTES = 2**23


@contextlib.contextmanager
def _asking(address: str) -> Iterator[None]:
    """Every failure of a store as an OSError with a number, a reason and the address."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None) or _NUMBERS.get(type(error), errno.EIO)
        text = getattr(error, "strerror", None) or str(error) or os.strerror(number)
        reason = os.strerror(number) if number == errno.ENOENT else f"{type(error).__name__}: {text}".splitlines()[0]
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
    """An address in an object store, as far as it is used like a path.

    ``suffix`` goes between the stem and the ending of files written below it: the files of a save that is not
    published yet must not take the place of those of an earlier one with the same step.
    """

    store: Any = field(repr=False, compare=False)
    address: str
    suffix: str = ""

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> ObjectPath:
        stem, dot, ending = name.partition(".")
        return ObjectPath(self.store, f"{self.address.rstrip('/')}/{stem}{self.suffix}{dot}{ending}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.address.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """What is above."""
        return ObjectPath(self.store, self.address.rstrip("/").rpartition("/")[0])

    def list_below(self) -> list[ObjectPath]:
        """Objects and folders directly below, none where there is nothing. Raises OSError."""
        try:
            with _asking(self.address):
                self.store.invalidate_cache()
                keys = self.store.ls(self._key, detail=False)
        except FileNotFoundError:
            return []
        names = {str(key).rstrip("/").rpartition("/")[2] for key in keys} - {self.name, ""}
        whole = ObjectPath(self.store, self.address)
        return [whole / name for name in sorted(names)]

    iterdir = list_below

    def sizes_below(self) -> dict[str, int]:
        """Bytes of each object directly below, by name. Raises OSError."""
        try:
            with _asking(self.address):
                self.store.invalidate_cache()
                entries = self.store.ls(self._key, detail=True)
        except FileNotFoundError:
            return {}
        return {str(one["name"]).rpartition("/")[2]: int(one["size"] or 0) for one in entries if one["type"] == "file"}

    def glob(self, pattern: str) -> list[ObjectPath]:
        """Those directly below whose names match."""
        return [path for path in self.list_below() if fnmatch.fnmatchcase(path.name, pattern)]

    def stat(self) -> SimpleNamespace:
        """``st_size`` in bytes. Raises OSError, also for a folder."""
        with _asking(self.address):
            info = self.store.info(self._key)
            if info.get("type") == "directory":
                raise IsADirectoryError
            return SimpleNamespace(st_size=int(info["size"]))

    def is_file(self) -> bool:
        """Whether an object has this address. Raises OSError where the store does not answer."""
        try:
            self.stat()
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    exists = is_file

    def read_bytes(self) -> bytes:
        """All bytes of a small object."""
        with _asking(self.address):
            return bytes(self.store.cat_file(self._key))

    def open(self, mode: str) -> io.BytesIO:
        """Its bytes as a file that is read."""
        return io.BytesIO(self.read_bytes())

    def read_range(self, begin: int, end: int) -> bytes:
        """Bytes from ``begin`` to before ``end``."""
        with _asking(self.address):
            return bytes(self.store.cat_file(self._key, start=begin, end=end))

    def write_hashed(self, blocks: Iterable[memoryview]) -> tuple[int, str]:
        """Stream a new object. Return its size and SHA-256. A failed write leaves nothing that a reader opens."""
        digest = hashlib.sha256()
        size = 0
        with _asking(self.address):
            # Closed by hand, at the end alone: a context would close it after an error too, and closing is what makes
            # an object of what was written.
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
        """Write a small object at once. ``new`` fails where there is one; gives False for a store that cannot tell."""
        with _asking(self.address):
            # A store without conditional writes refuses the word, each in its way; the object is then put as any other.
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
            with _asking(self.address):
                self.store.rm_file(self._key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    @property
    def _key(self) -> str:
        return str(self.store._strip_protocol(self.address))


def unlink_all(paths: Sequence[ObjectPath]) -> None:
    """Delete objects of one store, many by one request where it takes that. Raises OSError; some may be left then."""
    if not paths:
        return
    keys = [path._key for path in paths]
    # fsspec takes a name with these characters for a pattern, and would delete everything that it matches
    if not any(character in key for key in keys for character in "*?["):
        with contextlib.suppress(OSError), _asking(paths[0].address):
            paths[0].store.rm(keys)
            return
    # nor does every store that speaks S3 take more than one
    for path in paths:
        path.unlink(missing_ok=True)


def open_address(address: str) -> ObjectPath:
    """An address such as ``s3://bucket/run``. Credentials come from the environment, as each store's library reads it.

    Raises:
        ConfigError: fsspec or the library of this store is not installed, or fsspec knows no such store.
    """
    with _naming_option(address):
        import fsspec

        store, _ = fsspec.url_to_fs(address, use_listings_cache=False)
    return ObjectPath(store, address.rstrip("/"))


def refuse_unknown_store(address: str) -> None:
    """Raise the ConfigError of ``open_address`` for a missing library or an unknown store, without opening anything."""
    with _naming_option(address):
        import fsspec

        fsspec.get_filesystem_class(address.partition(MARK)[0])


@contextlib.contextmanager
def _naming_option(address: str) -> Iterator[None]:
    """Re-raise fsspec errors as ConfigError of checkpoint.folder, also if fsspec or its backend is not installed."""
    try:
        yield
    except ImportError as error:
        missing = "fsspec" if error.name == "fsspec" else f"{address.partition(MARK)[0]} ({error})"
        fix = f'pip install "shardtrain[{EXTRA}]"'
        raise ConfigError(Problem("checkpoint.folder", address, f"needs {missing}, not installed", fix)) from error
    except ValueError as error:
        rule = f"names a store that fsspec does not know: {error}"
        fix = "use for example s3:// or gs://, or a folder"
        raise ConfigError(Problem("checkpoint.folder", address, rule, fix)) from error
