"""A request to stop this process, by a signal or the end of its Slurm job, with its reason and deadline.

The trainer asks at points where all ranks can agree; see ``train/shutdown.py``. ``signals.listen`` takes the requests,
and its thread keeps the time that is left, and ends the process when that is over.
"""

from __future__ import annotations

import math
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from shardtrain.launch.run_ends import REQUESTS

T = TypeVar("T")

GRACEFUL = tuple(getattr(signal, name) for name in REQUESTS if hasattr(signal, name))
"""Signals of ``REQUESTS`` that this system supports."""
ONE_REQUEST_SECONDS = 0.5
"""SIGINTs closer to each other are one: Ctrl-C goes to all processes of a terminal, and a launcher passes it on."""
NOT_IN_TIME = float(2**20)
"""Added by a rank whose time is too short for a save; ranks are fewer than this."""
AT_ONCE_SECONDS = 3.0
"""What a process has for its last lines where there is nothing to save."""
RESERVE_SECONDS = 2.0
"""Kept back of the grace: we want to be gone before somebody ends us."""
RESERVE_FRACTION = 0.1
"""The same as a share of the grace; the smaller of both is kept back."""
END_OF_JOB = "the end of the Slurm job"
LOOK_SECONDS = 1.0
"""The longest from the moment at which a rank should stop for the end of its job until all of its node know."""


class Durations:
    """The last hundred durations of one kind of work, in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=100)

    def add(self, seconds: float) -> None:
        """Note how long one took."""
        self._seconds.append(seconds)

    def quantile(self, share: float = 0.95) -> float | None:
        """Return what this share of the durations did not exceed: the longest of a few, None before the first."""
        ordered = sorted(self._seconds)
        return ordered[math.ceil(share * len(ordered)) - 1] if ordered else None


class Interrupted(BaseException):
    """Leaves a wait for data, in the main thread, when a request arrives."""


class StopRequest:
    """Whether this process has been asked to stop, why, and how long it has."""

    def __init__(self, grace_seconds: float = math.inf, can_save: bool = True, end_time: float | None = None) -> None:
        """``end_time`` is when the job ends, in seconds since the epoch."""
        self.reason = ""
        """SIGTERM, SIGUSR1, ... or "the end of the Slurm job"; empty before a request."""
        self.saves = Durations()
        self.steps = Durations()
        self.first_step_seconds = 0.0
        """Of the first step of this process, which is not among ``steps``: it compiles and warms up."""
        self.assumed_save_seconds = 0.0
        """Stands for the duration of a save before the first one has been measured."""
        self.warned_of_grace = False
        self.is_starting = False
        """Before the first step, nothing can be lost. A rank may wait for peers that are gone: it ends soon."""
        self.can_save = can_save
        self._grace_seconds = grace_seconds
        self._deadline = math.inf
        self._end = math.inf if end_time is None else time.monotonic() + end_time - time.time()
        self._reading = self._raised = self.closed = False
        self.end_lock = threading.Lock()
        """Acquired by the thread that reports how this process ends. Never released, so there is only one report."""
        self.receiver: socket.socket | None = None
        """Kept open when nobody reads any more: Python would print a trace for each signal that it cannot write."""

    @property
    def margin_seconds(self) -> float:
        """How long before the end of the job to stop: two saves and a step, as 95 of 100 took, once all know of it."""
        save = self.saves.quantile()
        work = 2 * (self.assumed_save_seconds if save is None else save) + (self.steps.quantile() or 0.0)
        return LOOK_SECONDS + work

    def asked(self) -> bool:
        """Whether a request has come; the end of the job is one when ``margin_seconds`` are left."""
        # without checkpoints there is nothing to stop early for: the job takes the run to its end
        job_ends = self.can_save and self._end < math.inf
        if job_ends and not self.reason and time.monotonic() >= self._end - self.margin_seconds:
            self.note(END_OF_JOB)
        return bool(self.reason)

    def remaining_seconds(self) -> float:
        """Seconds until this process must have gone; infinite before a request."""
        return self._deadline - time.monotonic()

    def flag(self) -> float:
        """What this rank adds to the reduction that begins a step: 0, 1 for a request, more where a save is too late.

        A save is too late when the slowest of the earlier ones would not fit; before the first nobody knows.
        """
        if not self.asked():
            return 0.0
        # one sum tells both: whether any rank was asked, and whether for any it is too late
        return 1.0 + NOT_IN_TIME * ((self.saves.quantile() or 0.0) > self.remaining_seconds())

    def read(self, action: Callable[[], T]) -> T | None:
        """The result of a wait for data, or None where a request ends it, wherever ``action`` is by then."""
        try:
            try:
                self._reading = True
                return None if self.asked() else action()
            finally:
                self._reading = False
        except Interrupted:
            return None
        except RuntimeError:
            # a process that prepares batches may get the signal too, and die of it
            if self.asked():
                return None
            raise

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        """Signal handler in the main thread: note the request, and end a wait for data or a run without
        checkpoints."""
        if self.closed:
            return
        self.note(signal.Signals(number).name)
        # who signals every process of a job ends those that prepare data, and PyTorch's handler would raise here
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not self.can_save and not self._raised:
            self._raised = True
            raise KeyboardInterrupt(f"{self.reason} (no checkpoints in this run)")
        if self._reading:
            self._reading = False  # once: a second signal must not raise while the first one is on its way out
            raise Interrupted

    def close(self) -> None:
        """Ignore requests and deadlines from the last step on. A second SIGINT still ends the process at once."""
        self.closed = True

    def end(self) -> None:
        """Ignore all signals from now on, because the caller reports how this process ends.

        If another thread has already reported an end, this call never returns. That thread will exit the process.
        """
        self.close()
        self.end_lock.acquire()

    def note(self, reason: str) -> None:
        """Note a request; only the first counts."""
        if self.reason or self.closed:
            return
        grace = self._grace_seconds
        grace -= min(RESERVE_SECONDS, RESERVE_FRACTION * grace) if grace < math.inf else 0.0
        now = time.monotonic()
        if self.can_save and now >= self._end - self.margin_seconds - LOOK_SECONDS:
            reason = END_OF_JOB  # a rank whose clock was ahead has told us of it by a signal
        self._deadline = min(self._end, now + (grace if self.can_save and not self.is_starting else AT_ONCE_SECONDS))
        self.reason = reason

    def next_look_seconds(self) -> float:
        """When the thread should look again."""
        if self.reason and not self.closed:
            return min(max(self.remaining_seconds(), 0.0), 3600.0)
        return LOOK_SECONDS / 2 if self._end < math.inf else 3600.0
