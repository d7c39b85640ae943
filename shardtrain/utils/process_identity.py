"""Identify a process and its machine by Linux's /proc: process IDs are reused, and containers share host names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """Fields of /proc/PID/stat.

    ``start_ticks`` counts clock ticks since boot. It differs between processes that reuse a process ID.
    """

    state: str
    start_ticks: int

    @property
    def has_ended(self) -> bool:
        """True for a zombie: a process that has exited, but that its parent has not waited for yet."""
        return self.state in ("Z", "X")


def read_stat(pid: int | str = "self") -> ProcessStat | None:
    """Return the state and the start of a process, or None if it does not exist or the system has no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The process name in parentheses may contain spaces, so split only the text after it.
    fields = text.rpartition(")")[2].split()
    return ProcessStat(fields[0], int(fields[19])) if len(fields) > 19 else None


def boot_id() -> str:
    """Return the ID of the machine's current boot, which its containers share.

    Without one, return the host name.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename


def pid_namespace() -> str:
    """Return the PID namespace of this process, or "" if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
