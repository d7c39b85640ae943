"""Wait for the ranks of one machine, stop all of them when one fails, and forward signals to them."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType

from shardtrain.launch.stop_request import ONE_REQUEST_SECONDS
from shardtrain.utils import stop_signals

POLL_SECONDS = 0.05
PEERS_SPEAK_SECONDS = 2.0
"""Time for other ranks to notice and log a first failure, before they are killed.

SIGTERM would request a save, which is impossible without the failed rank.
"""
NOTHING_TO_SAVE_SECONDS = 5.0
"""Time between a request to stop and SIGKILL, in a run without checkpoints."""
FINE = (0, 75)
"""Exit statuses of a rank that do not stop the others: finished, or preempted after saving."""


class ChildWatch:
    """Wait for child processes, stop all of them when one fails, and forward signals to them.

    Args:
        stopped_seconds: A child that SIGSTOP has stopped for this time is killed, with the status -SIGSTOP. 0
            disables this.
        ends_process: True if this process ends after its children. It then ignores later signals.
    """

    def __init__(
        self,
        grace_seconds: float = NOTHING_TO_SAVE_SECONDS,
        stopped_seconds: float = 0.0,
        ends_process: bool = False,
    ) -> None:
        self._stopped_seconds = stopped_seconds
        self._ends_process = ends_process
        self._grace_seconds = grace_seconds
        self._asked_at = 0.0
        self._interrupted_at = 0.0
        self.signal_number = 0
        self.reason = ""
        """Reason of the request to stop, such as "SIGTERM"; "" without a request."""
        self.begin({})

    @contextlib.contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Forward requests to stop to the ranks while the context is active.

        A second SIGINT kills the ranks. Other repetitions are ignored.
        """

        def handle(number: int, _frame: FrameType | None) -> None:
            now = time.monotonic()
            # Forward only the first request, because the ranks would treat repetitions as new requests.
            if not self.signal_number:
                self.signal_number = number
                self.reason = signal.Signals(number).name
                self._asked_at = now
                self.send(signal.Signals(number))
            if number == signal.SIGINT:
                if self._interrupted_at and now - self._interrupted_at > ONE_REQUEST_SECONDS:
                    self.reason = "a second SIGINT"
                    self.send(signal.SIGKILL)
                self._interrupted_at = self._interrupted_at or now

        before = stop_signals.handle_requests(handle)
        try:
            yield
        finally:
            self.send(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self._ends_process else handler)

    def begin(
        self, pids: dict[int, int], reaped: Callable[[int], int | None] = lambda rank: None
    ) -> None:
        """Watch the given processes (rank -> process ID). If a request to stop arrived earlier,
        send it to them now.

        Args:
            reaped: Returns the exit status of a rank that ended while others were being forked,
                which reaped it.
        """
        self._reaped = reaped
        self.pids = pids
        self.statuses: dict[int, int] = {}
        self.ended_at: dict[int, float] = {}
        self._sent: dict[int, set[int]] = {}
        """Signals that this process has sent to each rank."""
        self._looks_stopped: Counter[int] = Counter()
        self._failed_at = math.inf
        if self.signal_number:
            self.send(signal.Signals(self.signal_number))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each running rank, and record that it may be the cause of the rank's end."""
        for rank in self.pids.keys() - self.statuses.keys():
            self.note_sent(rank, number)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def note_sent(self, rank: int, number: int) -> None:
        """Record a signal that this process has sent to a rank."""
        self._sent.setdefault(rank, set()).add(number)

    def has_caused(self, rank: int, status: int) -> bool:
        """True if a rank may have ended with this status because of a signal of this process.

        False for a rank that another signal killed, even if this process has asked it to stop.
        """
        sent = self._sent.get(rank, set())
        return bool(sent) if status >= 0 else -status in sent

    def wait(self, each_look: Callable[[], object] = lambda: None) -> dict[int, int]:
        """Wait for all ranks and return their exit statuses. For a killed rank
        this is the negative signal number.

        Args:
            each_look: Called every ``POLL_SECONDS``.
        """
        while not self.look():
            each_look()
            time.sleep(POLL_SECONDS)
        return self.statuses

    def look(self, others_have_failed: bool = False) -> bool:
        """Poll the ranks once, and return True if all have ended.

        After a failure or a request to stop, kill the ranks that still run when their time limit has passed.

        Args:
            others_have_failed: True if ranks of other nodes have failed.
        """
        self._poll()
        now = time.monotonic()
        if others_have_failed or any(status not in FINE for status in self.statuses.values()):
            # Record the time of the first failure. From then on, the other
            # ranks may run for only a short time.
            self._failed_at = min(self._failed_at, now)
        no_time = self.signal_number and now - self._asked_at > self._grace_seconds
        if now - self._failed_at > PEERS_SPEAK_SECONDS or no_time:
            self.send(signal.SIGKILL)
        return len(self.statuses) == len(self.pids)

    def _poll(self) -> None:
        for rank in self.pids.keys() - self.statuses.keys():
            try:
                status = self._exit_status(rank)
            except ChildProcessError:
                reaped = self._reaped(rank)
                status = 1 if reaped is None else reaped
            if status is not None:
                self.statuses[rank] = status
                self.ended_at[rank] = time.time()

    def _exit_status(self, rank: int) -> int | None:
        """Return a child's exit status, the negative number of the signal that killed it,
        or None while it runs.
        """
        pid = self.pids[rank]
        if not hasattr(os, "waitid"):
            # On macOS before Python 3.13, ranks are new processes, and subprocess accepts that a process is
            # already reaped.
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                return os.waitstatus_to_exitcode(status)
            return None
        # WNOWAIT leaves the status for PyTorch, which reaps the process in close().
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            self._looks_stopped[rank] = 0
            return None
        if result.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
            if result.si_code == os.CLD_EXITED:
                return result.si_status
            return -result.si_status
        # Count polls instead of seconds, because Ctrl-Z stops this process, too.
        self._looks_stopped[rank] += 1
        if (
            not self._stopped_seconds
            or self._looks_stopped[rank] * POLL_SECONDS < self._stopped_seconds
        ):
            return None
        os.kill(pid, signal.SIGKILL)
        return -signal.SIGSTOP
