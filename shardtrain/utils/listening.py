"""Sockets of the rendezvous. They listen on one address of this machine if its host name resolves to only one."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from shardtrain.utils.errors import ConfigError, Problem

LISTEN_ADDRESS = "SHARDTRAIN_LISTEN_ADDR"
"""Environment variable with the address on which the process that serves the rendezvous listens."""
_FIX = "set it to an IP address of this machine, to 0.0.0.0 for all, or unset it"
# bind() reports an address of another machine, and socket() a family such as IPv6 that is disabled here
_NOT_OF_THIS_MACHINE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def listen_address() -> str:
    """Return the address in ``SHARDTRAIN_LISTEN_ADDR`` without brackets, or "" if the variable is not set.

    Raises:
        ConfigError: the value is not an IP address.
    """
    value = os.environ.get(LISTEN_ADDRESS, "").strip()
    address = value.strip("[]")
    if value and not _is_ip_address(address):
        raise ConfigError(
            Problem(
                LISTEN_ADDRESS,
                value,
                rule="must be an IP address",
                fix=_FIX,
                where="environment",
            )
        )
    return address


def rendezvous_listener(host: str, port: int) -> socket.socket:
    """Listen where the ranks or nodes meet: at ``SHARDTRAIN_LISTEN_ADDR`` or else at ``host``, as ``open_listener``.

    Raises:
        ConfigError: ``SHARDTRAIN_LISTEN_ADDR`` is not an address of this machine.
        OSError: as ``open_listener``.
    """
    address = listen_address()
    if not address:
        return open_listener(host, port)
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        # an IPv6 address with the name of an interface that does not exist does not even resolve
        if error.errno not in (*_NOT_OF_THIS_MACHINE, socket.EAI_NONAME):
            raise
        raise ConfigError(
            Problem(
                LISTEN_ADDRESS,
                address,
                rule="is not an address of this machine",
                fix=_FIX,
                where="environment",
            )
        ) from None


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on ``port`` at the address of ``host``, or on all addresses if ``host`` does not determine one.

    A name determines no address if it resolves to several, or to a loopback address: Debian resolves a
    machine's own name to 127.0.1.1, and other machines resolve it otherwise. Neither does an address that
    this machine does not have, such as that of a Kubernetes service or of a port forward.

    Raises:
        OSError: the name does not resolve, or the port is taken.
    """
    host = host.strip("[]")
    # A set, because a name may resolve to the same address several times.
    resolved = set()
    for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        resolved.add((family, place))
    family, place = next(iter(resolved))
    is_determined = _is_ip_address(host) or not ipaddress.ip_address(place[0]).is_loopback
    if len(resolved) == 1 and is_determined:
        try:
            return socket.create_server(place, family=family)
        except OSError as error:
            if error.errno not in _NOT_OF_THIS_MACHINE:
                raise
    # Listen on IPv4 and IPv6, as PyTorch's TCPStore does.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)


def _is_ip_address(text: str) -> bool:
    """True for an IP address in any spelling, such as ``0:0:0:0:0:0:0:1``. False for a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
