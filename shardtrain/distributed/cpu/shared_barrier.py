"""A barrier for processes that share memory.

A process that arrives early sleeps in a Linux futex until the late ones wake it.

An all-reduce of gloo, used as a barrier within a machine, costs 171 microseconds of CPU time per rank. It
wakes a thread, which writes to a socket and wakes the thread that reads sockets, which wakes the caller.
Here ranks that arrive together need 2 microseconds, and ranks that sleep about 50 (benchmarks/LOG.md).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from shardtrain.distributed import process_group
from shardtrain.utils import process_identity
from shardtrain.utils.errors import PeerError, fix_first

LINE_BYTES = 64
"""Size of each rank's counter: one cache line, because two ranks that write to one line slow each other down."""
_FUTEX_CALL = 202
"""Number of the system call on x86-64."""
_WAIT = 0
_WAKE = 1
_ALL = 2**31 - 1
_CHECK_SECONDS = 1.0
"""How often a waiting rank checks whether the late rank has ended, and whether the timeout has passed."""


class Process(NamedTuple):
    """A rank's process. All fields are zero if this machine does not support the barrier.

    Attributes:
        number: process id.
        namespace: inode of its PID namespace.
        started: start time, in kernel ticks since boot, to detect a reused process id.
    """

    number: int
    namespace: int
    started: int


def own_process() -> Process:
    """Describe this process. All fields are zero if it cannot wait at a barrier."""
    try:
        if not _has_futex():
            return Process(0, 0, 0)
        return Process(os.getpid(), os.stat("/proc/self/ns/pid").st_ino, _started(os.getpid()) or 0)
    except OSError:
        return Process(0, 0, 0)


def can_meet(processes: list[Process]) -> bool:
    """True if the processes can use a barrier: all support futexes and share one PID namespace."""
    namespaces = {process.namespace for process in processes}
    return all(process.number > 0 for process in processes) and len(namespaces) == 1


_begun = 0


def waits_begun() -> int:
    """Return how often this process has waited at a barrier. The watchdog uses it as a sign of progress."""
    return _begun


class Barrier:
    """A barrier for processes that map the same memory.

    Args:
        memory: the shared memory. It begins with ``LINE_BYTES`` zeros per process, for the counters.
        processes: all processes, by rank.
        rank: this process's index in ``processes``.
        limit: returns the timeout in seconds. It is called while waiting, because it may change.
    """

    def __init__(
        self, memory: mmap.mmap, processes: list[Process], rank: int, limit: Callable[[], float]
    ) -> None:
        self._counters = [
            ctypes.c_uint32.from_buffer(memory, LINE_BYTES * index)
            for index in range(len(processes))
        ]
        self._addresses = [ctypes.addressof(counter) for counter in self._counters]
        self._processes = processes
        self._rank = rank
        self._limit = limit
        self._turn = 0
        process_group.more_counters.add(waits_begun)  # the watchdog sees these waits as progress

    def wait(self) -> None:
        """Wait until all ranks have called this function as often as this rank.

        After it returns, this rank sees everything that the others wrote before their calls.

        Raises:
            PeerError: another rank has ended, or did not arrive within ``limit()`` seconds.
        """
        global _begun
        _begun += 1
        self._turn += 1
        # x86 keeps the order of writes. So a process that sees the new counter also sees all earlier
        # writes of this rank, and no memory fence is needed. ARM may reorder them, so ``_has_futex``
        # refuses other processors. Their ranks meet in a collective of gloo instead.
        self._counters[self._rank].value = self._turn % 2**32
        _futex(self._addresses[self._rank], _WAKE, _ALL)
        for rank in range(len(self._processes)):
            if rank != self._rank:
                self._wait_for(rank)

    def _wait_for(self, rank: int) -> None:
        counter = self._counters[rank]
        address = self._addresses[rank]
        waiting_since = 0.0
        while True:
            seen = counter.value
            # The rank has arrived if its counter is at least this rank's turn. Ranks are at most one turn
            # apart, so the comparison modulo 2^32 is safe when counters wrap around.
            if (seen - self._turn) % 2**32 < 2**31:
                return
            # the futex call returns immediately if the counter has changed since it was read above
            if _futex(address, _WAIT, seen, _CHECK_SECONDS) != errno.ETIMEDOUT:
                continue
            # The rank is late: stop waiting if its process has ended, or after the timeout.
            waiting_since = waiting_since or time.monotonic() - _CHECK_SECONDS
            peer = self._processes[rank]
            if _started(peer.number) != peer.started:
                raise PeerError(
                    f"rank {rank} of the ranks that share memory with this one has ended"
                )
            if time.monotonic() - waiting_since >= self._limit():
                problem = f"rank {rank} of the ranks that share memory with this one did not arrive within"
                fix = "see the other logs, or raise comm.train_timeout_seconds"
                raise PeerError(
                    fix_first(
                        f"{problem} {self._limit():g} s", fix, "another rank failed or is late"
                    )
                )


class _Seconds(ctypes.Structure):
    """The C structure timespec."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _futex(address: int, operation: int, value: int, seconds: float | None = None) -> int:
    """Call Linux's futex. Return 0 or the error number.

    ``_WAIT`` sleeps while the counter at ``address`` equals ``value``, at most for ``seconds``. ``_WAKE``
    wakes up to ``value`` processes that sleep there.
    """
    assert _libc is not None
    limit = None
    if seconds is not None:
        nanoseconds = int(seconds % 1 * 1e9)
        limit = ctypes.byref(_Seconds(int(seconds), nanoseconds))
    status = _libc.syscall(
        _FUTEX_CALL, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), limit, None, 0
    )
    if status >= 0:
        return 0
    return ctypes.get_errno()


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


def _has_futex() -> bool:
    # On other processors the system call has another number, or writes may be reordered.
    if _libc is None or platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return False
    counter = ctypes.c_uint32(0)
    return _futex(ctypes.addressof(counter), _WAKE, 1) == 0  # a sandbox may refuse it


def _started(process: int) -> int | None:
    """Return when a process started, in ticks since boot, or None if it has ended."""
    stat = process_identity.read_stat(process)
    return None if stat is None or stat.has_ended else stat.start_ticks
