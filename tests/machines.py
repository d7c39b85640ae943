"""Two machines for tests, in Linux namespaces: each has a network, a host name, a view of the files, and an sshd.

They hang on a switch, in whose network the launcher runs. Nothing of it can be reached from outside, and nothing of it
is left when its processes have gone. Host names resolve nowhere.
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
"""An address at which nothing answers, and nobody says so."""
HOSTS = {"host-a": "10.77.0.2", "host-b": "10.77.0.3"}
LAUNCHER = "10.77.0.1"
SECONDS = 20


@functools.cache
def missing() -> str:
    """What this machine lacks for machines inside of it; empty where nothing does."""
    if sshd.missing():
        return sshd.missing()
    programs = [name for name in ("unshare", "nsenter", "ip", "mount") if not shutil.which(name)]
    if programs:
        return f"no {', '.join(programs)} here: apt-get install iproute2 util-linux (.ci/components.sh does)"
    words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", "ip link add wire0 type veth peer name wire1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patience.seconds(SECONDS), check=False)
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True)
class Machine:
    """Namespaces that live as long as process ``pid``."""

    pid: int

    def words(self, *command: str) -> list[str]:
        """A command that runs ``command`` there."""
        return ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--wdns=/", *command]

    def processes(self) -> set[int]:
        """All processes in its network."""
        own, found = os.readlink(f"/proc/{self.pid}/ns/net"), set()
        for name in filter(str.isdigit, os.listdir("/proc")):  # no glob: it fails where a process ends meanwhile
            try:
                found |= {int(name)} if os.readlink(f"/proc/{name}/ns/net") == own else set()
            except OSError:
                continue
        return found

    def do(self, *command: str) -> None:
        """Run a short command there."""
        done = subprocess.run(
            self.words(*command), capture_output=True, text=True, timeout=patience.seconds(SECONDS), check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"

    @contextmanager
    def shows(self, path: Path, instead: Path) -> Iterator[None]:
        """Let this machine see one folder where the others see another."""
        self.do("mount", "--bind", str(instead), str(path))
        try:
            yield
        finally:
            self.do("umount", "--lazy", str(path))


@dataclass(frozen=True)
class Machines:
    """The switch, the hosts by name, and the file for ``ssh -F``."""

    switch: Machine
    hosts: dict[str, Machine]
    config: Path
    idle: frozenset[int]
    """The processes of all three when nothing is launched."""

    def running(self) -> set[int]:
        """What a launch has started on any of them, the launcher too."""
        return set().union(*(one.processes() for one in (self.switch, *self.hosts.values()))) - self.idle

    def cut(self, host: str) -> None:
        """Take a host's cable out: nothing arrives any more, and nobody is told."""
        self.switch.do("ip", "link", "set", host, "down")

    def reconnect(self, host: str) -> None:
        """Put the cable back."""
        self.switch.do("ip", "link", "set", host, "up")


@contextmanager
def two(folder: Path) -> Iterator[Machines]:
    """Two hosts, ``host-a`` and ``host-b``, and the machine of the launcher."""
    with ExitStack() as stack:
        switch = stack.enter_context(_machine("launcher"))
        for words in ("link add br0 type bridge", f"addr add {LAUNCHER}/24 dev br0", "link set br0 up"):
            switch.do("ip", *words.split())
        hosts = {}
        for number, (name, address) in enumerate(HOSTS.items()):
            hosts[name] = host = stack.enter_context(_machine(f"unknown-{number}"))
            switch.do("ip", *f"link add {name} type veth peer name wire0 netns {host.pid}".split())
            switch.do("ip", *f"link set {name} master br0 up".split())
            for words in (f"addr add {address}/24 dev wire0", "link set wire0 up"):
                host.do("ip", *words.split())
        switch.do("ip", *f"neigh add {HOLE} lladdr 02:00:00:00:00:99 dev br0 nud permanent".split())
        config = sshd.prepare(folder, HOSTS, port=22)
        for host in hosts.values():
            stack.enter_context(sshd.daemon(folder, host.words()))
        for address in HOSTS.values():
            _wait_for(switch, address)
        machines = Machines(switch, hosts, config, frozenset())
        yield replace(machines, idle=frozenset(machines.running()))


@contextmanager
def _machine(name: str) -> Iterator[Machine]:
    process = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sleep", "3600"])
    try:
        end, own = time.monotonic() + patience.seconds(SECONDS), os.readlink("/proc/self/ns/mnt")
        while os.readlink(f"/proc/{process.pid}/ns/mnt") == own:
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
    while subprocess.run(
        switch.words("python3", "-c", code), capture_output=True, timeout=patience.seconds(SECONDS)
    ).returncode:
        assert time.monotonic() < end, f"sshd at {address} does not listen"
        time.sleep(0.05)
