"""Save in the background of training: one thread per rank writes its file, and rank 0's thread
commits the checkpoint.

The threads use no collectives, because these would interleave with the trainer's in a different
order on each rank. A rank that has written its file adds a marker, whose name begins with
``rank-00001`` and ends with ``.done``. Rank 0's thread waits for all markers. The ranks exchange
the outcome in the all-reduce at the start of every step (``Saving.pack_flags``), so all learn it at
the same step.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain.checkpoint import files
from shardtrain.checkpoint.collectives import any_ranks
from shardtrain.checkpoint.manifest import TensorFile
from shardtrain.checkpoint.objects import ObjectPath, unlink_all
from shardtrain.checkpoint.storage import Place
from shardtrain.ops import accelerator
from shardtrain.ops.dtensor import local_tensor
from shardtrain.utils.errors import StorageError

LOOK_SECONDS = 0.5
"""Longest pause of rank 0's thread between two checks for a marker."""
NOTHING = [0.0, 0.0, 0.0]
_MARKER_NAME = re.compile(
    r"rank-(?P<rank>\d+)_(?P<token>[^_]+)_(?P<bytes>\d+)_(?P<sha256>[^_]*)_(?P<stem>[^_]+)_(?P<ending>[^_]+)_.*\.done"
)


class Cancelled(Exception):
    """Another rank could not write its file, so this rank stops writing."""


class Writing:
    """A save in progress. ``action`` runs in a thread. Its argument is a function that raises if
    the save is cancelled.

    ``seconds`` is the duration of the action, once it has ended.
    """

    def __init__(
        self,
        step: int,
        action: Callable[[Callable[[], None]], None],
        is_export: bool = False,
    ) -> None:
        self.step = step
        self.is_export = is_export
        self.seconds = 0.0
        self._action = action
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._begun = time.monotonic()
        threading.Thread(target=self._run, name="checkpoint-write", daemon=True).start()

    @property
    def ended(self) -> bool:
        """True if the thread has ended, with or without an error."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """True if the thread has ended with an error."""
        return self.ended and self._error is not None

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the thread to end. Return ``ended``."""
        return self._ended.wait(max(0.0, seconds))

    def cancel(self) -> None:
        """Make the thread end at its next check."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """True if the thread has ended because of ``cancel``."""
        return isinstance(self._error, Cancelled)

    def result(self) -> None:
        """Raise the error that ended the thread, unless it was cancelled."""
        if self._error is not None and not isinstance(self._error, Cancelled):
            raise self._error

    def _run(self) -> None:
        def check_cancelled() -> None:
            if self._cancelled.is_set():
                raise Cancelled

        # Store the error. The trainer raises it later with ``result``.
        try:
            self._action(check_cancelled)
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - self._begun
        self._ended.set()


def ended_everywhere(writing: Writing, limit_seconds: float | None) -> bool:
    """Wait until the threads of all ranks have ended (a collective).

    If a thread fails, the other threads are cancelled and awaited without a limit. Return False on all ranks
    if the limit passes.
    """
    deadline = None
    if limit_seconds is not None:
        deadline = time.monotonic() + limit_seconds
    while True:
        # Wait in short intervals, because another rank may write for longer than the timeout of a collective.
        seconds = 1.0
        if deadline is not None:
            seconds = min(seconds, deadline - time.monotonic())
        writing.wait(seconds)
        late = deadline is not None and time.monotonic() >= deadline
        # Read ``failed`` before ``ended``: the thread may end between the two.
        failed = writing.failed
        still_writing, has_failed, is_late = any_ranks([not writing.ended, failed, late])
        if not still_writing:
            return True
        # If a thread has failed, the checkpoint is lost.
        # Cancel the others, and wait for them without a limit.
        if has_failed:
            writing.cancel()
            deadline = None
        elif is_late:
            return False


class Saving:
    """State of saves that ranks exchange in the all-reduce at the start of a step: three flags,
    added over ranks.

    Attributes:
        by_clock: Saves are due by the clock of rank 0 instead of the number of the step.
        is_time: True on rank 0 if a save is due by its clock. False on all other ranks.
    """

    def __init__(self) -> None:
        self.writing: Writing | None = None
        self.by_clock = False
        self.is_time: Callable[[], bool] = lambda: False
        self._sums = list(NOTHING)

    def pack_flags(self) -> list[float]:
        """Return this rank's flags: its thread has ended, its thread has failed, a save is due."""
        writing = self.writing
        if writing is None:
            return [0.0, 0.0, float(self.is_time())]
        # Read ``failed`` before ``ended``, as in ``ended_everywhere``.
        failed = writing.failed
        return [float(writing.ended), float(failed), float(self.is_time())]

    def unpack_flags(self, sums: list[float]) -> None:
        """Store the sums of the flags over all ranks."""
        self._sums = list(sums)

    def clear_flags(self) -> None:
        """Forget the sums, because the save that they belong to has been handled."""
        self._sums = list(NOTHING)

    def has_ended(self, world_size: int) -> bool:
        """True if the save in progress has ended on all ranks, or has failed on any rank. Equal on all ranks."""
        ended, failed, _ = self._sums
        return ended >= world_size or failed > 0

    @property
    def due(self) -> bool:
        """True if a save is due by rank 0's clock. Equal on all ranks."""
        return self._sums[2] > 0


class Staging:
    """Host buffer with a copy of the data that a rank writes. It is reused, and replaced when it is
    too small.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer: Tensor | None = None

    def copy(self, tensors: Iterable[Tensor], num_bytes: int) -> memoryview:
        """Copy this rank's shards of tensors into the buffer and return their bytes, concatenated.

        The tensors may change as soon as this returns.
        """
        # Free the old buffer before allocating a larger one, because memory may not suffice for both.
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = None
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        begin = copy_bytes(tensors, self._buffer, self._pinned)
        return memoryview(self._buffer.numpy().data)[:begin]


def copy_bytes(tensors: Iterable[Tensor], buffer: Tensor, pinned: bool = False) -> int:
    """Copy this rank's shards of tensors into a buffer of bytes, and return the number of bytes.

    The tensors may change as soon as this returns. ``pinned``: the buffer is pinned memory.
    """
    begin = 0
    devices = set()
    for tensor in tensors:
        source = local_tensor(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
        buffer[begin : begin + source.numel()].copy_(source, non_blocking=pinned)
        begin += source.numel()
        devices.add(source.device)
    # Copies to pinned memory are asynchronous. Wait for them before the tensors may change.
    for device in devices:
        accelerator.finish_stream(device)
    return begin


def pieces(data: memoryview, check_cancelled: Callable[[], None]) -> Iterator[memoryview]:
    """Yield ``data`` in pieces, and check for a cancellation before each."""
    for begin in range(0, len(data), files.PIECE_BYTES):
        check_cancelled()
        yield data[begin : begin + files.PIECE_BYTES]


def write_marker(folder: Place, rank: int, token: str, file: TensorFile) -> None:
    """Write the marker by which rank 0's thread learns that this rank's file is on disk.

    ``token`` identifies the save.
    """
    if isinstance(folder, ObjectPath):
        # The name contains all fields, so one listing reads the markers of all ranks. A store may add a
        # suffix before the first dot.
        stem, _, ending = file.name.rpartition(".")
        (folder / f"rank-{rank:05d}_{token}_{file.bytes}_{file.sha256}_{stem}_{ending}_.done").put(
            b"",
            new=False,
        )
        return
    path = _marker(folder, rank)
    text = json.dumps([token, file.name, file.bytes, file.sha256])
    # Rename a complete file, so a reader never sees half a marker. Wait for the folder: on a
    # network filesystem, this node may not see it yet.
    part = path.with_suffix(".part")
    files.write_hashed(part, [memoryview(text.encode())], files.SEEN_SECONDS)
    files.rename(part, path)


def wait_for_markers(
    folder: Place, ranks: Sequence[int], token: str, check_cancelled: Callable[[], None]
) -> list[TensorFile]:
    """Wait for the markers of ranks, remove them, and return the files that the ranks have written, in order.

    ``check_cancelled`` may raise. The requests to an object store do not depend on the number of
    ranks, except that a listing returns a limited number of names per request.
    """
    if not isinstance(folder, ObjectPath):
        return [_wait_for_marker(folder, rank, token, check_cancelled) for rank in ranks]
    pause = 0.05
    while True:
        check_cancelled()
        markers = {}
        paths = []
        for path in folder.list_below():
            marker = _MARKER_NAME.fullmatch(path.name)
            # A marker with another token belongs to an earlier attempt.
            if marker and marker["token"] == token:
                name = f"{marker['stem']}.{marker['ending']}"
                markers[int(marker["rank"])] = TensorFile(
                    name, int(marker["bytes"]), marker["sha256"]
                )
                paths.append(path)
        if set(ranks) <= set(markers):
            unlink_all(paths)
            return [markers[rank] for rank in ranks]
        time.sleep(pause)
        pause = min(2 * pause, LOOK_SECONDS)


def _wait_for_marker(
    folder: Path, rank: int, token: str, check_cancelled: Callable[[], None]
) -> TensorFile:
    path = _marker(folder, rank)
    pause = 0.005
    while True:
        check_cancelled()
        try:
            fields: list[Any] = json.loads(files.read_small(path))
            # A marker with another token belongs to an earlier attempt in the same draft.
            if fields[0] == token:
                path.unlink()
                return TensorFile(str(fields[1]), int(fields[2]), str(fields[3]))
        except OSError as error:
            # The marker does not exist yet, or a network filesystem showed it while it was replaced.
            if error.errno not in files.NOT_SEEN_YET:
                raise
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise StorageError(
                f"cannot write checkpoint {path}: it is not a valid marker of a rank; start again"
            ) from error
        time.sleep(pause)
        pause = min(2 * pause, LOOK_SECONDS)


def _marker(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.done"
