"""Hosts of an ssh launch: a list or a hostfile in DeepSpeed's format, with filters for hosts and devices."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from shardtrain.config.rules.launch_rules import HOST
from shardtrain.config.schema.launch_options import Launch
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class Host:
    """A host: its name and, optionally, user, port, number of ranks and visible devices."""

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    devices: tuple[int, ...] | None = None

    @property
    def address(self) -> str:
        """Destination for ssh: USER@HOST or HOST."""
        return f"{self.user}@{self.name}" if self.user else self.name

    @property
    def label(self) -> str:
        """Prefix of the host's output lines: HOST:PORT or HOST."""
        return f"{self.name}:{self.port}" if self.port else self.name


def chosen(launch: Launch, requested_nodes: int | None) -> list[Host]:
    """Return the hosts of a launch in order, at most the first ``requested_nodes``.

    Raises:
        ConfigError: there are no hosts or too few, the hostfile cannot be read, or the hosts have different
            numbers of ranks.
    """
    options = launch.ssh
    if options.hostfile:
        hosts = select(read_hostfile(Path(options.hostfile)), options.include, options.exclude)
    else:
        hosts = [to_host(text) for text in options.hosts]
    if not hosts:
        raise ConfigError(
            Problem(
                "launch.ssh.hosts",
                None,
                rule="names no host",
                fix="use --hosts a,b or --hostfile FILE",
            )
        )
    names = [host.label for host in hosts]
    # Each host runs one agent, which starts all its ranks.
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(
            Problem(
                "launch.ssh.hosts",
                None,
                rule=f"names {twice} twice",
                fix="name each host once, and set slots for more ranks",
            )
        )
    if requested_nodes is not None and requested_nodes > len(hosts):
        raise ConfigError(
            Problem(
                "launch.nodes",
                requested_nodes,
                rule=f"exceeds the number of hosts, {len(hosts)}",
                fix="name more hosts",
            )
        )
    # A hostfile may list more hosts than the run needs.
    if requested_nodes:
        hosts = hosts[:requested_nodes]
    # The world size is the number of hosts times their common number of ranks.
    if len({host.slots for host in hosts}) > 1:
        counts = ", ".join(f"{host.name} has {host.slots or 'no slots=N'}" for host in hosts)
        raise ConfigError(
            Problem(
                "slots",
                None,
                rule=f"must be equal on all hosts: {counts}",
                fix="exclude hosts with --exclude, or select devices with --include HOST:0,1",
            )
        )
    return hosts


def to_host(text: str) -> Host:
    """Parse a host written as ``[user@]host[:port]``.

    >>> to_host("me@node1:2222")
    Host(name='node1', user='me', port=2222, slots=None, devices=None)
    """
    user, _, rest = text.rpartition("@")
    name, _, port = rest.partition(":")
    return Host(name, user or None, int(port) if port else None)


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile with one host per line: ``host`` or ``host slots=N``. ``#`` starts a comment.

    Raises:
        ConfigError: the file cannot be read, or a line has another format.
    """
    try:
        lines = bounded_reads.read_all(path, 2**24).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            Problem(
                "launch.ssh.hostfile",
                str(path),
                rule=f"cannot be read: {getattr(error, 'strerror', error)}",
                fix="name a readable file",
            )
        ) from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # "slots=N" is optional.
        match = None
        if len(words) == 2:
            match = re.fullmatch(r"slots=([1-9][0-9]{0,3})", words[1])
        if not re.fullmatch(HOST, words[0]) or len(words) > 2 or (len(words) == 2 and not match):
            # The file may contain control characters, which could rewrite the terminal.
            printable = "".join(c if c.isprintable() else "?" for c in line)
            raise ConfigError(
                Problem(
                    "line",
                    printable[:80],
                    rule="is not a host",
                    fix='write it like "node1 slots=8"',
                    where=f"{path.name}:{number}",
                )
            )
        host = to_host(words[0])
        if match:
            host = replace(host, slots=int(match[1]))
        hosts.append(host)
    return hosts


def select(hosts: list[Host], include: str, exclude: str) -> list[Host]:
    """Filter hosts and their devices. ``node1@node2:0,2`` is all of node1 and two devices of node2.

    Raises:
        ConfigError: both filters are set, or one names a host or a device that does not exist.

    >>> [h.devices for h in select([Host("a", slots=2), Host("b", slots=2)], "", "a:0")]
    [(1,), None]
    """
    if include and exclude:
        raise ConfigError(
            Problem(
                "--exclude",
                exclude,
                rule="cannot be combined with --include",
                fix="use one of them",
            )
        )
    if include:
        named = _filter("--include", include, hosts)
        return [_with(host, named[host.name]) for host in hosts if host.name in named]
    if not exclude:
        return hosts
    excluded = _filter("--exclude", exclude, hosts)
    left = []
    for host in hosts:
        if host.name not in excluded:
            left.append(host)
            continue
        devices = excluded[host.name]
        # The filter excludes all devices of this host.
        if devices is None:
            continue
        rest = tuple(device for device in range(host.slots or 0) if device not in devices)
        if rest:
            left.append(_with(host, rest))
    return left


def _with(host: Host, devices: tuple[int, ...] | None) -> Host:
    if devices is None:
        return host
    return replace(host, devices=devices, slots=len(devices))


def _filter(option: str, text: str, hosts: list[Host]) -> dict[str, tuple[int, ...] | None]:
    """Return the devices of each host in a filter. None means all devices of the host."""
    by_name = {host.name: host for host in hosts}
    named: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        # Each part names a host, and optionally devices of it.
        name, colon, numbers = part.partition(":")
        if name not in by_name:
            raise _wrong(
                option,
                text,
                f"names {name!r}, which is not a host of the hostfile",
                f"use {', '.join(by_name)}",
            )
        if not colon:
            named[name] = None
            continue
        if not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise _wrong(option, text, f"has no devices after {name}:", "write them like node1:0,2")
        devices = tuple(sorted(set(map(int, numbers.split(",")))))
        # Without slots, the number of devices of a host is unknown.
        slots = by_name[name].slots
        if slots is None or devices[-1] >= slots:
            raise _wrong(
                option,
                text,
                f"names device {devices[-1]} of {name}, which has {slots or 'no'} slots",
                "count from 0",
            )
        named[name] = devices
    return named


def _wrong(option: str, text: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem(option, text, rule, fix))
