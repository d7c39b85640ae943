"""Hash the complete data files in the background, and compare the hashes with those of checkpoints.

Hashing all data would delay the first step. So when a run starts, it identifies a dataset by file sizes and
samples, and prepared shards by the hashes in their index. A thread of rank 0 then hashes the files during
training. Checkpoints record the hashes that are known so far. The run's folder contains a cache of hashes.
The cached hash of a file is valid while the file's size, times and inode are unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardtrain.utils import atomic_io, bounded_reads, checked_json
from shardtrain.utils.best_effort import BestEffort
from shardtrain.utils.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

NOTES = "data_hashes.json"
SMALL_BYTES = 64 * 2**20
"""Datasets up to this size are hashed before the first step, which takes 0.05 s on one core."""
SMALL_FILES = 1000
"""Datasets with more files are hashed in the background, because opening a million files takes minutes."""
MAX_CORE_SHARE = 0.25
"""The thread uses at most this fraction of one core."""
_UNPROVEN = re.compile(r"(\d{1,20} ){5}\d{1,20}", re.ASCII)
RESTART = 'restart the data with checkpoint.exclude_from_loading=["dataloader"]'
_PIECE_BYTES = 4 * 2**20
SETTLED_SECONDS = 2.0
"""Do not trust the timestamps of a file that was changed more recently than this.

The clocks of filesystems are coarse, so it may change again without new timestamps.
"""
_MAX_NOTES_BYTES = 64 * 2**20


@dataclass(frozen=True)
class FileToHash:
    """A file to hash.

    Attributes:
        name: its name in the dataset.
        path: its path.
        option: the option that names the dataset, for messages.
        indexed: its SHA-256 according to an index, or "".
    """

    name: str
    path: str
    option: str
    indexed: str = ""


class Contents:
    """Hashes of a run's data files. Only rank 0 hashes files. On all other ranks this is empty."""

    def __init__(self, files: Sequence[FileToHash] = (), run_folder: Path | None = None) -> None:
        self._files = {file.name: file for file in files}
        self._cache_path = None if run_folder is None else run_folder / NOTES
        self._known: dict[str, str] = {}
        self._expected: dict[str, str] = {}
        self._unproven: dict[str, str] = {}
        self._cached: Mapping[str, Any] = {}
        self.problem: ConfigError | None = None
        """The error with which the run must stop, because a file differs from the checkpoint or its index."""
        self._since = ""
        self._step = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._seconds = self._bytes = 0.0
        self._best_effort = BestEffort("hashing the data files")

    def check_now(self) -> None:
        """Load cached hashes, and hash a small dataset immediately. Raise ``problem`` if there is one."""
        # A cached hash is valid if the file still has the same size, times and inode.
        cached = self._read_cache()
        pending = []
        self._cached = cached
        num_bytes = 0
        for file in self._files.values():
            with contextlib.suppress(OSError):
                stamp = _stamp(os.stat(file.path))
                note = cached.get(os.path.abspath(file.path))
                if isinstance(note, list) and note[:-1] == stamp and isinstance(note[-1], str):
                    self._store(file, note[-1])
                    continue
                pending.append(file)
                num_bytes += stamp[0]

        # Hash a small dataset before the first step. The first checkpoint then contains its hashes.
        if 0 < len(pending) <= SMALL_FILES and num_bytes <= SMALL_BYTES:
            for file in pending:
                self._best_effort.call(partial(self._hash, file, 1.0), None)
            self._best_effort.call(self._write_cache, None)
        if self.problem is not None:
            raise self.problem

    def expect(self, contents: Any) -> list[str]:
        """Set the hashes from a checkpoint, and return the names of files that differ from them.

        A file that has not been hashed yet is compared as soon as the thread has hashed it.
        """
        hashes = contents if isinstance(contents, dict) else {}
        self._expected = {name: mark for name, mark in hashes.items() if isinstance(mark, str)}
        differing = []
        for name, mark in self._known.items():
            if self._expected.get(name, mark) != mark:
                differing.append(name)
        return sorted(differing)

    def find_replaced_file(self, contents: Any, unproven: Any) -> list[str]:
        """Find a file that was replaced after this run had been trained on its old contents.

        If the hash of the old contents is unknown, log a warning instead.

        Args:
            contents: the hashes in the checkpoint.
            unproven: the checkpoint's ``unproven()`` entries.

        Returns:
            Option, path, and the step after which the run was trained on the old contents. An empty list if
            no file was replaced.
        """
        contents = contents if isinstance(contents, dict) else {}
        texts = unproven if isinstance(unproven, dict) else {}
        for name, text in texts.items():
            file = self._files.get(name)
            if file is None or not _UNPROVEN.fullmatch(str(text)):
                continue
            step, *stamp = map(int, str(text).split())
            # If the file is unchanged since that step, its hash can still be computed now.
            with contextlib.suppress(OSError):
                if _stamp(os.stat(file.path)) == stamp:
                    self._unproven[name] = str(text)
                    continue
            # The file has changed. The cache may contain the hash of the old file from an earlier start.
            cached = self._cached.get(os.path.abspath(file.path))
            if not (isinstance(cached, list) and cached[:-1] == stamp):
                logger.warning(
                    "%s=%s has been replaced, and its old contents were not hashed: steps after %d may have been "
                    "trained on other contents",
                    file.option,
                    file.path,
                    step,
                )
            elif cached[-1] != contents.get(name, cached[-1]):
                return [file.option, file.path, str(step)]
        return []

    def unproven(self) -> dict[str, str]:
        """Return, for checkpoints, the files that were not hashed again since the run resumed.

        An earlier checkpoint contains their hash, but they may have been replaced before the run resumed.
        Each value contains the step at which the run resumed, and the file's size,
        times and inode at that time.
        """
        return {name: text for name, text in self._unproven.items() if name not in self._known}

    def start(self, step: int) -> None:
        """Start a thread that hashes the remaining files while training continues from ``step``.

        Log how these files are identified until they are hashed.
        """
        pending = [file for name, file in self._files.items() if name not in self._known]
        if not pending or self._thread is not None:
            return
        size = 0
        for file in pending:
            with contextlib.suppress(OSError):
                stamp = _stamp(os.stat(file.path))
                size += stamp[0]
                if file.name in self._expected:
                    self._unproven.setdefault(file.name, " ".join(map(str, [step, *stamp])))
        identity = "size and samples"
        if all(file.indexed for file in pending):
            identity = "the hashes in their index"
        logger.info(
            "%d data files (%.1f GiB) are identified by %s until their hashes are computed in the background",
            len(pending),
            size / 2**30,
            identity,
        )
        self._step = step
        self._since = f"this start trained on it after step {step}"
        self._thread = threading.Thread(
            target=self._run, args=(pending,), name="data-hash", daemon=True
        )
        self._thread.start()

    def record(self) -> dict[str, str]:
        """Return, for checkpoints, the SHA-256 of each file with a known hash, by name."""
        # Hashes of this run replace those of the checkpoint.
        hashes = {**self._expected, **self._known}
        return {name: mark for name, mark in hashes.items() if name in self._files}

    def close(self) -> None:
        """End the thread, and log the number of files that it has not hashed."""
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join(timeout=5.0)
        pending = len(self._files) - len(self._known)
        if pending and self.problem is None:
            logger.info(
                "%d of %d data files were not hashed when the run ended", pending, len(self._files)
            )

    def _run(self, pending: Sequence[FileToHash]) -> None:
        self._best_effort.call(lambda: self._hash_all(pending), None)
        self._best_effort.call(self._write_cache, None)

    def _hash_all(self, pending: Sequence[FileToHash]) -> None:
        for file in pending:
            self._hash(file, MAX_CORE_SHARE)
            if self._ended.is_set() or self.problem is not None:
                return
        rate = self._bytes / max(self._seconds, 1e-9) / 1e9
        logger.info(
            "%d data files are hashed: %.1f GB at %.1f GB/s", len(pending), self._bytes / 1e9, rate
        )

    def _hash(self, file: FileToHash, share: float) -> None:
        """Hash a file, using the fraction ``share`` of a core.

        If the file cannot be read or changes while it is read, skip it. The data loader reports the problem
        when it reads the file.
        """
        digest = hashlib.sha256()
        with contextlib.suppress(OSError):
            descriptor = atomic_io.without_waiting(file.path, os.O_RDONLY)
            try:
                before = _stamp(os.fstat(descriptor))
                while not self._ended.is_set():
                    began = time.perf_counter()
                    piece = os.read(descriptor, _PIECE_BYTES)
                    digest.update(piece)
                    took = time.perf_counter() - began
                    self._seconds += took
                    self._bytes += len(piece)
                    if not piece:
                        break
                    # Sleep to limit the thread to its share of a core. The end of the run wakes it.
                    if share < 1:
                        self._ended.wait(took * (1 / share - 1))
                else:
                    return
                # The hash is valid only if the file has not changed and the path still leads to it.
                if _stamp(os.fstat(descriptor)) == before == _stamp(os.stat(file.path)):
                    self._store(file, digest.hexdigest())
            finally:
                os.close(descriptor)

    def _store(self, file: FileToHash, sha256: str) -> None:
        """Store the hash of a file. If the index or the checkpoint has a different hash, set ``problem``."""
        self._known[file.name] = sha256
        if file.indexed and file.indexed != sha256:
            rule = "does not match its SHA-256 in index.json"
            fix = 'run "shardtrain data prepare" again, or restore it'
        elif self._since and self._expected.get(file.name, sha256) != sha256:
            rule = f"differs, at equal size, from the file that the checkpoint was trained on; {self._since}"
            fix = f"put the old file back and continue with checkpoint.load_step={self._step}, or {RESTART}"
        else:
            return
        self.problem = ConfigError(Problem(file.option, file.path, rule, fix))

    def _read_cache(self) -> Mapping[str, Any]:
        if self._cache_path is None:
            return {}
        try:
            mark, _, text = bounded_reads.start(self._cache_path, _MAX_NOTES_BYTES).partition(b"\n")
            # Verify the cache's checksum, because a damaged cache would make the data look damaged.
            if mark != _mark(text):
                return {}
            notes = checked_json.parse(text, memory_bytes=checked_json.LARGE_MEMORY_BYTES)
        except (OSError, ValueError, RecursionError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def _write_cache(self) -> None:
        """Cache the hashes of files that have not changed recently."""
        if self._cache_path is None:
            return
        notes: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            for name, mark in self._known.items():
                path = os.path.abspath(self._files[name].path)
                stamp = _stamp(os.stat(path))
                # Skip a file that was changed recently. It may change again without new timestamps.
                if time.time() - max(stamp[1], stamp[2]) / 1e9 > SETTLED_SECONDS:
                    notes[path] = [*stamp, mark]
            text = json.dumps(notes).encode()
            atomic_io.write(self._cache_path, _mark(text) + b"\n" + text)


def _mark(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _stamp(status: os.stat_result) -> list[int]:
    """Return a file's size, its times of modification and of change, its inode and its device.

    The time of change is included because users cannot set it.
    """
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
