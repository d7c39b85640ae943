"""Print a line every few seconds during long work that prints nothing itself."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardtrain.utils import variables
from shardtrain.utils.redact import visible
from shardtrain.utils.units import format_bytes, format_seconds

SECONDS = 5.0
"""Default time between two lines. Shorter work prints none."""
_IO = Path("/proc/self/io")


@dataclass
class _Silence:
    """A period in which this process prints nothing. Consecutive tasks that are each too short for a line share one.

    Attributes:
        since: Start of the period, by ``time.monotonic``.
        until: End of the last task in it.
    """

    since: float
    until: float

    def begin(self) -> float:
        """Return the start of the period for a task that starts now."""
        # A short pause does not end the silence: the previous task printed nothing, either.
        now = time.monotonic()
        return min(self.since, now) if now - self.until < _SAME_SILENCE_SECONDS else now


_SAME_SILENCE_SECONDS = 1.0
"""Longest pause between consecutive tasks. After a longer one, other code may have printed lines."""
_START_SECONDS = 30.0
"""Time before the first task, in which a process imports modules and reads files without printing."""
_silence = _Silence(time.monotonic(), time.monotonic() + _START_SECONDS)


def silent_since() -> float:
    """Return the start of the current silent period, by ``time.monotonic``, for a task that starts now."""
    return _silence.begin()


def not_silent() -> None:
    """Record that a line was printed now. A new silent period starts."""
    _silence.since = _silence.until = time.monotonic()


def last_printed() -> float:
    """Return the time of the last line that this module knows of, by ``time.monotonic``."""
    return _silence.since


_running: list[_Silence] = []
"""Silent periods of the running tasks, outermost first.

Only the innermost prints, because it is the most specific.
"""
_PATIENCE_SECONDS = 0.5
"""Additional delay of a task for each task inside it."""


def _print(line: str) -> None:
    # A line may name a file or a dataset of somebody else.
    print(visible(line, lines=False), file=sys.stderr, flush=True)


@contextmanager
def heartbeat(
    what: str,
    seconds: float | None = None,
    say: Callable[[str], None] = _print,
    progress: Callable[[], str] = str,
) -> Iterator[None]:
    """Report regularly how long the block has taken, and on Linux the bytes it read from and wrote to disk.

    A separate thread prints. Use ``WaitingHeartbeat`` in a process that forks during the block.

    Args:
        what: The task, as text for the line.
        seconds: Silence before a line. Default: ``SHARDTRAIN_HEARTBEAT_SECONDS``, or 5. With 0 nothing is
            printed.
        say: Prints a line. Default: to standard error.
        progress: Returns the progress as text.
    """
    # 0 disables the report.
    seconds = silence_seconds() if seconds is None else seconds
    if not seconds:
        yield
        return
    line = _line(what, progress)
    silence = _Silence(silent_since(), 0)

    def tell() -> float:
        # Other code may have printed a line in the meantime.
        silence.since = max(silence.since, last_printed())
        # Wait half a second longer for each task inside this one, so only the innermost prints.
        outermost_first = [id(one) for one in _running]
        inner = 0
        if id(silence) in outermost_first:
            inner = len(outermost_first) - 1 - outermost_first.index(id(silence))
        limit = seconds + _PATIENCE_SECONDS * inner
        if time.monotonic() >= silence.since + limit:
            not_silent()
            silence.since = last_printed()
            say(line())
        return silence.since + limit - time.monotonic()

    _running.append(silence)
    try:
        with repeat(tell):
            yield
    finally:
        # Tasks of other threads may have been added since.
        _running[:] = [one for one in _running if one is not silence]
        _silence.since = silence.since
        _silence.until = time.monotonic()


@contextmanager
def repeat(action: Callable[[], float]) -> Iterator[None]:
    """Call ``action`` repeatedly in a separate thread. It returns the seconds until its next call.

    The first exception ends the repetition silently.
    """
    done = threading.Event()

    # A failing report must not end the work that it reports.
    def run() -> None:
        with suppress(Exception):
            while not done.wait(max(0.0, action())):
                pass

    thread = threading.Thread(target=run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class WaitingHeartbeat:
    """Heartbeat without a thread, for a loop that waits for other processes. Use as a context manager around it.

    ``seconds`` is the silence before a line, or None if nothing is printed.
    """

    def __init__(self, what: str) -> None:
        self.seconds: float | None = silence_seconds() or None
        self._line = _line(what)
        self._since = silent_since()

    @property
    def timeout(self) -> float | None:
        """Seconds until ``tell`` must be called. None if nothing is printed."""
        # Other code may have printed a line in the meantime.
        since = max(self._since, last_printed())
        return None if self.seconds is None else max(0.0, since + self.seconds - time.monotonic())

    def tell(self) -> None:
        """Print a line if nothing was printed for long enough."""
        if self.timeout == 0:
            not_silent()
            self._since = last_printed()
            _print(self._line())

    def __enter__(self) -> WaitingHeartbeat:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Store the silent period, which the next task may continue."""
        _silence.since = max(self._since, last_printed())
        _silence.until = time.monotonic()


def _line(what: str, progress: Callable[[], str] = str) -> Callable[[], str]:
    """Return a function that formats the current line. Time and bytes count from this call."""
    started = time.monotonic()
    read, written = _disk_bytes()

    def line() -> str:
        now_read, now_written = _disk_bytes()
        # Whole seconds are enough for work that takes several.
        seconds = format_seconds(round(time.monotonic() - started))
        parts = [f"{what}: {', '.join(part for part in (progress(), seconds) if part)}"]
        if now_read > read:
            parts.append(f"{format_bytes(now_read - read)} read")
        if now_written > written:
            parts.append(f"{format_bytes(now_written - written)} written")
        return ", ".join(parts)

    return line


def silence_seconds() -> float:
    """Return the seconds between two lines from ``SHARDTRAIN_HEARTBEAT_SECONDS``. 0 disables them."""
    text = os.environ.get("SHARDTRAIN_HEARTBEAT_SECONDS", "").strip()
    return float(text) if variables.is_seconds(text) else SECONDS


def _disk_bytes() -> tuple[int, int]:
    """Return the bytes this process has read from and written to disk so far, or zeros if the system has no counts."""
    # Only Linux has this file.
    try:
        counts = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return int(counts["read_bytes"]), int(counts["write_bytes"])
    except (OSError, ValueError, KeyError):
        return 0, 0
