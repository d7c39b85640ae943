"""Waiting for the ranks of one machine: stop all when one fails, pass signals on, leave nothing running."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

POLL_SECONDS = 0.05
PEERS_SPEAK_SECONDS = 1.0
"""After a first failure: how long the other ranks have to notice it, so that their logs say what they saw."""
PEERS_STOP_SECONDS = 4.0
"""After that: from SIGTERM to SIGKILL. Together they keep the promise that all have stopped within 10 s."""
FINE = (0, 75)
"""Statuses of a rank that are no reason to stop the others: done, and preempted with everything saved."""


class Watch:
    """Waits for child processes, stops all when one fails, and passes signals on."""

    def __init__(self, pids: dict[int, int]) -> None:
        self.pids = pids
        self.statuses: dict[int, int] = {}
        self.ended_at: dict[int, float] = {}
        self.stopped_by_us: set[int] = set()
        self.signal_number = 0

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Pass SIGTERM and SIGINT on to the ranks as SIGTERM; a second one kills them."""

        def handle(number: int, _frame: FrameType | None) -> None:
            self.send(signal.SIGKILL if self.signal_number else signal.SIGTERM)
            self.signal_number = number

        names = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, handle) for number in names}
        try:
            yield
        finally:
            self.send(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each rank that still runs, and remember that its end is our doing."""
        for rank in self.pids.keys() - self.statuses.keys():
            self.stopped_by_us.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def wait(self) -> dict[int, int]:
        """Wait for all ranks; gives rank -> exit status, minus the number of the signal for one that was killed."""
        failed_at = 0.0
        sent: signal.Signals | None = None
        while len(self.statuses) < len(self.pids):
            self._poll()
            now = time.monotonic()
            if not failed_at and any(status not in FINE for status in self.statuses.values()):
                failed_at = now
            elapsed = now - failed_at if failed_at else 0.0
            if sent is None and elapsed > PEERS_SPEAK_SECONDS:
                sent = signal.SIGTERM
                self.send(sent)
            elif sent is signal.SIGTERM and elapsed > PEERS_SPEAK_SECONDS + PEERS_STOP_SECONDS:
                sent = signal.SIGKILL
                self.send(sent)
            time.sleep(POLL_SECONDS)
        return self.statuses

    def _poll(self) -> None:
        for rank in self.pids.keys() - self.statuses.keys():
            status = exit_status(self.pids[rank])
            if status is not None:
                self.statuses[rank], self.ended_at[rank] = status, time.time()


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
