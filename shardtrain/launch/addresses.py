"""Find the address at which other machines reach this one: the source address of the route to the rendezvous.

A host name is not sufficient. Many hosts cannot resolve their own name, and Debian resolves it to 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

# Request SIOCGIFADDR of Linux: get the IPv4 address of an interface.
_GET_ADDRESS = 0x8915


def toward(host: str, port: int = 1) -> str | None:
    """Return this machine's source address on the route to ``host``, or None without a route.

    Sends no packets: connecting a datagram socket only makes the kernel look up the route.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None


def is_loopback(address: str) -> bool:
    """True if an address always refers to the machine that uses it. False for a name.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.1"), is_loopback("node1")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def meeting(reached: Sequence[str | None]) -> str | None:
    """Return the address at which the other hosts can reach the first host, or None if unknown.

    ``reached`` contains the address at which this machine reached each host. If the address of the
    first host is a loopback address, the first host is this machine. Then return this machine's
    address on the route to another host.

    >>> meeting(["10.0.0.1", "10.0.0.2"]), meeting(["127.0.0.1", "127.0.0.2"]), meeting([None, "10.0.0.2"])
    ('10.0.0.1', '127.0.0.1', None)
    """
    first = reached[0]
    if first is None or not is_loopback(first):
        return first
    if None in reached:
        return None
    others = [one for one in reached[1:] if one and not is_loopback(one)]
    return toward(others[0]) if others else first


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address, or None if there is none. Only Linux is supported."""
    if sys.platform != "linux":
        return None
    if is_loopback(address):
        return "lo"
    if ":" in address:
        # The kernel lists IPv6 addresses as 32 hexadecimal digits without colons.
        digits = ipaddress.ip_address(address).exploded.replace(":", "")
        try:
            lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        return next((line.split()[-1] for line in lines if line.startswith(digits)), None)
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode())
                )
            except OSError:
                # The interface has no address.
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
