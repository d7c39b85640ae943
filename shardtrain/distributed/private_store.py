"""Where the ranks of one machine meet: files in a folder that no other user of the machine can enter.

PyTorch's TCPStore knows no password: whoever reaches its port reads and sets its keys, and so ends a run or changes it.
A file in a folder of mode 0700 is the kernel's to guard. Process groups meet in PyTorch's own FileStore, which keeps
every value that was ever set; the heartbeat sets new ones for as long as a run takes, and has files of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from shardtrain.utils.errors import StorageError
from shardtrain.utils.process import STORE

_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def folder_of(environment: Mapping[str, str]) -> Path | None:
    """The folder in which this rank meets the others; None where they meet at an address.

    Raises:
        StorageError: other users of the machine may enter it, or it is somebody else's.
    """
    if not environment.get(STORE):
        return None
    folder = Path(environment[STORE])
    try:
        found = folder.lstat()
    except OSError as error:
        raise StorageError(f"the folder {folder}, in which the ranks meet, is gone: {error.strerror}") from error
    if not folder.is_dir() or folder.is_symlink() or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StorageError(f"{folder}, in which the ranks meet, is not a folder of this user alone; unset {STORE}")
    return folder


def group_store(folder: Path) -> dist.FileStore:
    """The store of process groups."""
    # -1: the folder goes as a whole, so nobody has to count who is the last
    return dist.FileStore(str(folder / "store"), -1)


class FolderStore:
    """The methods of a store that the heartbeat needs: a file holds the newest value of a key, and no older one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key; a reader sees the old value or the new one."""
        temporary = self._path(f".{secrets.token_hex(8)}")
        with self._told():
            temporary.write_bytes(value if isinstance(value, bytes) else value.encode())
            temporary.replace(self._path(key))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        with self._told():
            return self._path(key).read_bytes()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(self._path(key).exists() for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and give the sum."""
        return int(self._change(key, lambda old: str(int(old or b"0") + amount).encode()))

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """Set a key that has the expected value, or none where "" is expected; gives what it has afterwards."""
        return self._change(key, lambda old: wanted.encode() if old == expected.encode() else old)

    def _change(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        with self._told():
            lock = os.open(self._path(".lock"), _OPEN, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                path = self._path(key)
                value = change(path.read_bytes() if path.exists() else b"")
                self.set(key, value)
                return value
            finally:
                os.close(lock)

    def _path(self, key: str) -> Path:
        return self._folder / key

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A folder that has gone is a store that has gone."""
        try:
            yield
        except OSError as error:
            raise dist.DistStoreError(f"{self._folder} cannot be used: {error.strerror}") from error
