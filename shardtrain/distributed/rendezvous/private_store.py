"""Rendezvous for ranks on one machine, in a private folder that other users cannot enter.

PyTorch's TCPStore has no password. Any process that reaches its port can read and set keys, and so disrupt
the run. Files in a folder of mode 0700 are protected by the kernel.

Process groups use PyTorch's FileStore, which never frees old values. The heartbeat sets new values
throughout the run, so it uses ``FolderStore`` instead.
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
    """Return the folder that the ranks use for the rendezvous, or None if they use a network address.

    Raises:
        StorageError: the folder does not exist, another user owns it, or other users may enter it.
    """
    folder = meeting_folder(environment)
    if not folder:
        return None
    return checked_folder(Path(folder))


def checked_folder(folder: Path) -> Path:
    """Return ``folder`` after checking that only this user can enter it.

    Raises:
        StorageError: the folder does not exist, another user owns it, or other users may enter it.
    """
    try:
        status = folder.lstat()
    except OSError as error:
        raise StorageError(
            f"the folder {folder} for the rendezvous of the ranks cannot be read: {error.strerror}"
        ) from error
    if (
        not folder.is_dir()
        or folder.is_symlink()
        or status.st_uid != os.geteuid()
        or status.st_mode & 0o077
    ):
        raise StorageError(
            f"the folder {folder} for the rendezvous of the ranks must belong to this user and have mode "
            f"0700; unset {STORE}"
        )
    return folder


def folder_of_launcher(environment: Mapping[str, str]) -> Path | None:
    """Return the folder for ranks that a launcher with its own store (torchrun) has started on one node.

    None if the run has several nodes. All ranks compute the same name, from the launcher's port and the
    network namespace, in which the port is unique.

    Raises:
        StorageError: no candidate folder can be used by this user only.
    """
    if (
        not environment.get("WORLD_SIZE")
        or environment.get("LOCAL_WORLD_SIZE") != environment["WORLD_SIZE"]
    ):
        return None
    network = ""
    if os.path.exists("/proc/self/ns/net"):
        network = os.readlink("/proc/self/ns/net")
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    return _folder_named(environment, network, environment["MASTER_PORT"], run_id)


def folder_of_step(environment: Mapping[str, str]) -> Path | None:
    """Return the folder for the tasks of a Slurm step on one node.

    None if the step has several nodes, or a launcher has started the ranks.

    Raises:
        StorageError: no candidate folder can be used by this user only.
    """
    # These variables are set if torchrun or this package's launcher started the ranks within a task.
    if (
        environment.get(STORE)
        or environment.get("LOCAL_WORLD_SIZE")
        or environment.get("TORCHELASTIC_RUN_ID")
    ):
        return None
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    if (
        environment.get("SLURM_STEP_NUM_NODES") != "1"
        or tasks in (None, "1")
        or tasks != environment.get("WORLD_SIZE")
    ):
        return None
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return _folder_named(environment, *(environment.get(name, "") for name in names))


def _folder_named(environment: Mapping[str, str], *names: str) -> Path:
    # A hash, because names of clusters and jobs may contain any character, and paths of sockets are short.
    digest = hashlib.sha256("\0".join(names).encode()).hexdigest()
    folder = _own_folder(environment) / digest[:24]
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def sweep(folder: Path) -> None:
    """Delete the subfolders of earlier attempts, and sibling folders that have not changed for a day."""
    _sweep_beside(folder)
    for attempt in folder.iterdir():
        if attempt.is_dir():
            shutil.rmtree(attempt, ignore_errors=True)


def _sweep_beside(folder: Path) -> None:
    for other in folder.parent.iterdir():
        if other != folder and _newest_write(other) < time.time() - _A_DAY_SECONDS:
            shutil.rmtree(other, ignore_errors=True)


def _newest_write(folder: Path) -> float:
    """Return the time of the last write to a folder or its files, in Unix seconds.

    If a file disappears during the scan, the folder is in use, so return the current time.
    """
    paths = [folder]
    try:
        paths += folder.glob("*")
        paths += folder.glob("*/*")
        return max(path.stat().st_mtime for path in paths)
    except FileNotFoundError:
        return time.time()


def _own_folder(environment: Mapping[str, str]) -> Path:
    """Return this user's folder for rendezvous files: the first candidate that only this user can enter.

    The candidates are subfolders of ``XDG_RUNTIME_DIR``, of the folder for temporary files, and of the home
    folder. The home folder is needed if another user has already created the temporary folder.

    Raises:
        StorageError: no candidate can be used.
    """
    places = [
        Path(tempfile.gettempdir(), f"shardtrain-{os.geteuid()}"),
        Path.home() / ".cache/shardtrain/meetings",
    ]
    if environment.get("XDG_RUNTIME_DIR"):
        places.insert(0, Path(environment["XDG_RUNTIME_DIR"], "shardtrain"))
    for place in places:
        with contextlib.suppress(OSError, StorageError):
            place.mkdir(mode=0o700, parents=place == places[-1], exist_ok=True)
            return checked_folder(place)
    raise StorageError(
        f"none of {', '.join(map(str, places))} can be made a folder for the rendezvous that only this user can enter; "
        "set XDG_RUNTIME_DIR to such a folder"
    )


def new_folder(environment: Mapping[str, str], name: str) -> Path:
    """Create a private folder for the ranks of one node. Delete sibling folders unchanged for a day.

    Raises:
        StorageError: no candidate folder can be used by this user only.
    """
    folder = _own_folder(environment) / f"{name}-{secrets.token_hex(12)}"
    folder.mkdir(mode=0o700)
    _sweep_beside(folder)
    return folder


def group_store(folder: Path) -> dist.FileStore:
    """Return the store of process groups."""
    # With -1 as the number of users, PyTorch does not delete the file. The folder is deleted later instead.
    return dist.FileStore(str(folder / "store"), -1)


class FolderStore:
    """A store with only the methods that the heartbeat needs. Each key is a file with its newest value."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key atomically. A reader sees the old or the new value."""
        # Write a temporary file and rename it, so a reader never sees a partial value.
        temporary = self._path(f".{secrets.token_hex(8)}")
        with self._as_store_error():
            content = value if isinstance(value, bytes) else value.encode()
            temporary.write_bytes(content)
            temporary.replace(self._path(key))

    def get(self, key: str) -> bytes:
        """Return the value of a key.

        Raises:
            DistStoreError: the key does not exist.
        """
        with self._as_store_error():
            return self._path(key).read_bytes()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys.

        Raises:
            DistStoreError: a key does not exist.
        """
        return [self.get(key) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys exist."""
        return all(self._path(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys exist.

        Raises:
            DistStoreError: a key does not exist after ``timeout``.
        """
        end = time.monotonic() + timeout.total_seconds()
        seconds = timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(
                    f"keys {', '.join(keys)} were not set within {seconds:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the new value."""

        def add_amount(old: bytes | None) -> bytes:
            value = int(old or b"0") + amount
            return str(value).encode()

        return int(self._change(key, add_amount))

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """Set a key if it has the expected value, and return its value afterwards.

        ``expected=""`` means that the key must not exist.
        """

        def change(old: bytes) -> bytes:
            if old == expected.encode():
                return wanted.encode()
            return old

        return self._change(key, change)

    def _change(self, key: str, change: Callable[[bytes], bytes]) -> bytes:
        with self._as_store_error():
            # One lock for all keys is enough, because counters change rarely.
            lock = os.open(self._path(".lock"), _OPEN, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                path = self._path(key)
                old = path.read_bytes() if path.exists() else b""
                value = change(old)
                self.set(key, value)
                return value
            finally:
                # Unlock explicitly. Closing is not enough, because a process that was forked in the meantime,
                # such as a data worker, would keep the lock.
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    @contextlib.contextmanager
    def _as_store_error(self) -> Iterator[None]:
        """Convert an OSError within the block to a DistStoreError."""
        try:
            yield
        except OSError as error:
            raise dist.DistStoreError(f"{self._folder} cannot be used: {error.strerror}") from error
