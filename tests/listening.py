"""Find listening sockets of processes in Linux's /proc."""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path

LISTEN = "0A"


def processes_of(root: int) -> set[int]:
    """Return the ids of a process and all its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except (OSError, ValueError, IndexError):
                continue
    pids = {root}
    while children := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= children
    return pids


def listeners(pids: set[int]) -> set[tuple[str, int]]:
    """Return the address, in hexadecimal, and port of each listening socket of these processes."""
    inodes = set()
    for pid in pids:
        for entry in glob.glob(f"/proc/{pid}/fd/*"):
            with contextlib.suppress(OSError):  # closed meanwhile
                inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                addresses.add((address, int(port, 16)))
    return addresses
