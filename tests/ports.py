"""A port for a server that another process starts a moment later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A free port of the loopback address, below those that the system hands out by itself.

    A port of the system's own choice may be the client's end of another test's connection by the time it is used.
    """
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    chooser = random.SystemRandom()
    while True:
        port = chooser.randrange(max(1024, first - 16000), first)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
