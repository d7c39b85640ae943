"""A rendezvous listens on the address of its endpoint if this machine has it, and on all addresses otherwise."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

import pytest

from shardtrain.utils import listening
from shardtrain.utils.errors import ConfigError

ALL = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Patch name resolution to return these addresses for every name."""
    places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(listening.socket, "getaddrinfo", lambda *_, **__: places)


# resolved addresses, and the address to listen on; no machine has 192.0.2.1 (RFC 5737)
NAMES = {
    "one address": (["0.0.0.0"], "0.0.0.0"),
    "a loopback address, which other machines resolve otherwise": (["127.0.1.1"], ALL),
    "two addresses": (["127.0.0.1", "0.0.0.0"], ALL),
    "an address of a service": (["192.0.2.1"], ALL),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_host_name_with_one_local_address_is_accepted(case, monkeypatch):
    addresses, expected = NAMES[case]
    resolve(monkeypatch, *addresses)
    with listening.open_listener("node1", 0) as listener:
        assert listener.getsockname()[0] == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "[::1]", "0:0:0:0:0:0:0:1"])
def test_an_ip_address_is_listened_on(host):
    with listening.open_listener(host, 0) as listener:
        assert ipaddress.ip_address(listener.getsockname()[0]) == ipaddress.ip_address(
            host.strip("[]")
        )


def test_the_variable_replaces_the_address_of_the_rendezvous(monkeypatch):
    monkeypatch.setenv(listening.LISTEN_ADDRESS, "127.0.0.9")
    with listening.rendezvous_listener("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.9"


@pytest.mark.parametrize("value", ["192.0.2.1", "2001:db8::1", "fe80::1%nothing"])
def test_an_address_of_another_machine_is_rejected(value, monkeypatch):
    monkeypatch.setenv(listening.LISTEN_ADDRESS, value)
    with pytest.raises(
        ConfigError,
        match=f"SHARDTRAIN_LISTEN_ADDR.*{value}.*is not an address of this machine; set",
    ):
        listening.rendezvous_listener("127.0.0.1", 0)


@pytest.mark.parametrize("value", ["node1", "eth0", "127.0.0.1:29500", "[]", "1"])
def test_a_listen_address_that_is_not_an_ip_address_is_rejected(value, monkeypatch):
    monkeypatch.setenv(listening.LISTEN_ADDRESS, value)
    message = re.escape(f'SHARDTRAIN_LISTEN_ADDR="{value}" must be an IP address; set it to')
    with pytest.raises(ConfigError, match=message):
        listening.listen_address()


@pytest.mark.parametrize("value", ["[::1]", " ::1 ", "0:0:0:0:0:0:0:1"])
def test_each_spelling_of_a_listen_address_is_accepted(value, monkeypatch):
    monkeypatch.setenv(listening.LISTEN_ADDRESS, value)
    with listening.rendezvous_listener("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


def test_a_machine_without_ipv6_rejects_an_ipv6_address(monkeypatch):
    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setenv(listening.LISTEN_ADDRESS, "::1")
    monkeypatch.setattr(listening.socket, "create_server", refuse)

    with pytest.raises(ConfigError, match="is not an address of this machine"):
        listening.rendezvous_listener("127.0.0.1", 0)


def test_a_port_that_is_taken_is_an_error():
    with listening.open_listener("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        listening.open_listener("127.0.0.1", first.getsockname()[1])
