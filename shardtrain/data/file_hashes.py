"""What the files of a dataset hold, to the last byte: hashed whole, once, beside the training and never before it.

A dataset that is read while training runs is known by its sizes and samples when a run begins, and prepared shards by
what their index says. Reading all of it first would keep the first step waiting, so one thread of the first rank hashes
the files, and a checkpoint remembers what is known by then. What a file was found to hold is noted in the run's folder,
and holds as long as its size, times and inode are the same.
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

from shardtrain.utils import atomic_io, bounded_reads
from shardtrain.utils.best_effort import BestEffort
from shardtrain.utils.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

NOTES = "data_hashes.json"
AT_ONCE_BYTES = 64 * 2**20
"""Bytes of a dataset up to which it is hashed before the first step, in 0.05 s of a core."""
AT_ONCE_FILES = 1000
"""And files: opening a million small ones keeps the first step waiting for minutes."""
SHARE = 0.25
"""Of one core, which the thread takes at most."""
_UNPROVEN = re.compile(r"(\d{1,20} ){5}\d{1,20}", re.ASCII)
RESTART = 'restart the data with checkpoint.exclude_from_loading=["dataloader"]'
_PIECE_BYTES = 4 * 2**20
_SETTLED_SECONDS = 2.0
"""Age from which the times of a file tell of the next change, whatever the grain of its filesystem's clock."""
_MAX_NOTES_BYTES = 64 * 2**20


@dataclass(frozen=True)
class WholeFile:
    """A file to be hashed: ``name`` within the dataset, the ``option`` that led to it, and what an index says."""

    name: str
    path: str
    option: str
    said: str = ""


class Contents:
    """The files of a run's datasets; of the first rank. Other ranks have none."""

    def __init__(self, files: Sequence[WholeFile] = (), run_folder: Path | None = None) -> None:
        self._files = {file.name: file for file in files}
        self._notes = None if run_folder is None else run_folder / NOTES
        self._known: dict[str, str] = {}
        self._expected: dict[str, str] = {}
        self._unproven: dict[str, str] = {}
        self._noted: Mapping[str, Any] = {}
        self.problem: ConfigError | None = None
        """What the run must stop for: a file holds something else than the checkpoint or its own index says."""
        self._since = ""
        self._step = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._seconds = self._bytes = 0.0
        self._guard = BestEffort("hashing the data files whole")

    def look(self) -> None:
        """Take what earlier starts have found, and hash a small dataset at once; raises ``problem``."""
        # A file whose size, times and inode are those that were noted holds what was noted.
        noted = self._read_notes()
        left = []
        self._noted = noted
        for file in self._files.values():
            with contextlib.suppress(OSError):
                stamp = _stamp(os.stat(file.path))
                note = noted.get(os.path.abspath(file.path))
                if isinstance(note, list) and note[:-1] == stamp and isinstance(note[-1], str):
                    self._found(file, note[-1])
                else:
                    left.append((stamp[0], file))

        # A small dataset is hashed here, before the first step, so that its first checkpoint knows what it holds.
        if 0 < len(left) <= AT_ONCE_FILES and sum(size for size, _ in left) <= AT_ONCE_BYTES:
            for _, file in left:
                self._guard.call(partial(self._hash, file, 1.0), None)
            self._guard.call(self._write_notes, None)
        if self.problem is not None:
            raise self.problem

    def expect(self, contents: Any) -> list[str]:
        """Names of files that are known not to hold what a checkpoint says; what is not known yet is compared later."""
        contents = contents if isinstance(contents, dict) else {}
        self._expected = {name: mark for name, mark in contents.items() if isinstance(mark, str)}
        return sorted(name for name, mark in self._known.items() if self._expected.get(name, mark) != mark)

    def trained_on_other(self, contents: Any, unproven: Any) -> list[str]:
        """Whether steps before a checkpoint were trained on a file of other content, which has been replaced since.

        ``unproven`` is what that checkpoint says of files that were not hashed whole when it was written. Gives option,
        path and the step after which it was so; empty where it was not, or nobody knows: then a warning says so.
        """
        contents = contents if isinstance(contents, dict) else {}
        for name, text in unproven.items() if isinstance(unproven, dict) else ():
            file = self._files.get(name)
            if file is None or not _UNPROVEN.fullmatch(str(text)):
                continue
            step, *stamp = map(int, str(text).split())
            # The same file as then: hashing it now tells what the steps before were trained on.
            with contextlib.suppress(OSError):
                if _stamp(os.stat(file.path)) == stamp:
                    self._unproven[name] = str(text)
                    continue
            # Another file: notes of an earlier start may know what the old one held.
            noted = self._noted.get(os.path.abspath(file.path))
            if not (isinstance(noted, list) and noted[:-1] == stamp):
                logger.warning(
                    "%s=%s has been replaced since steps after %d were trained on it, and was not hashed whole before: "
                    "whether they read what it holds now is not known",
                    file.option,
                    file.path,
                    step,
                )
            elif noted[-1] != contents.get(name, noted[-1]):
                return [file.option, file.path, str(step)]
        return []

    def unproven(self) -> dict[str, str]:
        """For the facts of a checkpoint: files that a checkpoint before it says more of than this run knows yet.

        By name, the step after which it is so, and size, times and inode of the file since then.
        """
        return {name: text for name, text in self._unproven.items() if name not in self._known}

    def start(self, step: int) -> None:
        """Hash what is left while training continues from ``step``; says what is known by samples until then."""
        left = [file for name, file in self._files.items() if name not in self._known]
        if not left or self._thread is not None:
            return
        size = 0
        for file in left:
            with contextlib.suppress(OSError):
                stamp = _stamp(os.stat(file.path))
                size += stamp[0]
                if file.name in self._expected:
                    self._unproven.setdefault(file.name, " ".join(map(str, [step, *stamp])))
        known = "what their index says" if all(file.said for file in left) else "size and samples"
        logger.info(
            "%d data files of %.1f GiB are known by %s until they are hashed whole", len(left), size / 2**30, known
        )
        self._step = step
        self._since = f"steps after {step} of this start were trained on it"
        self._thread = threading.Thread(target=self._run, args=(left,), name="data-hash", daemon=True)
        self._thread.start()

    def record(self) -> dict[str, str]:
        """For the facts of a checkpoint: SHA-256 of each file that is known whole, by name."""
        return {name: mark for name, mark in {**self._expected, **self._known}.items() if name in self._files}

    def close(self) -> None:
        """End the thread; says what it had not come to."""
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join(timeout=5.0)
        left = len(self._files) - len(self._known)
        if left and self.problem is None:
            logger.info("%d of %d data files were not hashed whole when the run ended", left, len(self._files))

    def _run(self, left: Sequence[WholeFile]) -> None:
        self._guard.call(lambda: self._hash_all(left), None)
        self._guard.call(self._write_notes, None)

    def _hash_all(self, left: Sequence[WholeFile]) -> None:
        for file in left:
            self._hash(file, SHARE)
            if self._ended.is_set() or self.problem is not None:
                return
        rate = self._bytes / max(self._seconds, 1e-9) / 1e9
        logger.info("%d data files are hashed whole: %.1f GB at %.1f GB/s", len(left), self._bytes / 1e9, rate)

    def _hash(self, file: WholeFile, share: float) -> None:
        """Hash a file, unless it cannot be read or changes meanwhile: the run's own reading says so."""
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
                    # Rest so long that the thread takes no more than its share of a core; the end of the run wakes it.
                    if share < 1:
                        self._ended.wait(took * (1 / share - 1))
                else:
                    return
                # The hash is of this file only if it was at rest, and the path still leads to it.
                if _stamp(os.fstat(descriptor)) == before == _stamp(os.stat(file.path)):
                    self._found(file, digest.hexdigest())
            finally:
                os.close(descriptor)

    def _found(self, file: WholeFile, sha256: str) -> None:
        self._known[file.name] = sha256
        if file.said and file.said != sha256:
            rule = "does not hold what index.json says of it"
            fix = 'run "shardtrain data prepare" again, or restore it'
        elif self._since and self._expected.get(file.name, sha256) != sha256:
            rule = f"has other content than in the checkpoint that the run continued from, at equal size; {self._since}"
            fix = f"put the old file back and continue with checkpoint.load_step={self._step}, or {RESTART}"
        else:
            return
        self.problem = ConfigError(Problem(file.option, file.path, rule, fix))

    def _read_notes(self) -> Mapping[str, Any]:
        if self._notes is None:
            return {}
        try:
            mark, _, text = bounded_reads.start(self._notes, _MAX_NOTES_BYTES).partition(b"\n")
            # Damaged notes would blame the data, so they carry a checksum.
            notes = json.loads(text) if mark == _mark(text) else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return notes if isinstance(notes, dict) else {}

    def _write_notes(self) -> None:
        """Note what the settled files hold; nothing depends on it but time."""
        if self._notes is None:
            return
        notes: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            for name, mark in self._known.items():
                path = os.path.abspath(self._files[name].path)
                stamp = _stamp(os.stat(path))
                # A file that was changed just now may change again within the same tick of its filesystem's clock.
                if time.time() - max(stamp[1], stamp[2]) / 1e9 > _SETTLED_SECONDS:
                    notes[path] = [*stamp, mark]
            text = json.dumps(notes).encode()
            atomic_io.write(self._notes, _mark(text) + b"\n" + text)


def _mark(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _stamp(found: os.stat_result) -> list[int]:
    """Size, times of change and inode; nobody can set the second time."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
