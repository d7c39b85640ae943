"""Hosts that are reached by OpenSSH: one connection each, over which the command goes in and the log comes out."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shardtrain.config.launch_schema import Launch
from shardtrain.errors import ConfigError, PeerError, Problem
from shardtrain.launch import host as remote
from shardtrain.launch.agent import status_of
from shardtrain.launch.failure import NOT_SAVED
from shardtrain.launch.hosts import Host
from shardtrain.launch.job import Job, folder_words, require_nothing_lost
from shardtrain.masking import MASK

START_SECONDS = 20
"""Added to the time of a connection: Python's own start on a cold file system."""


@dataclass(frozen=True)
class Plan:
    """One host: the command that reaches it, and what that command is told on its standard input."""

    host: Host
    ssh: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str]
    forwarded: tuple[str, ...]
    grace_seconds: int

    def message(self, names: Mapping[str, str]) -> bytes:
        """The line for standard input; forwarded variables are taken from ``names``."""
        environment = {**self.environment, **{name: names[name] for name in self.forwarded}}
        job = {"command": self.command, "environment": environment, "grace_seconds": self.grace_seconds}
        return json.dumps(job).encode() + b"\n"


def render(job: Job, launch: Launch, hosts: Sequence[Host], meeting: str, run_id: str) -> list[Plan]:
    """What each host is told; ``meeting`` is the address of the first, as the others reach it.

    Raises:
        ConfigError: the job asks for what ssh cannot do.
    """
    require_nothing_lost([s.variable for s in job.secrets], job.forwarded, "launch.secrets", "ssh")
    if job.is_elastic:
        rule = "has no effect on ssh, where the loss of a host ends the run"
        raise ConfigError(Problem("launch.min_nodes", job.min_nodes, rule, "leave it out"))
    options = launch.ssh
    asked, slots = launch.nproc_per_node or launch.devices_per_node, hosts[0].slots
    if asked and slots and asked != slots:
        rule = f"is not the {slots} slots of each host"
        raise ConfigError(Problem("launch.nproc_per_node", asked, rule, "leave it out, or change the hostfile"))
    command = [*job.command, *(["--nproc", str(slots)] if slots and not asked else [])]
    inside = f"exec {shlex.quote(launch.python)} -m shardtrain.launch.host"
    inside = f"cd -- {shlex.quote(folder_words(job.workdir))} && {inside}" if job.workdir else inside
    plans = []
    for number, host in enumerate(hosts):
        ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={options.connect_timeout_seconds}"]
        ssh += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        ssh += ["-F", options.config_file] if options.config_file else []
        ssh += ["-p", str(host.port)] if host.port else []
        own = {"PYTHONUNBUFFERED": "1"}
        if len(hosts) > 1:
            own |= {
                "SHARDTRAIN_NNODES": str(len(hosts)),
                "SHARDTRAIN_NODE_RANK": str(number),
                "SHARDTRAIN_RDZV_ENDPOINT": f"{meeting}:{options.rendezvous_port}",
                "SHARDTRAIN_RDZV_ID": run_id,
            }
        if host.devices is not None:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.devices))
        words = (*ssh, "--", host.address, inside)
        plans.append(Plan(host, words, tuple(command), {**own, **job.environment}, job.forwarded, job.grace_seconds))
    return plans


def text(plans: Sequence[Plan]) -> str:
    """The plans for people: each command, and what goes into it, with the values of forwarded variables masked."""
    lines = []
    for plan in plans:
        told = plan.message(dict.fromkeys(plan.forwarded, MASK)).decode().strip()
        lines += [f"# {plan.host.name}", f"{shlex.join(plan.ssh)} <<'END'", told, "END"]
    return "\n".join(lines) + "\n"


def address_of(host: Host, launch: Launch) -> str:
    """The name or address that ssh's own configuration has for a host; other hosts are told this one."""
    words = ["ssh", *(["-F", launch.ssh.config_file] if launch.ssh.config_file else []), "-G", "--", host.address]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return host.name
    found = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return found[0] if found else host.name


def new_run_id() -> str:
    """A name for one rendezvous that nobody can foresee."""
    return secrets.token_hex(8)


@dataclass
class _Connection:
    plan: Plan
    process: subprocess.Popen[bytes]
    ready: bool = False
    last: str = ""
    asked: bool = False
    log: IO[bytes] | None = field(default=None, repr=False)

    def say(self, words: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(words)
            self.process.stdin.flush()


class Run:
    """The connections of one launch: started together, and ended together whatever happens."""

    def __init__(self, plans: Sequence[Plan], connect_seconds: float, folder: Path) -> None:
        self._plans, self._folder = plans, folder
        self._start_seconds = connect_seconds + START_SECONDS
        self._open: list[_Connection] = []
        self._lines: queue.Queue[tuple[_Connection, bytes | None]] = queue.Queue()
        self._requests = 0

    def __call__(self) -> int:
        """Run to the end; gives the status of the run.

        Raises:
            ConfigError: a host cannot be reached, or has no Python with this package; nothing was started anywhere.
            PeerError: the connection to a host was lost.
        """
        before = {number: signal.signal(number, self._request) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._connect()
            if self._requests == 0:
                for one in self._open:
                    one.say(one.plan.message(os.environ))
            return self._follow()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request(self, *_: object) -> None:
        self._requests += 1

    def _connect(self) -> None:
        """Open all connections; no host gets its command before all have answered."""
        for plan in self._plans:
            try:
                process = subprocess.Popen(
                    plan.ssh,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the launcher, which asks the hosts to stop
                )
            except FileNotFoundError:
                raise ConfigError(Problem("ssh", None, "is not on this machine", "install OpenSSH's client")) from None
            one = _Connection(plan, process, log=(self._folder / f"{plan.host.name}.log").open("ab"))
            self._open.append(one)
            threading.Thread(target=self._read, args=(one,), daemon=True).start()
        end = time.monotonic() + self._start_seconds
        while not all(one.ready for one in self._open) and not self._requests:
            late = [one for one in self._open if not one.ready]
            if time.monotonic() > end:
                rule = f"did not start shardtrain within {self._start_seconds:g} s"
                raise ConfigError(Problem("host", late[0].plan.host.name, rule, "is it overloaded, or its disk gone?"))
            self._take()
            for one in late:
                if not one.ready and one.process.poll() is not None and self._lines.empty():
                    raise self._not_started(one)

    def _not_started(self, one: _Connection) -> ConfigError:
        code, said = one.process.wait(), one.last or "nothing was said"
        if code == 255:
            fix = f"try `{shlex.join(one.plan.ssh[:-1])} true`"
            return ConfigError(Problem("host", one.plan.host.name, f"cannot be reached by ssh: {said}", fix))
        fix = "install shardtrain there, or set launch.python and launch.workdir to where it is"
        return ConfigError(Problem("host", one.plan.host.name, f"cannot start shardtrain: {said}", fix))

    def _read(self, one: _Connection) -> None:
        assert one.process.stdout is not None
        for line in one.process.stdout:
            self._lines.put((one, line))
        self._lines.put((one, None))

    def _take(self) -> None:
        """Take one line of any host, to the terminal and to the host's file; or wait a moment for none."""
        try:
            one, line = self._lines.get(timeout=0.05)
        except queue.Empty:
            return
        if line is None or one.log is None:
            return
        if not one.ready and line.decode(errors="replace").strip() == remote.READY:
            one.ready = True
            return
        one.last = line.decode(errors="replace").strip() or one.last
        one.log.write(line)
        one.log.flush()
        if one.ready:
            shown = line.decode(errors="replace").rstrip("\r\n")
            print(f"[{one.plan.host.name}] {shown}", file=sys.stderr, flush=True)

    def _follow(self) -> int:
        """Wait for all hosts; the first that fails ends the others, and so does a request to stop."""
        said = 0
        while any(one.process.poll() is None for one in self._open) or not self._lines.empty():
            self._take()
            failed = [one for one in self._open if one.process.poll() not in (None, 0)]
            if failed or self._requests:
                for one in self._open:
                    if not one.asked and one.process.poll() is None:
                        one.asked = True
                        one.say(remote.STOP)
            if self._requests > 1 and said < 2:
                said = 2
                for one in self._open:
                    one.say(remote.KILL)
        codes = [one.process.wait() for one in self._open]
        lost = [one.plan.host.name for one, code in zip(self._open, codes, strict=True) if code == 255]
        if lost and not self._requests:
            told = f"the connection to host {lost[0]} was lost"
            raise PeerError(f"{told}; is it up? The same command goes on from the last checkpoint")
        if self._requests:  # a node that was told before its ranks ran has died of it
            codes = [NOT_SAVED if code > 128 else code for code in codes]
        return status_of([-code if code > 128 else code for code in codes])

    def _end(self) -> None:
        """Leave nothing behind: an end of its input makes each host stop what it runs."""
        for one in self._open:
            if one.process.poll() is None:
                one.say(remote.KILL)
            with contextlib.suppress(OSError, ValueError):
                assert one.process.stdin is not None
                one.process.stdin.close()
        for one in self._open:
            try:
                one.process.wait(5)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            if one.log:
                one.log.close()
