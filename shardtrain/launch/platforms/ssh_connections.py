"""SSH connections of one launch: open them together, print the output of the hosts, and always close all of them."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from shardtrain import __version__
from shardtrain.config.schema.launch_options import LaunchSSH
from shardtrain.launch import addresses, failure, remote_agent
from shardtrain.launch.agent import status_of
from shardtrain.launch.failure import NOT_SAVED, PREEMPTED
from shardtrain.launch.platforms import pdsh
from shardtrain.launch.platforms.ssh import ENDPOINT, LOCAL_ADDRESS, LOST, HostCommand
from shardtrain.utils import python_child, stop_signals
from shardtrain.utils.errors import ConfigError, PeerError, Problem
from shardtrain.utils.process import SECRET, allow_open_files
from shardtrain.utils.redact import visible

START_SECONDS = 20
"""Time added to the connection timeout, because Python starts slowly from a cold file system."""
END_SECONDS = 5.0
"""Time for hosts to end their processes after a request to kill, before their connections are closed."""
FOLLOW_SECONDS = 3.0
"""Time for other hosts to end and report by themselves after a failure.
Afterwards they are requested to stop.
"""
FILES_PER_HOST = 5
"""Open files per connection: two pipes, the host's log, and both ends of a pipe while ssh starts."""
OTHER_FILES = 100
"""Open files of this process that do not belong to connections."""
HOSTS_AT_ONCE = 64
"""Number of simultaneous connection attempts. A handshake takes about 20 ms of one core of this machine."""
HINTS = (
    (
        "Host key verification failed",
        "accept its key by hand, after `ssh-keygen -R {name}` if it may have changed;",
    ),
    (
        "Permission denied",
        "check that its authorized_keys has your public key, and your agent or ~/.ssh the private key;",
    ),
    ("Could not resolve", "check the name;"),
    ("timed out", "check that it is up, and its network;"),
    ("refused", "check that its sshd is up;"),
    ("user config file", "correct launch.ssh.config_file;"),
)
"""Pairs of a substring of ssh's message and advice for the user."""


@dataclass
class _Connection:
    plan: HostCommand
    process: pdsh.Reached | subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    ready: bool = False
    problem: Problem | None = None
    """Reason why this host cannot participate, or None."""
    kind: str = ""
    """Key of ``HINTS`` that the message of ssh contains. The rest of the message differs between hosts."""
    address: str | None = None
    last: str = ""
    is_stopping: bool = False
    log: IO[bytes] | None = field(default=None, repr=False)
    reader: threading.Thread | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.plan.host.label

    @property
    def is_lost(self) -> bool:
        """True if the connection ended before the command on the host did."""
        code = self.process.poll()
        return code is not None and (code == LOST or code < 0)

    def say(self, words: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(words)
            self.process.stdin.flush()


class SshConnections:
    """Connections of one launch."""

    def __init__(self, plans: Sequence[HostCommand], options: LaunchSSH, folder: Path) -> None:
        self._plans = plans
        self._options = options
        self._folder = folder
        self._open: list[_Connection] = []
        self._lines: queue.Queue[tuple[_Connection, bytes | None]] = queue.Queue()
        self._fan: pdsh.Fan | None = None
        self._requests = 0
        self._ends = set[str]()
        self._stop_code = NOT_SAVED
        """Code in the line about a request to stop, which a host prints once the code is in exit.json."""
        self._kill_at = float("inf")
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)

    def __call__(self) -> int:
        """Run until all hosts have ended. Return the exit status of the run.

        Raises:
            ConfigError: a host is unreachable, or has no Python with this package.
                Nothing has been started on any host.
            PeerError: the connection to a host was lost.
        """
        before = stop_signals.handle_requests(self._request)
        try:
            self._connect()
            if self._requests:
                return self._stopped(
                    PREEMPTED,
                    "before anything was started; the same command starts the run",
                )
            # Hosts sign their rendezvous messages with this secret.
            secret = os.environ.get(SECRET) or secrets.token_hex(32)
            for one, known in zip(self._open, self._found(), strict=True):
                one.say(one.plan.message(os.environ, {SECRET: secret, **known}))
            return self._follow()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request(self, number: int, _frame: object) -> None:
        # Count each SIGINT, because a second one kills the run. Count SIGTERM
        # only if it is the first request.
        self._requests += number == signal.SIGINT or not self._requests

    def _connect(self) -> None:
        """Open all connections. Hosts receive their commands only after all hosts have answered."""
        # A thousand hosts need more open files than most systems allow by default.
        needed = FILES_PER_HOST * len(self._plans) + OTHER_FILES
        allowed = allow_open_files()
        if needed > allowed:
            raise ConfigError(
                Problem(
                    "launch ssh",
                    None,
                    rule=(
                        f"connects to {len(self._plans)} hosts, which requires {needed} open files, "
                        f"but {allowed:g} are allowed"
                    ),
                    fix="raise the hard limit (limits.conf; `ulimit -Hn` shows it), or start from another machine",
                )
            )
        self._beats.start()
        limit_seconds = self._options.connect_timeout_seconds + START_SECONDS
        starting = zip(self._plans, self._start(), strict=True)
        while not self._requests:
            # Connect in waves, because this machine encrypts for all hosts: a thousand simultaneous
            # handshakes would all time out.
            waiting = [one for one in self._open if not one.ready and one.problem is None]
            while len(waiting) < HOSTS_AT_ONCE and (found := next(starting, None)) is not None:
                waiting.append(self._opened(*found))
            if not waiting:
                break

            # Find ended processes before reading, so that the output read below includes their last lines.
            ended = []
            for one in self._open:
                if one.process.poll() is not None and one.problem is None:
                    ended.append(one)
            self._take()
            for one in ended:
                self._take_end(one)

            # A host may accept the connection and then hang.
            for one in waiting:
                is_late = time.monotonic() > one.started + limit_seconds
                if is_late and not one.ready and one.problem is None:
                    one.problem = Problem(
                        "host",
                        one.name,
                        rule=f"did not start shardtrain within {limit_seconds:g} s",
                        fix="check its load and its disk",
                    )
        # A request to stop ends the run in any case.
        if not self._requests:
            self._raise_problems()

    def _take_end(self, one: _Connection) -> None:
        """Read the last output of a host whose process has ended, and record its problem.

        Raises:
            PeerError: the host had started shardtrain, so its connection was lost.
        """
        if one.reader is not None:
            # Wait for the last line, which contains the reason.
            one.reader.join(1.0)
        while not self._lines.empty():
            self._take()
        if one.ready:
            raise self._lost(one)
        one.problem = one.problem or self._not_started(one)

    def _raise_problems(self) -> None:
        """Raise ConfigError if a host has a problem.

        Hosts with the same problem share a line, with the message of the first one.
        """
        problems: dict[str, Problem] = {}
        for one in self._open:
            if not one.problem:
                continue
            key = one.kind or f"{one.problem.rule}; {one.problem.fix}"
            if key in problems:
                known = problems[key]
                problems[key] = replace(known, value=f"{known.value}, {one.name}")
            else:
                problems[key] = one.problem
        if problems:
            raise ConfigError(list(problems.values()))

    def _opened(
        self, plan: HostCommand, process: pdsh.Reached | subprocess.Popen[bytes]
    ) -> _Connection:
        one = _Connection(plan, process, log=(self._folder / f"{plan.host.label}.log").open("ab"))
        self._open.append(one)
        one.reader = threading.Thread(target=self._read, args=(one,), daemon=True)
        one.reader.start()
        return one

    def _start(self) -> Iterator[pdsh.Reached | subprocess.Popen[bytes]]:
        """Start the process that reaches each host."""
        if self._options.via == "pdsh":
            self._fan = pdsh.Fan(self._plans)
            yield from self._fan.channels
            return
        for plan in self._plans:
            try:
                yield subprocess.Popen(
                    plan.ssh,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    # Only the launcher receives Ctrl-C. It then requests the hosts to stop.
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise ConfigError(
                    Problem(
                        "ssh",
                        None,
                        rule="does not exist on this machine",
                        fix="install OpenSSH's client",
                    )
                ) from None

    def _not_started(self, one: _Connection) -> Problem:
        code = one.process.wait()
        message = one.last or "no output"
        if code == LOST:
            one.kind, hint = next(
                (pair for pair in HINTS if pair[0] in message),
                ("", "check that it is up;"),
            )
            hint = hint.format(name=one.name)
            words = list(one.plan.ssh[:-1])
            # By hand, ssh may ask for a password.
            if "by hand" in hint:
                words = [word for word in words if word != "BatchMode=yes"]
            by_hand = shlex.join(words).replace(" -o -o ", " -o ")
            return Problem(
                "host",
                one.name,
                rule=f"cannot be reached by ssh: {message}",
                fix=f"{hint} try `{by_hand} true`",
            )
        fix = "install shardtrain and torch on it, or set launch.python to an interpreter that has them"
        # the shell cannot change to the folder
        if ": cd: " in message:
            fix = "create this folder on it, or set launch.workdir to one that exists"
        return Problem(
            "host",
            one.name,
            rule=f"cannot start shardtrain: {message}",
            fix=fix,
        )

    def _lost(self, one: _Connection) -> PeerError:
        rule = f"the connection to host {one.name} was lost"
        return PeerError(
            f"{rule}; check the host, then repeat the command, which continues from the last checkpoint",
        )

    def _read(self, one: _Connection) -> None:
        assert one.process.stdout is not None
        for line in one.process.stdout:
            self._lines.put((one, line))
        self._lines.put((one, None))

    def _beat(self) -> None:
        """Send keep-alives to the hosts, in a separate thread because writing to a terminal can block."""
        while not self._ended.wait(remote_agent.BEAT_SECONDS):
            for one in list(self._open):
                one.say(remote_agent.BEAT)

    def _take(self) -> None:
        """Copy one line of any host to the terminal and to the host's log file,
        or wait briefly for a line.
        """
        try:
            one, line = self._lines.get(timeout=0.05)
        except queue.Empty:
            return
        if line is None or one.log is None:
            return
        text = line.decode(errors="replace").rstrip("\r\n")
        if not one.ready and text.startswith(remote_agent.READY):
            # The first line of a host contains its version, which must equal ours, and the address at which
            # it was reached.
            words = text.removeprefix(remote_agent.READY).split()
            version, address = (*words, "", "")[:2]
            if version != __version__:
                rule = f"has shardtrain {version or 'of unknown version'}, but this machine has {__version__}"
                fix = "install the same version everywhere, or set launch.python to an interpreter that has it"
                one.problem = Problem("host", one.name, rule, fix)
                return
            one.ready = True
            one.address = address if address.strip("-") and "%" not in address else None
            return
        if not one.ready and python_child.is_too_old(text):
            rule = "cannot start shardtrain: its Python is older than 3.11"
            fix = "install a newer Python, or set launch.python to one"
            one.problem = Problem("host", one.name, rule, fix)
            return
        one.last = visible(text.strip()) or one.last
        one.log.write(line)
        one.log.flush()
        # Each host prints the same line about the end of the run. Show it once.
        is_repeated = text in self._ends
        if text.startswith(failure.END_LINES):
            self._ends.add(text)
            if stop := failure.STOP_LINE.match(text):
                self._stop_code = int(stop[1])
        if one.ready and not is_repeated:
            print(f"[{one.name}] {visible(text, colors=True)}", file=sys.stderr, flush=True)

    def _found(self) -> list[Mapping[str, str]]:
        """Return variables of each host that are known only after connecting,
        such as the first host's address.
        """
        reached = [one.address for one in self._open]
        address = addresses.meeting(reached)
        if len(reached) == 1 or address is None:
            return [{} for _ in reached]
        place = f"[{address}]" if ":" in address else address
        known = {}
        if not self._options.rendezvous_host:
            known = {ENDPOINT: f"{place}:{self._options.rendezvous_port}"}
        if not addresses.is_loopback(address):
            return [known for _ in reached]
        return [{**known, LOCAL_ADDRESS: str(own)} for own in reached]

    def _follow(self) -> int:
        """Wait for all hosts. After a failure of one host or a request to stop, stop the others."""
        failed_at = float("inf")
        while any(one.process.poll() is None for one in self._open) or not self._lines.empty():
            self._take()
            failed = [one for one in self._open if one.process.poll() not in (None, 0)]
            if failed:
                failed_at = min(failed_at, time.monotonic())
            if time.monotonic() > failed_at + FOLLOW_SECONDS or self._requests:
                self._ask_to_stop(failed)
            if self._requests > 1 and self._kill_at == float("inf"):
                self._kill_at = time.monotonic() + END_SECONDS
                for one in self._open:
                    one.say(remote_agent.KILL)
            # A host that does not answer ends by itself, because it no longer receives keep-alives.
            if time.monotonic() > self._kill_at:
                return self._stopped(
                    self._stop_code,
                    "immediately, while hosts did not answer; these end their processes themselves",
                )
        # ssh exits with the status of the remote command, unless ssh lost the connection or was killed.
        lost = [one for one in self._open if one.is_lost]
        if lost and not self._requests:
            if len(lost) == len(self._open):
                raise self._lost(lost[0])
            print(f"note: {self._lost(lost[0])}", file=sys.stderr, flush=True)
        # The other hosts know how the run ended, and have written it to exit.json.
        codes = [one.process.wait() for one in self._open if not one.is_lost] or [self._stop_code]
        if self._requests:
            # A node that was killed with SIGKILL has already written exit.json, so use the stop code
            # of the run. A request that arrives while Python starts ends a node with SIGTERM, and
            # there is nothing to save yet.
            ends = {128 + signal.SIGKILL: self._stop_code, 128 + signal.SIGTERM: PREEMPTED}
            codes = [ends.get(code, code) for code in codes]
        return status_of([-code if code > 128 else code for code in codes])

    def _stopped(self, code: int, how: str) -> int:
        print(f"stopped[{code}]: stopped {how}", file=sys.stderr, flush=True)
        return code

    def _ask_to_stop(self, failed: Sequence[_Connection]) -> None:
        running = [one for one in self._open if not one.is_stopping and one.process.poll() is None]
        for one in running:
            one.is_stopping = True
            one.say(remote_agent.STOP)
        if failed and running and not self._requests:
            what = "was lost"
            if not failed[0].is_lost:
                what = f"has ended with {failed[0].process.poll()}"
            print(
                f"note: host {failed[0].name} {what}; stopping the other hosts",
                file=sys.stderr,
                flush=True,
            )

    def _end(self) -> None:
        """Close all connections. Each host stops its processes when its input ends."""
        self._ended.set()
        for one in self._open:
            # Send all requests before waiting, so all hosts end at the same time.
            if one.process.poll() is None and one.ready:
                one.say(remote_agent.KILL)
            elif one.process.poll() is None:
                # ssh still connects to its host, which therefore runs nothing.
                one.process.kill()
            with contextlib.suppress(OSError, ValueError):
                assert one.process.stdin is not None
                one.process.stdin.close()
        end = time.monotonic() + END_SECONDS
        for one in self._open:
            try:
                one.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            if one.log:
                one.log.close()
        if self._fan:
            self._fan.close()
        if self._beats.is_alive():
            self._beats.join(END_SECONDS)
