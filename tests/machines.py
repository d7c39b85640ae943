"""Two simulated machines in Linux namespaces, each with a network, a host name, a view of the files and an sshd.

A switch connects them, and the launcher runs in its network. They are unreachable from outside, and disappear with
their processes. Host names do not resolve.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import patience
import sshd

HOLE = "10.77.0.99"
"""An address that never answers and reports no error."""
HOSTS = {"host-a": "10.77.0.2", "host-b": "10.77.0.3"}
LAUNCHER = "10.77.0.1"
SECONDS = 20


@functools.cache
def missing() -> str:
    """Return the reason why this machine cannot simulate machines, or an empty string."""
    if sshd.missing():
        return sshd.missing()
    programs = [name for name in ("unshare", "nsenter", "ip", "mount") if not shutil.which(name)]
    if programs:
        return f"no {', '.join(programs)} here: apt-get install iproute2 util-linux (.ci/components.sh does)"
    command = [
        "unshare",
        "--net",
        "--uts",
        "--mount",
        "sh",
        "-c",
        "ip link add wire0 type veth peer name wire1",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience.seconds(SECONDS), check=False
    )
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True)
class Machine:
    """A simulated machine: the namespaces of process ``pid``, which disappear when it ends."""

    pid: int

    def command(self, *command: str) -> list[str]:
        """Return a command that runs ``command`` on this machine."""
        return [
            "nsenter",
            f"--target={self.pid}",
            "--net",
            "--uts",
            "--mount",
            "--wdns=/",
            *command,
        ]

    def processes(self) -> set[int]:
        """Return the ids of all processes in the network of this machine."""
        network = os.readlink(f"/proc/{self.pid}/ns/net")
        pids = set()
        # Path.glob would fail if a process ended during the listing.
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{name}/ns/net") == network:
                    pids.add(int(name))
            except OSError:
                continue
        return pids

    def do(self, *command: str) -> None:
        """Run a short command on this machine."""
        done = subprocess.run(
            self.command(*command),
            capture_output=True,
            text=True,
            timeout=patience.seconds(SECONDS),
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"

    @contextmanager
    def shows(self, path: Path, instead: Path) -> Iterator[None]:
        """Bind-mount the folder ``instead`` at ``path``, on this machine only, for the duration of the block."""
        self.do("mount", "--bind", str(instead), str(path))
        try:
            yield
        finally:
            self.do("umount", "--lazy", str(path))


@dataclass(frozen=True)
class Machines:
    """Two hosts and their switch.

    Attributes:
        switch: The machine of the switch and the launcher.
        hosts: The hosts by name.
        config: Configuration file for ``ssh -F``.
        idle: Ids of the processes on all machines before a launch.
    """

    switch: Machine
    hosts: dict[str, Machine]
    config: Path
    idle: frozenset[int]

    def running(self) -> set[int]:
        """Return the ids of the processes of a launch on all machines, including the launcher."""
        machines = (self.switch, *self.hosts.values())
        return set().union(*(machine.processes() for machine in machines)) - self.idle

    def cut(self, host: str) -> None:
        """Disconnect a host, like a pulled cable: packets are lost without an error."""
        self.switch.do("ip", "link", "set", host, "down")

    def reconnect(self, host: str) -> None:
        """Undo ``cut``."""
        self.switch.do("ip", "link", "set", host, "up")


@contextmanager
def two(folder: Path) -> Iterator[Machines]:
    """Create the hosts ``host-a`` and ``host-b`` and the machine of the launcher for the duration of the block."""
    with ExitStack() as stack:
        # The machine of the launcher is also the bridge between the hosts.
        switch = stack.enter_context(_machine("launcher"))
        switch.do("ip", "link", "add", "br0", "type", "bridge")
        switch.do("ip", *f"addr add {LAUNCHER}/24 dev br0".split())
        switch.do("ip", "link", "set", "br0", "up")
        hosts = {}
        for number, (name, address) in enumerate(HOSTS.items()):
            host = stack.enter_context(_machine(f"unknown-{number}"))
            hosts[name] = host
            switch.do("ip", *f"link add {name} type veth peer name wire0 netns {host.pid}".split())
            switch.do("ip", *f"link set {name} master br0 up".split())
            host.do("ip", *f"addr add {address}/24 dev wire0".split())
            host.do("ip", "link", "set", "wire0", "up")
        switch.do("ip", *f"neigh add {HOLE} lladdr 02:00:00:00:00:99 dev br0 nud permanent".split())

        config = sshd.prepare(folder, HOSTS, port=22)
        for host in hosts.values():
            stack.enter_context(sshd.daemon(folder, host.command()))
        for address in HOSTS.values():
            _wait_for(switch, address)
        machines = Machines(switch, hosts, config, frozenset())
        yield replace(machines, idle=frozenset(machines.running()))


@contextmanager
def _machine(name: str) -> Iterator[Machine]:
    process = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sleep", "3600"])
    try:
        end = time.monotonic() + patience.seconds(SECONDS)
        while os.readlink(f"/proc/{process.pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt"):
            assert time.monotonic() < end and process.poll() is None, "no namespace"
            time.sleep(0.01)
        machine = Machine(process.pid)
        machine.do("hostname", name)
        machine.do("ip", "link", "set", "lo", "up")
        yield machine
    finally:
        process.kill()
        process.wait(patience.seconds(SECONDS))


def _wait_for(switch: Machine, address: str) -> None:
    code = f"import socket; socket.create_connection(({address!r}, 22), timeout=1).close()"
    end = time.monotonic() + patience.seconds(SECONDS)
    command = switch.command("python3", "-c", code)
    while subprocess.run(
        command, capture_output=True, timeout=patience.seconds(SECONDS)
    ).returncode:
        assert time.monotonic() < end, f"sshd at {address} does not listen"
        time.sleep(0.05)
