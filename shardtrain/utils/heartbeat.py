"""A line every few seconds while something long runs that has nothing else to say."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardtrain.utils.units import format_bytes, format_seconds

SECONDS = 5.0
"""Between two lines; what is done earlier prints none."""
_IO = Path("/proc/self/io")


@dataclass
class _Silence:
    """How long this process has said nothing: works that follow on each other, each too short for a line, add up."""

    since: float
    """When the silence began; the clock is the one of ``time.monotonic``."""
    until: float
    """When the last of these works ended."""

    def begin(self) -> float:
        """When the silence began in which a work begins at this moment."""
        now = time.monotonic()
        return min(self.since, now) if now - self.until < _SAME_SILENCE_SECONDS else now


_SAME_SILENCE_SECONDS = 1.0
"""Between two works that follow on each other; in a longer time there may have been lines of others."""
_START_SECONDS = 30.0
"""In which a process may import and read files before its first work, and has said nothing."""
_silence = _Silence(time.monotonic(), time.monotonic() + _START_SECONDS)


def silent_since() -> float:
    """When the silence began, by ``time.monotonic``, in which a work begins at this moment."""
    return _silence.begin()


def not_silent() -> None:
    """Say that a line was printed, from which the next silence counts."""
    _silence.since = _silence.until = time.monotonic()


def last_said() -> float:
    """When the last line was printed that this module knows of, by ``time.monotonic``."""
    return _silence.since


_running: list[_Silence] = []
"""Of the works that run, the outermost first. The innermost speaks: it knows best what is being done."""
_PATIENCE_SECONDS = 0.5
"""So much longer does a work wait, for each that it contains."""


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def heartbeat(
    what: str,
    seconds: float | None = None,
    say: Callable[[str], None] = _print,
    far: Callable[[], str] = str,
) -> Iterator[None]:
    """Print to standard error how long ``what`` has taken, and on Linux what it has read from and written to disks.

    ``seconds`` of silence come before a line, without them what ``SHARDTRAIN_HEARTBEAT_SECONDS`` says, where 0 prints
    none. ``say`` takes the lines elsewhere, ``far`` says how far the work is. A thread of its own prints: where this
    process may fork meanwhile and must have one thread alone, see ``WaitingHeartbeat``.
    """
    seconds = asked_seconds() if seconds is None else seconds
    if not seconds:
        yield
        return
    line = _line(what, far)
    silence = _Silence(silent_since(), 0)

    def tell() -> float:
        # Others may have spoken meanwhile.
        silence.since = max(silence.since, last_said())
        # Each work inside of this one makes it wait half a second longer, so that the innermost speaks.
        outermost_first = [id(one) for one in _running]
        inner = 0
        if id(silence) in outermost_first:
            inner = len(outermost_first) - 1 - outermost_first.index(id(silence))
        limit = seconds + _PATIENCE_SECONDS * inner
        if time.monotonic() >= silence.since + limit:
            not_silent()
            silence.since = last_said()
            say(line())
        return silence.since + limit - time.monotonic()

    _running.append(silence)
    try:
        with repeat(tell):
            yield
    finally:
        _running[:] = [one for one in _running if one is not silence]
        _silence.since = silence.since
        _silence.until = time.monotonic()


@contextmanager
def repeat(action: Callable[[], float]) -> Iterator[None]:
    """Call ``action`` on a thread of its own, again after as many seconds as it gives; its first error ends that."""
    done = threading.Event()

    def run() -> None:
        with suppress(Exception):  # a line less
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
    """The same lines from a loop that waits for other processes, without a thread; a context around that loop."""

    def __init__(self, what: str) -> None:
        self.seconds: float | None = asked_seconds() or None
        """Of silence before a line; None where nothing is printed."""
        self._line = _line(what)
        self._since = silent_since()

    @property
    def timeout(self) -> float | None:
        """How long to wait before ``tell`` is called; None where nothing is printed."""
        since = max(self._since, last_said())  # others may have spoken meanwhile
        return None if self.seconds is None else max(0.0, since + self.seconds - time.monotonic())

    def tell(self) -> None:
        """Print a line if nothing was printed for long enough."""
        if self.timeout == 0:
            not_silent()
            self._since = last_said()
            _print(self._line())

    def __enter__(self) -> WaitingHeartbeat:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remember the silence, which the next work continues."""
        _silence.since = max(self._since, last_said())
        _silence.until = time.monotonic()


def _line(what: str, far: Callable[[], str] = str) -> Callable[[], str]:
    """A function that gives the line of this moment; time and bytes count from now."""
    started = time.monotonic()
    read, written = _disk_bytes()

    def line() -> str:
        now_read, now_written = _disk_bytes()
        seconds = format_seconds(round(time.monotonic() - started))
        parts = [f"{what}: {', '.join(part for part in (far(), seconds) if part)}"]
        if now_read > read:
            parts.append(f"{format_bytes(now_read - read)} read")
        if now_written > written:
            parts.append(f"{format_bytes(now_written - written)} written")
        return ", ".join(parts)

    return line


def asked_seconds() -> float:
    """Seconds between two lines, as ``SHARDTRAIN_HEARTBEAT_SECONDS`` says; 0 where none are wanted."""
    text = os.environ.get("SHARDTRAIN_HEARTBEAT_SECONDS", "").strip()
    try:
        seconds = float(text or SECONDS)
    except ValueError:
        seconds = math.nan
    if math.isfinite(seconds) and seconds >= 0:
        return seconds
    print(f"SHARDTRAIN_HEARTBEAT_SECONDS={text!r} is not a number of seconds; using {SECONDS:g}", file=sys.stderr)
    return SECONDS


def _disk_bytes() -> tuple[int, int]:
    """Bytes that this process has had read from and written to disks so far; 0 where the system does not count."""
    try:
        counts = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return int(counts["read_bytes"]), int(counts["write_bytes"])
    except (OSError, ValueError, KeyError):
        return 0, 0
