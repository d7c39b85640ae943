"""Find a free port for a server that another process starts later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a free port of the loopback address, below the range of ephemeral ports.

    An ephemeral port may become the client port of another connection before the server uses it.
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
