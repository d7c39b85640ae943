"""Request to stop this process, by a signal or because its Slurm job is about to end, with reason and deadline.

The trainer checks for a request at points where all ranks can agree, see ``train/shutdown.py``.
``signals.listen`` receives requests, and its thread ends the process when the deadline passes.
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

T = TypeVar("T")

ONE_REQUEST_SECONDS = 0.5
"""SIGINTs within this time are one request: a terminal sends Ctrl-C to all processes,
and the launcher forwards it.
"""
NOT_IN_TIME = float(2**20)
"""Flag of a rank whose remaining time is too short for a save. It is larger than any number of ranks."""
AT_ONCE_SECONDS = 3.0
"""Time for a process without anything to save to write its last log lines."""
RESERVE_SECONDS = 2.0
"""Part of the grace period that is not used, so the process ends before it would be killed."""
RESERVE_FRACTION = 0.1
"""The reserve as a fraction of the grace period. The smaller reserve applies."""
END_OF_JOB = "the end of the Slurm job"
LOOK_SECONDS = 1.0
"""Maximum time until all ranks of a node know that they must stop before the end of the job."""


class Durations:
    """The last hundred durations of one kind of work, in seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=100)

    def add(self, seconds: float) -> None:
        """Record a duration."""
        self._seconds.append(seconds)

    def quantile(self, share: float = 0.95) -> float | None:
        """Return the quantile ``share`` of the durations, or None if there are none.

        For few durations it is the maximum.
        """
        ordered = sorted(self._seconds)
        if ordered:
            return ordered[math.ceil(share * len(ordered)) - 1]
        return None


class Interrupted(BaseException):
    """Raised in the main thread to end a wait for data when a request arrives."""


class StopRequest:
    """State of the request to stop this process: its reason and its deadline.

    Attributes:
        reason: "SIGTERM", "SIGUSR1", ... or "the end of the Slurm job". "" before a request.
        first_step_seconds: Duration of this process's first step, which compiles.
            It is not part of ``steps``.
        assumed_save_seconds: Assumed duration of a save until the first save is measured.
        is_starting: True before the first step, when nothing can be lost and
            the process can end immediately.
        was_starting: True if the request arrived before the first step. The first step may have begun since,
            with a deadline that is too short for a save.
    """

    def __init__(
        self,
        grace_seconds: float = math.inf,
        can_save: bool = True,
        end_time: float | None = None,
    ) -> None:
        """``end_time`` is the end of the job, in seconds since the epoch."""
        self.reason = ""
        self.saves = Durations()
        self.steps = Durations()
        self.first_step_seconds = 0.0
        self.assumed_save_seconds = 0.0
        self.warned_of_grace = False
        self.is_starting = False
        self.was_starting = False
        self.can_save = can_save
        self._grace_seconds = grace_seconds
        self._deadline = math.inf
        self._end = math.inf if end_time is None else time.monotonic() + end_time - time.time()
        self._reading = self._raised = self.closed = False
        self.end_lock = threading.Lock()
        """Acquired, and never released, by the thread that reports how this process ends.

        So there is only one report.
        """
        self.receiver: socket.socket | None = None
        """Kept open without a reader, because Python prints a traceback for
        each signal that it cannot write.
        """

    @property
    def margin_seconds(self) -> float:
        """Time before the end of the job at which to stop.

        It is the sum of two saves and a step (95 % quantiles), and the delay
        until all ranks know of the request.
        """
        save = self.saves.quantile()
        work = 2 * (self.assumed_save_seconds if save is None else save) + (
            self.steps.quantile() or 0.0
        )
        return LOOK_SECONDS + work

    def is_requested(self) -> bool:
        """True if there is a request. The end of the job becomes a request ``margin_seconds`` before it."""
        # Without checkpoints there is no reason to stop before the end of the job.
        job_ends = self.can_save and self._end < math.inf
        if job_ends and not self.reason and time.monotonic() >= self._end - self.margin_seconds:
            self.note(END_OF_JOB)
        return bool(self.reason)

    def remaining_seconds(self) -> float:
        """Seconds until this process must have ended, or infinity before a request."""
        return self._deadline - time.monotonic()

    def flag(self) -> float:
        """Return this rank's flag for the all-reduce at the start of a step.

        The flag is 0 without a request, and 1 with a request. ``NOT_IN_TIME`` is added if a save would not
        fit into the remaining time (95 % quantile of earlier saves).
        """
        if not self.is_requested():
            return 0.0
        # One sum over ranks shows if any rank has a request, and if the time of any rank is too short.
        return 1.0 + NOT_IN_TIME * ((self.saves.quantile() or 0.0) > self.remaining_seconds())

    def read(self, action: Callable[[], T]) -> T | None:
        """Return the result of ``action``, which waits for data, or None if a request interrupts it."""
        try:
            try:
                self._reading = True
                return None if self.is_requested() else action()
            finally:
                self._reading = False
        except Interrupted:
            return None
        except RuntimeError:
            # The signal may also have killed a process that prepares batches.
            if self.is_requested():
                return None
            raise

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        """Signal handler: record the request, and interrupt a wait for data or a run without checkpoints."""
        if self.closed:
            return
        self.note(signal.Signals(number).name)
        # A signal to all processes of a job also ends data workers. PyTorch's
        # SIGCHLD handler would then raise here.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not self.can_save and not self._raised:
            self._raised = True
            raise KeyboardInterrupt(f"{self.reason} (no checkpoints in this run)")
        if self._reading:
            self._reading = (
                False  # once: a second signal must not raise while the first one is on its way out
            )
            raise Interrupted

    def close(self) -> None:
        """Ignore requests and deadlines, after the last step. A second SIGINT
        still ends the process immediately.
        """
        self.closed = True

    def end(self) -> None:
        """Ignore all signals from now on, because the caller reports how this process ends.

        If another thread has already reported the end, this call never returns.
        That thread will exit the process.
        """
        self.close()
        self.end_lock.acquire()

    def note(self, reason: str) -> None:
        """Record a request. Only the first one counts."""
        if self.reason or self.closed:
            return
        grace = self._grace_seconds
        if grace < math.inf:
            grace -= min(RESERVE_SECONDS, RESERVE_FRACTION * grace)
        now = time.monotonic()
        if self.can_save and now >= self._end - self.margin_seconds - LOOK_SECONDS:
            reason = END_OF_JOB  # a rank whose clock is ahead has sent the signal
        self.was_starting = self.is_starting
        self._deadline = min(
            self._end,
            now + (grace if self.can_save and not self.was_starting else AT_ONCE_SECONDS),
        )
        self.reason = reason

    def next_look_seconds(self) -> float:
        """Return the time until the thread must check again."""
        if self.reason and not self.closed:
            return min(max(self.remaining_seconds(), 0.0), 3600.0)
        return LOOK_SECONDS / 2 if self._end < math.inf else 3600.0
