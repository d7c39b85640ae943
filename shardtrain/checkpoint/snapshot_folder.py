"""Folders in host memory that hold the snapshots of a node, and the records that describe their files.

The launcher of a node creates the folder in /dev/shm and removes it at its end, so the folder outlives the
ranks. It has two generations, ``0/`` and ``1/``. Each contains the files of a checkpoint that this node
holds, and a record for each file: the attempt that wrote it, its step, its size and its SHA-256. A file
without a record does not exist. This file does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from shardtrain.checkpoint import files
from shardtrain.checkpoint.manifest import MANIFEST
from shardtrain.config.schema import Config
from shardtrain.utils import atomic_io, limits, temporary
from shardtrain.utils.errors import ConfigError, Problem

VARIABLE = "SHARDTRAIN_SNAPSHOTS"
"""Environment variable of ranks: the folder of their node."""
GENERATIONS = ("0", "1")
OPTION = "checkpoint.snapshot_interval"
_RECORD = ".done"
_LOADING = "loading-"
"""Start of the names of folders from which a rank loads."""
_MOST_RECORDS = 100_000


class FileRecord(NamedTuple):
    """Description of a complete file of a snapshot.

    Attributes:
        token: Identifies the attempt that wrote it. All ranks of an attempt have the same token.
        name: Name of the file in its generation.
    """

    token: str
    step: int
    name: str
    bytes: int
    sha256: str


def file_of(rank: int) -> str:
    """Return the name of a rank's file, as in a checkpoint."""
    return f"rank-{rank:05d}.bin"


@contextlib.contextmanager
def created(config: Config, max_restarts: int) -> Iterator[dict[str, str]]:
    """Create the folder of this node, and yield the variable by which its ranks find it.

    Yield an empty dict if the run takes no snapshots. The folder is removed at the end.

    Raises:
        ConfigError: snapshots are not possible, or no restart would use them.
    """
    interval = config.checkpoint.snapshot_interval
    if not interval:
        yield {}
        return
    if not max_restarts:
        raise ConfigError(without_restarts(interval))
    if sys.platform != "linux" or not temporary.SHARED_MEMORY.is_dir():
        rule = f"requires {temporary.SHARED_MEMORY}, which this system does not have"
        raise ConfigError(Problem(OPTION, interval, rule, "set it to 0"))
    # The launcher owns the folder, so it survives ranks that are killed, and is removed with the run.
    folder = temporary.make("snapshots", in_memory=True)
    try:
        for name in GENERATIONS:
            (folder / name).mkdir(mode=0o700)
        yield {VARIABLE: str(folder)}
    finally:
        temporary.remove(folder)


def without_restarts(interval: int) -> Problem:
    """Return the problem of a run whose launcher does not restart its ranks."""
    rule = "is for runs that shardtrain restarts, and this run has no restarts"
    fix = "add --max_restarts N to shardtrain train, without torchrun or srun, or set it to 0"
    return Problem(OPTION, interval, rule, fix)


def of_rank(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of this rank's node, or None if no launcher has created one.

    Raises:
        ConfigError: the folder is not a private folder of this user.
    """
    path = environment.get(VARIABLE)
    if not path:
        return None
    # Everybody can create files in /dev/shm, so another user could plant a folder with this path.
    problem = ""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        os.close(descriptor)
        is_shared = bool(stat.S_IMODE(status.st_mode) & 0o077)
        if status.st_uid != os.geteuid() or is_shared:
            problem = "must belong to this user, and nobody else may have access"
    except OSError as error:
        problem = f"cannot be opened: {error.strerror}"
    if problem:
        raise ConfigError(Problem(VARIABLE, path, problem, "start the run again"))
    return Path(path)


def write_record(generation: Path, record: FileRecord) -> None:
    """Mark a file as complete. Raises OSError."""
    atomic_io.write(_record_path(generation, record.name), json.dumps(record), mode=0o600)


def forget_file(generation: Path, name: str) -> None:
    """Mark a file as incomplete, before it is overwritten. Raises OSError."""
    _record_path(generation, name).unlink(missing_ok=True)


def remove_others(generation: Path, names: set[str]) -> None:
    """Remove files of earlier attempts that this attempt does not overwrite, because it only writes ``names``."""
    kept = names | {f"{name}{_RECORD}" for name in names}
    # Errors are ignored, because the leftovers only use memory. If it is too little, the snapshot reports
    # that.
    with contextlib.suppress(OSError):
        for entry in os.scandir(generation):
            if entry.name not in kept:
                Path(entry.path).unlink(missing_ok=True)


def forget_all(folder: Path) -> None:
    """Invalidate all snapshots of a node, because a rollback has undone their steps. Raises OSError."""
    # A file without its record is ignored, so only the records are removed.
    for generation in GENERATIONS:
        for path in (folder / generation).glob(f"*{_RECORD}"):
            path.unlink(missing_ok=True)


def records(folder: Path) -> list[tuple[int, FileRecord]]:
    """Return the records of a node's snapshots, each with the number of its generation."""
    numbered_records = []
    for number, generation in enumerate(GENERATIONS):
        paths = sorted((folder / generation).glob(f"*{_RECORD}"))
        for path in paths[:_MOST_RECORDS]:
            record = _read_record(path)
            if record is not None:
                numbered_records.append((number, record))
    return numbered_records


def newest_step(environment: Mapping[str, str]) -> int:
    """Return the newest step that has a file on this node, or -1. Its snapshot may be incomplete on other nodes."""
    path = environment.get(VARIABLE)
    if not path:
        return -1
    steps = [record.step for _, record in records(Path(path))]
    return max(steps, default=-1)


def manifest_folders(environment: Mapping[str, str]) -> list[tuple[int, Path]]:
    """Return the steps whose manifest this node has, each with the folder that contains it."""
    path = environment.get(VARIABLE)
    if not path:
        return []
    steps_and_folders = []
    for number, record in records(Path(path)):
        if record.name == MANIFEST:
            generation = Path(path) / GENERATIONS[number]
            steps_and_folders.append((record.step, generation))
    return steps_and_folders


def find_damage(generation: Path, record: FileRecord) -> str:
    """Read a file completely and compare its hash. Return a description of the damage, or ""."""
    stored = files.TensorFile(record.name, record.bytes, record.sha256)
    return files.find_damage(generation, stored)


def loading_folder(folder: Path, rank: int) -> Path:
    """Create the empty folder from which a rank loads. Raises OSError."""
    path = folder / f"{_LOADING}{rank}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    return path


def remove_loading_folders(folder: Path) -> None:
    """Remove the folders from which ranks of a killed attempt have loaded."""
    for path in folder.glob(f"{_LOADING}*"):
        shutil.rmtree(path, ignore_errors=True)


def used_bytes(folder: Path) -> int:
    """Return the bytes that a node's snapshots occupy now."""
    total = 0
    for generation in GENERATIONS:
        # Another rank of the node may remove a file or folder during the listing.
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder / generation):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    total += status.st_size
    return total


def free_bytes(folder: Path) -> int:
    """Return the bytes that snapshots may still occupy: free space of /dev/shm, host memory and cgroup."""
    # /dev/shm may be larger than the memory that is free, and files in it count as memory of the cgroup. The
    # smallest limit applies.
    free = [files.free_bytes(folder)]
    available = limits.host_memory().get("available")
    if available is not None:
        free.append(available)
    limit, used = limits.cgroup_memory()
    if limit:
        free.append(max(0, limit - used))
    return min(free)


def _record_path(generation: Path, name: str) -> Path:
    return generation / f"{name}{_RECORD}"


def _read_record(path: Path) -> FileRecord | None:
    """Return a record, or None if it cannot be read or does not fit its name."""
    try:
        token, step, name, num_bytes, sha256 = json.loads(files.read_small(path))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    # The types of the fields, then the name. ``type`` is stricter than ``isinstance``, which accepts
    # booleans.
    if not isinstance(token, str) or not isinstance(sha256, str):
        return None
    if type(step) is not int or type(num_bytes) is not int or num_bytes < 0:
        return None
    if path.name != f"{name}{_RECORD}":
        return None
    if name != MANIFEST and not name.startswith("rank-"):
        return None
    return FileRecord(token, step, name, num_bytes, sha256)
