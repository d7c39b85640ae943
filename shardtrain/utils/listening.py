"""Sockets that listen at one address of this machine, where the name of the rendezvous determines one."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from shardtrain.utils.errors import ConfigError, Problem

LISTEN_ADDRESS = "SHARDTRAIN_LISTEN_ADDR"
"""Environment variable with the address on which the process that serves the rendezvous listens."""


def rendezvous_listener(host: str, port: int) -> socket.socket:
    """Listen where the ranks or nodes meet: at ``SHARDTRAIN_LISTEN_ADDR`` or else at ``host``, as ``open_listener``.

    Raises:
        ConfigError: ``SHARDTRAIN_LISTEN_ADDR`` is not an address of this machine.
        OSError: as ``open_listener``.
    """
    address = os.environ.get(LISTEN_ADDRESS, "")
    if not address:
        return open_listener(host, port)
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        return socket.create_server((address, port), family=family)
    except (ValueError, OSError) as error:
        if getattr(error, "errno", errno.EADDRNOTAVAIL) != errno.EADDRNOTAVAIL:
            raise
        fix = "set it to an IP address of this machine, to 0.0.0.0 for all, or unset it"
        raise ConfigError(
            Problem(LISTEN_ADDRESS, address, "is not an address of this machine", fix, "environment")
        ) from None


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on ``port`` at the address of ``host``, or on all addresses if ``host`` does not determine one.

    A name determines no address if it resolves to several, or to a loopback address: Debian resolves a machine's own
    name to 127.0.1.1, and other machines resolve it otherwise. Neither does an address that this machine does not have,
    such as that of a Kubernetes service or of a port forward.

    Raises:
        OSError: the name does not resolve, or the port is taken.
    """
    host = host.strip("[]")
    resolved = {(family, place) for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    family, place = next(iter(resolved))
    is_literal = place[0] == host
    if len(resolved) == 1 and (is_literal or not ipaddress.ip_address(place[0]).is_loopback):
        try:
            return socket.create_server(place, family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    both = socket.has_dualstack_ipv6()  # as PyTorch's store listens
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
