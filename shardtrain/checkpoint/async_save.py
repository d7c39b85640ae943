"""A save in the background of training: one thread per rank writes, and the first rank's commits for all.

Threads use no collective: theirs and the trainer's would meet in another order on each rank. A rank that has written
leaves a marker beside its file, ``rank-00001.done``; the first rank's thread waits for all of them. What came of it the
ranks tell each other in the sum that begins every step (``Saving.pack_flags``), so that all know at the same step.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardtrain.checkpoint import files
from shardtrain.checkpoint.collectives import any_ranks
from shardtrain.checkpoint.manifest import TensorFile
from shardtrain.checkpoint.objects import ObjectPath
from shardtrain.checkpoint.storage import Place
from shardtrain.ops import accelerator
from shardtrain.ops.dtensor import local_tensor
from shardtrain.utils.errors import StorageError

LOOK_SECONDS = 0.5
"""How long the first rank's thread waits between two looks for the markers of the others, at most."""
NOTHING = [0.0, 0.0, 0.0]


class Cancelled(Exception):
    """Another rank could not write: what this one writes is of no use any more."""


class Writing:
    """One save on its way; ``action`` runs in a thread and is given a function that raises when all is cancelled."""

    def __init__(self, step: int, action: Callable[[Callable[[], None]], None], is_export: bool = False) -> None:
        self.step = step
        self.is_export = is_export
        self.seconds = 0.0
        """From the beginning to the end of the action."""
        self._action = action
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._begun = time.monotonic()
        threading.Thread(target=self._run, name="checkpoint-write", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the thread has nothing more to do, well or not."""
        return self._ended.is_set()

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return self.ended and self._error is not None

    def wait(self, seconds: float) -> bool:
        """Wait for the end; gives ``ended``."""
        return self._ended.wait(max(0.0, seconds))

    def cancel(self) -> None:
        """Ask the thread to end soon."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether it has ended because it was asked to."""
        return isinstance(self._error, Cancelled)

    def result(self) -> None:
        """Raise the error that ended the thread, unless it was cancelled."""
        if self._error is not None and not isinstance(self._error, Cancelled):
            raise self._error

    def _run(self) -> None:
        def check_cancelled() -> None:
            if self._cancelled.is_set():
                raise Cancelled

        # An error is kept, and raised by the trainer later: a thread has no caller to raise it to.
        try:
            self._action(check_cancelled)
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - self._begun
        self._ended.set()


def ended_everywhere(writing: Writing, limit_seconds: float | None) -> bool:
    """Wait until the threads of all ranks have ended, or one has failed; False, on all, past a limit (a collective)."""
    deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
    while True:
        # In short turns: another rank may write for longer than a collective waits.
        writing.wait(1.0 if deadline is None else min(1.0, deadline - time.monotonic()))
        late = deadline is not None and time.monotonic() >= deadline
        # Asked in this order, failed before ended, since the thread may end between the two.
        failed = writing.failed
        still_writing, has_failed, is_late = any_ranks([not writing.ended, failed, late])
        if not still_writing:
            return True
        # Where one has failed nothing will come of the others: they are told to end, and waited for without a limit.
        if has_failed:
            writing.cancel()
            deadline = None
        elif is_late:
            return False


class Saving:
    """What ranks tell each other of saves in the sum that begins a step: three numbers, which are added up."""

    def __init__(self) -> None:
        self.writing: Writing | None = None
        self.by_clock = False
        """Whether saves are due by the clock of the first rank, and not by the number of the step."""
        self.is_time: Callable[[], bool] = lambda: False
        """Whether the clock of the first rank says that a save is due; False on all others."""
        self._heard = list(NOTHING)

    def pack_flags(self) -> list[float]:
        """This rank's part: its thread has ended, its thread has failed, it is time for a save."""
        writing = self.writing
        if writing is None:
            return [0.0, 0.0, float(self.is_time())]
        # Failed before ended, as in ``ended_everywhere``.
        failed = writing.failed
        return [float(writing.ended), float(failed), float(self.is_time())]

    def unpack_flags(self, sums: list[float]) -> None:
        """The sums over all ranks."""
        self._heard = list(sums)

    def clear_flags(self) -> None:
        """What was heard is about a save that has been dealt with."""
        self._heard = list(NOTHING)

    def has_ended(self, world_size: int) -> bool:
        """Whether the save in flight has ended on all ranks, or has failed on one: equal on all ranks."""
        ended, failed, _ = self._heard
        return ended >= world_size or failed > 0

    @property
    def due(self) -> bool:
        """Whether the first rank's clock said that it is time: equal on all ranks."""
        return self._heard[2] > 0


class Staging:
    """Host memory that holds a copy of what a rank writes; made once, used again, larger when more is to be held."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer: Tensor | None = None

    def copy(self, tensors: Iterable[Tensor], num_bytes: int) -> memoryview:
        """The bytes of this rank's part of tensors, one after the other; when this returns they may change again."""
        # The old buffer is freed before a larger one is made: two at once may be too much.
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = None
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        begin = 0
        devices = set()
        for tensor in tensors:
            source = local_tensor(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
            self._buffer[begin : begin + source.numel()].copy_(source, non_blocking=self._pinned)
            begin += source.numel()
            devices.add(source.device)
        # Copies to pinned memory are asynchronous: what they read may change only when they are done.
        for device in devices:
            accelerator.finish_stream(device)
        return memoryview(self._buffer.numpy().data)[:begin]


def pieces(data: memoryview, check_cancelled: Callable[[], None]) -> Iterator[memoryview]:
    """Bytes in pieces, as long as it is of use to write them."""
    for begin in range(0, len(data), files.PIECE_BYTES):
        check_cancelled()
        yield data[begin : begin + files.PIECE_BYTES]


def write_marker(folder: Place, rank: int, token: str, file: TensorFile) -> None:
    """Tell the first rank's thread that this rank's file is on disk; ``token`` names this save and no other."""
    path = _marker(folder, rank)
    text = json.dumps([token, file.name, file.bytes, file.sha256])
    if isinstance(path, ObjectPath):
        path.put(text.encode(), new=False)
        return
    # Write under a temporary name and rename: a reader must not see half a marker. Wait for the folder, because
    # this rank may be the first of its node to see it.
    part = path.with_suffix(".part")
    files.write_hashed(part, [memoryview(text.encode())], files.SEEN_SECONDS)
    files.rename(part, path)


def wait_for_marker(folder: Place, rank: int, token: str, check_cancelled: Callable[[], None]) -> TensorFile:
    """The file that a rank has written, once it says so; raises what ``check_cancelled`` raises while it waits."""
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
            raise StorageError(f"cannot write checkpoint {path}: it holds no word of a rank; start again") from error
        time.sleep(pause)
        pause = min(2 * pause, LOOK_SECONDS)


def _marker(folder: Place, rank: int) -> Place:
    return folder / f"rank-{rank:05d}.done"
