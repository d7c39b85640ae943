"""Which sockets listen, and whose they are, as /proc of Linux tells."""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path

LISTEN = "0A"


def processes_of(root: int) -> set[int]:
    """A process and all that descend from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listeners(pids: set[int]) -> set[tuple[str, int]]:
    """Address in hex and port of the sockets of these processes on which something listens."""
    inodes = set()
    for pid in pids:
        for entry in glob.glob(f"/proc/{pid}/fd/*"):
            with contextlib.suppress(OSError):  # closed since
                inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found
