"""A barrier of processes that share memory: who comes early sleeps in Linux's futex, and the last one wakes it.

An all-reduce of gloo between ranks of a machine wakes a thread of its own, writes to a socket, wakes the thread that
reads sockets, and that one the caller: 171 microseconds of CPU time for each rank. Here ranks that come at once need 2,
and those that sleep some 50 (docs/performance_cpu.md).
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
"""Of the memory, for each rank's counter: a line of the processor's cache, so that no two ranks write the same one."""
_CALL = 202
_WAIT = 0
_WAKE = 1
_ALL = 2**31 - 1
_CHECK_SECONDS = 1.0
"""After which a rank that waits looks whether the other one still runs, and whether the time limit has passed."""


class Process(NamedTuple):
    """A rank's process: its number, in which namespace of numbers, and when it started, in ticks of the kernel.

    All zero where this machine has no such barrier.
    """

    number: int
    namespace: int
    started: int


def own_process() -> Process:
    """This process, or zeros where it cannot wait at such a barrier."""
    try:
        if not _has_futex():
            return Process(0, 0, 0)
        return Process(os.getpid(), os.stat("/proc/self/ns/pid").st_ino, _started(os.getpid()) or 0)
    except OSError:
        return Process(0, 0, 0)


def can_meet(processes: list[Process]) -> bool:
    """Whether processes can wait for each other: all have futexes, and one namespace tells whether they run."""
    return all(process.number > 0 for process in processes) and len({process.namespace for process in processes}) == 1


_begun = 0


def waits_begun() -> int:
    """How often this process has come to a barrier: it grows while ranks exchange by shared memory."""
    return _begun


class Barrier:
    """Of the processes that have mapped ``memory``, which begins with zeros: ``LINE_BYTES`` for each."""

    def __init__(self, memory: mmap.mmap, processes: list[Process], rank: int, limit: Callable[[], float]) -> None:
        self._counters = [ctypes.c_uint32.from_buffer(memory, LINE_BYTES * index) for index in range(len(processes))]
        self._addresses = [ctypes.addressof(counter) for counter in self._counters]
        self._processes = processes
        self._rank = rank
        self._limit = limit
        self._turn = 0
        process_group.more_counters.add(waits_begun)  # the watchdog sees these waits as progress

    def wait(self) -> None:
        """Return once all have called this as often as this rank: then what they wrote before can be read.

        Raises:
            PeerError: another rank has ended, or did not come within ``limit()`` seconds.
        """
        global _begun
        _begun += 1
        self._turn += 1
        # x86 shows a process's writes to others in their order: who sees the counter sees what was written before it
        self._counters[self._rank].value = self._turn % 2**32
        _futex(self._addresses[self._rank], _WAKE, _ALL)
        for rank in range(len(self._processes)):
            if rank != self._rank:
                self._wait_for(rank)

    def _wait_for(self, rank: int) -> None:
        counter = self._counters[rank]
        address = self._addresses[rank]
        since = 0.0
        while True:
            seen = counter.value
            # ranks are at most one turn apart; counters begin again at 2^32
            if (seen - self._turn) % 2**32 < 2**31:
                return
            # returns at once where the counter is no longer what was seen
            if _futex(address, _WAIT, seen, _CHECK_SECONDS) != errno.ETIMEDOUT:
                continue
            since = since or time.monotonic() - _CHECK_SECONDS
            if _started(self._processes[rank].number) != self._processes[rank].started:
                raise PeerError(f"rank {rank} of those that share memory with this one has ended")
            if time.monotonic() - since >= self._limit():
                raise PeerError(
                    fix_first(
                        f"rank {rank} of those that share memory with this one did not come within {self._limit():g} s",
                        "see the other logs, or raise comm.train_timeout_seconds",
                        "another rank failed or is late",
                    )
                )


class _Seconds(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _futex(address: int, operation: int, value: int, seconds: float | None = None) -> int:
    """Sleep while a counter has a value, or wake those who do; 0, or the error's number."""
    assert _libc is not None
    limit = None if seconds is None else ctypes.byref(_Seconds(int(seconds), int(seconds % 1 * 1e9)))
    done = _libc.syscall(_CALL, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), limit, None, 0)
    return 0 if done >= 0 else ctypes.get_errno()


_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


def _has_futex() -> bool:
    # elsewhere the call has another number, or writes may be seen in another order
    if _libc is None or platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return False
    counter = ctypes.c_uint32(0)
    return _futex(ctypes.addressof(counter), _WAKE, 1) == 0  # a sandbox may refuse it


def _started(process: int) -> int | None:
    """Return when a process started, in ticks since boot, or None if it has ended."""
    stat = process_identity.read_stat(process)
    return None if stat is None or stat.has_ended else stat.start_ticks
