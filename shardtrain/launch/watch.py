"""Waiting for the ranks of one machine: stop all when one fails, pass signals on, leave nothing running."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from shardtrain.resilience.stop_request import GRACEFUL, ONE_REQUEST_SECONDS

POLL_SECONDS = 0.05
PEERS_SPEAK_SECONDS = 2.0
"""After a first failure: how long the other ranks have to notice it, so that their logs say what they saw. Then they
are killed: SIGTERM would ask them to save, and a rank is missing."""
NOTHING_TO_SAVE_SECONDS = 5.0
"""From a request to stop to SIGKILL, in a run without checkpoints."""
FINE = (0, 75)
"""Statuses of a rank that are not a reason to stop the others: done, and preempted with everything saved."""


class Watch:
    """Waits for child processes, stops all when one fails, and passes signals on."""

    def __init__(self, grace_seconds: float = NOTHING_TO_SAVE_SECONDS) -> None:
        self.pids: dict[int, int] = {}
        self._reaped: Callable[[int], int | None] = lambda rank: None
        self._grace_seconds = grace_seconds
        self._asked_at = 0.0
        self._interrupted_at = 0.0
        self.statuses: dict[int, int] = {}
        self.ended_at: dict[int, float] = {}
        self.stopped_by_us: set[int] = set()
        self.signal_number = 0

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Pass requests to stop on to the ranks; a second SIGINT kills them, other repetitions say nothing new."""

        def handle(number: int, _frame: FrameType | None) -> None:
            now = time.monotonic()
            # only the first request is passed on: others of the same kind would be new ones to the ranks
            if not self.signal_number:
                self.signal_number = number
                self._asked_at = now
                self.send(signal.Signals(number))
            if number == signal.SIGINT:
                if self._interrupted_at and now - self._interrupted_at > ONE_REQUEST_SECONDS:
                    self.send(signal.SIGKILL)
                self._interrupted_at = self._interrupted_at or now

        # which is how nohup asks for it
        names = [n for n in GRACEFUL if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in names}
        try:
            yield
        finally:
            self.send(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)

    def begin(self, pids: dict[int, int], reaped: Callable[[int], int | None] = lambda rank: None) -> None:
        """Watch these processes, by rank; a request that came before they were there reaches them now.

        ``reaped`` gives the status of a rank that ended while others were still being forked, which reaps it.
        """
        self._reaped = reaped
        self.pids = pids
        self.statuses = {}
        self.ended_at = {}
        self.stopped_by_us = set()
        if self.signal_number:
            self.send(signal.Signals(self.signal_number))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each rank that still runs, and remember that its end is our doing."""
        for rank in self.pids.keys() - self.statuses.keys():
            self.stopped_by_us.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def wait(self) -> dict[int, int]:
        """Wait for all ranks; gives rank -> exit status, minus the number of the signal for one that was killed."""
        failed_at = math.inf
        while len(self.statuses) < len(self.pids):
            self._poll()
            now = time.monotonic()
            if any(status not in FINE for status in self.statuses.values()):
                # the moment of the first failure: the others get a little time from then on
                failed_at = min(failed_at, now)
            no_time = self.signal_number and now - self._asked_at > self._grace_seconds
            if now - failed_at > PEERS_SPEAK_SECONDS or no_time:
                self.send(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        return self.statuses

    def _poll(self) -> None:
        for rank in self.pids.keys() - self.statuses.keys():
            try:
                status = exit_status(self.pids[rank])
            except ChildProcessError:
                found = self._reaped(rank)
                status = 1 if found is None else found
            if status is not None:
                self.statuses[rank] = status
                self.ended_at[rank] = time.time()


def exit_status(pid: int) -> int | None:
    """How a child ended: its status, minus the number of the signal that killed it, or None while it runs."""
    if not hasattr(os, "waitid"):
        # macOS before Python 3.13; ranks are fresh processes there, and subprocess copes with one already reaped
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    # WNOWAIT leaves the status for PyTorch, which reaps the process in close()
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
