"""Protect gloo's sockets from other processes.

Gloo does not authenticate peers. It accepts every connection, keeps it as long as the process group
exists, and aborts the process when there are too many (``accept: Too many open files``).

- If all ranks are on one machine, their sockets are in a network namespace that only this run can reach, if
  the system supports it.
- Otherwise, gloo's listening sockets are blocked as soon as the group exists. By then all pairs of ranks are
  connected, so the run needs no later connection. Gloo has no way to close its listening sockets. So a
  socket filter makes the kernel drop all their packets. Any user may set such a filter (Linux,
  Documentation/networking/filter.rst).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardtrain.utils import private_network
from shardtrain.utils.errors import PeerError, fix_first
from shardtrain.utils.process import meeting_folder

T = TypeVar("T")
MOST_IN_A_FULL_MESH = 128
"""Maximum number of ranks for which all pairs connect when the group is created.

With more ranks, each rank would need too many file descriptors, and the store's work would grow with the
square of the number of ranks. In larger groups, a pair connects on its first use, about 2 log2(ranks) pairs
per rank. Their listening sockets must stay open.
"""
_SO_ATTACH_FILTER = 26
_RETURN = 0x06
"""BPF_RET | BPF_K: return a constant, the number of bytes of a packet to keep. The filter here returns 0."""
_TABLES = ("tcp", "tcp6")


def private(make: Callable[[], T]) -> T:
    """Call a function that creates gloo process groups, and protect their sockets (only on Linux).

    Raises:
        PeerError: the ranks use the machine's loopback interface, and another user has connected to a socket
            before it was protected.
    """
    if private_network.exists():
        return private_network.call_inside(make)
    if sys.platform != "linux" or os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        # With lazy initialization, pairs connect later, so the listeners must accept connections.
        return make()
    # Gloo has no API for its sockets. Compare the listening sockets before and after the call.
    before = _listeners()
    result = make()
    new = {inode: descriptor for inode, descriptor in _listeners().items() if inode not in before}
    for descriptor in new.values():
        _make_deaf(descriptor)
    if new and meeting_folder(os.environ):
        _refuse_others(set(new))
    return result


def _listeners() -> dict[str, int]:
    """Return the descriptors of this process's listening TCP sockets by inode."""
    listeners = {}
    for name in os.listdir("/proc/self/fd"):
        # Skip descriptors that were closed meanwhile, or are not TCP sockets.
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if not link.startswith("socket:["):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                is_tcp = (
                    copy.family in (socket.AF_INET, socket.AF_INET6)
                    and copy.type == socket.SOCK_STREAM
                )
                if is_tcp and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listeners[link[len("socket:[") : -1]] = int(name)
    return listeners


def _make_deaf(descriptor: int) -> None:
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
    program = struct.pack("@HP", 1, ctypes.addressof(instruction))
    with socket.socket(fileno=os.dup(descriptor)) as copy, contextlib.suppress(OSError):
        copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _refuse_others(inodes: set[str]) -> None:
    """Raise PeerError if a socket of another user is connected to one of these listeners."""
    rows: list[list[str]] = []
    for table in _TABLES:
        path = Path("/proc/net", table)
        if path.exists():
            rows += [line.split() for line in path.read_text().splitlines()[1:]]
    # The fields 1, 2, 3, 7 and 9 are local address, remote address, state, user and inode. First find the
    # ports and the user of the listeners, then connections from other users to these ports.
    ours = {}
    for row in rows:
        if row[9] in inodes:
            port = row[1].rpartition(":")[2]
            ours[port] = row[7]
    for row in rows:
        user = ours.get(row[2].rpartition(":")[2])
        if user is not None and row[9] != "0" and row[7] != user:
            raise PeerError(
                fix_first(
                    f"the user with id {row[7]} connected to a socket of this run while its ranks connected",
                    "start again; if it happens again, use a separate container or network namespace",
                    "the run stops before its first step, so the connection had no effect",
                )
            )
