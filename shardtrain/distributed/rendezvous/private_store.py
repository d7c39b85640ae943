"""Where the ranks of one machine meet: files in a folder that no other user of the machine can enter.

PyTorch's TCPStore knows no password: whoever reaches its port reads and sets its keys, and so ends a run or changes it.
A file in a folder of mode 0700 is the kernel's to guard. Process groups meet in PyTorch's own FileStore, which keeps
every value that was ever set; the heartbeat sets new ones for as long as a run takes, and has files of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from shardtrain.utils.errors import StorageError
from shardtrain.utils.process import STORE, meeting_folder

_A_DAY_SECONDS = 86_400
_POLL_SECONDS = 0.02
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def folder_of(environment: Mapping[str, str]) -> Path | None:
    """The folder in which this rank meets the others; None where they meet at an address.

    Raises:
        StorageError: other users of the machine may enter it, or it is somebody else's.
    """
    return own(Path(folder)) if (folder := meeting_folder(environment)) else None


def own(folder: Path) -> Path:
    """A folder that is to be this user's alone.

    Raises:
        StorageError: other users of the machine may enter it, or it is somebody else's.
    """
    try:
        status = folder.lstat()
    except OSError as error:
        raise StorageError(f"the folder {folder}, in which the ranks meet, is gone: {error.strerror}") from error
    if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StorageError(f"{folder}, in which the ranks meet, is not a folder of this user alone; unset {STORE}")
    return folder


def folder_of_launcher(environment: Mapping[str, str]) -> Path | None:
    """The folder that ranks of a launcher with a store of its own (torchrun) share; None where nodes are several.

    All of them find the same one: no two launchers of a network listen on one port, so it is that port's.

    Raises:
        StorageError: no place is left in which this user alone can have a folder.
    """
    if not environment.get("WORLD_SIZE") or environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]:
        return None
    network = os.readlink("/proc/self/ns/net") if os.path.exists("/proc/self/ns/net") else ""
    return _folder_named(environment, network, environment["MASTER_PORT"], environment.get("TORCHELASTIC_RUN_ID", ""))


def folder_of_step(environment: Mapping[str, str]) -> Path | None:
    """The folder that the tasks of a Slurm step share; None where its nodes are several, or it is declined.

    Raises:
        StorageError: no place is left in which this user alone can have a folder.
    """
    # ranks that torchrun or our own launcher has started in a task meet as those do, and have these two
    if environment.get(STORE) or environment.get("LOCAL_WORLD_SIZE") or environment.get("TORCHELASTIC_RUN_ID"):
        return None
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    if environment.get("SLURM_STEP_NUM_NODES") != "1" or tasks in (None, "1") or tasks != environment.get("WORLD_SIZE"):
        return None
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return _folder_named(environment, *(environment.get(name, "") for name in names))


def _folder_named(environment: Mapping[str, str], *names: str) -> Path:
    folder = _own_folder(environment) / hashlib.sha256("\0".join(names).encode()).hexdigest()[:24]
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def sweep(folder: Path) -> None:
    """Remove what other attempts left beside a folder of this launcher, and launchers that were silent for a day."""
    _sweep_beside(folder)
    for attempt in folder.iterdir():
        if attempt.is_dir():
            shutil.rmtree(attempt, ignore_errors=True)


def _sweep_beside(folder: Path) -> None:
    for other in folder.parent.iterdir():
        if other != folder and _newest_write(other) < time.time() - _A_DAY_SECONDS:
            shutil.rmtree(other, ignore_errors=True)


def _newest_write(folder: Path) -> float:
    """When something in a folder was last written: Unix seconds; now where its owner writes while it is read."""
    try:
        return max(one.stat().st_mtime for one in (folder, *folder.glob("*"), *folder.glob("*/*")))
    except FileNotFoundError:
        return time.time()


def _own_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder for all meetings of this user: the first candidate that only this user can enter.

    The candidates are below ``XDG_RUNTIME_DIR``, the folder for temporary files, and the home folder. Another user may
    have taken the name in the folder for temporary files, but not the one in the home folder.

    Raises:
        StorageError: none of them can be used.
    """
    places = [Path(tempfile.gettempdir(), f"shardtrain-{os.geteuid()}"), Path.home() / ".cache/shardtrain/meetings"]
    if environment.get("XDG_RUNTIME_DIR"):
        places.insert(0, Path(environment["XDG_RUNTIME_DIR"], "shardtrain"))
    for place in places:
        with contextlib.suppress(OSError, StorageError):
            place.mkdir(mode=0o700, parents=place == places[-1], exist_ok=True)
            return own(place)
    raise StorageError(
        f"no folder in which the ranks can meet: {', '.join(map(str, places))} are not of this user alone"
    )


def new_folder(environment: Mapping[str, str], name: str) -> Path:
    """A folder of this user alone for the ranks of one node; what was left there a day ago goes.

    Raises:
        StorageError: no place is left in which this user alone can have a folder.
    """
    folder = _own_folder(environment) / f"{name}-{secrets.token_hex(12)}"
    folder.mkdir(mode=0o700)
    _sweep_beside(folder)
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
        # written beside and renamed: a reader never sees half a value
        temporary = self._path(f".{secrets.token_hex(8)}")
        with self._as_store_error():
            temporary.write_bytes(value if isinstance(value, bytes) else value.encode())
            temporary.replace(self._path(key))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        with self._as_store_error():
            return self._path(key).read_bytes()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Return when all keys are there.

        Raises:
            DistStoreError: they are not within ``timeout``.
        """
        end = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"{', '.join(keys)} did not come in {timeout.total_seconds():g} s")
            time.sleep(_POLL_SECONDS)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and give the sum."""
        return int(self._change(key, lambda old: str(int(old or b"0") + amount).encode()))

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """Set a key that has the expected value, or none where "" is expected; gives what it has afterwards."""
        return self._change(key, lambda old: wanted.encode() if old == expected.encode() else old)

    def _change(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        with self._as_store_error():
            # one lock for all keys: numbers are counted seldom
            lock = os.open(self._path(".lock"), _OPEN, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                path = self._path(key)
                value = change(path.read_bytes() if path.exists() else b"")
                self.set(key, value)
                return value
            finally:
                # closing is not enough: a process forked at this moment, such as a data worker, has the lock too
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    @contextlib.contextmanager
    def _as_store_error(self) -> Iterator[None]:
        """A folder that has gone is a store that has gone."""
        try:
            yield
        except OSError as error:
            raise dist.DistStoreError(f"{self._folder} cannot be used: {error.strerror}") from error
