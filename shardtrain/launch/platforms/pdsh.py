"""Connect to hosts through pdsh, with separate streams and a separate exit status for each host.

pdsh does not pass input to its remote commands, mixes their output, and does not terminate them when it ends.
Therefore it starts a local program (``pdsh_rsh``) per host with ``-R exec``. That program receives both ends
of one connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from shardtrain.launch.platforms import pdsh_rsh
from shardtrain.launch.platforms.ssh import LOST, HostCommand
from shardtrain.utils import temporary
from shardtrain.utils.errors import ConfigError, Problem

POLL_SECONDS = 0.02
END_SECONDS = 5.0


class Reached:
    """Connection to one host, with the interface of ``subprocess.Popen``."""

    def __init__(self, plan: HostCommand) -> None:
        self.plan = plan
        given, into = os.pipe()
        out_of, taken = os.pipe()
        self.files = [given, taken]
        self.stdin: IO[bytes] | None = os.fdopen(into, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(out_of, "rb")
        self._code: int | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def poll(self) -> int | None:
        """Return the exit status of ssh, or None while it runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of ssh. Raises ``subprocess.TimeoutExpired``."""
        if not self._ended.wait(timeout) or self._code is None:
            raise subprocess.TimeoutExpired(self.plan.ssh, timeout or 0)
        return self._code

    def kill(self) -> None:
        """Terminate the connection. Its program exits when the launcher closes the socket."""
        with self._lock:
            if self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_WR)
                return
        self.end(-signal.SIGKILL)

    def serve(self, control: socket.socket) -> None:
        """Send the command and its streams to the program, and wait for the exit status."""
        with self._lock:
            if self._code is not None:
                return
            self._control = control
        with contextlib.suppress(OSError):
            # The program becomes the reader and writer of the pipes, so the launcher communicates
            # with ssh without pdsh.
            socket.send_fds(control, [json.dumps(self.plan.ssh).encode() + b"\n"], self.files)
            self._release()
            text = control.makefile("rb").readline().strip()
            self.end(int(text) if text else LOST)
        self.end(LOST)

    def end(self, code: int, why: str = "") -> None:
        """Record the exit status, unless one is recorded already."""
        with self._lock:
            if self._code is None:
                if why and self.files:
                    os.write(self.files[1], why.encode() + b"\n")
                self._code = code
        self._release()
        self._ended.set()

    def _release(self) -> None:
        with self._lock:
            for one in self.files:
                os.close(one)
            self.files = []


class Fan:
    """One pdsh process, and the socket at which the programs that it started request their connections."""

    def __init__(self, plans: Sequence[HostCommand]) -> None:
        names = [plan.host.name for plan in plans]
        if len(set(names)) < len(names):
            raise ConfigError(
                Problem(
                    "launch.ssh.via",
                    "pdsh",
                    rule="requires unique host names, but two hosts have the same name",
                    fix="define unique names in ~/.ssh/config, or use ssh",
                )
            )
        for program in ("pdsh", "ssh"):
            if shutil.which(program) is None:
                raise ConfigError(
                    Problem(
                        "launch.ssh.via",
                        "pdsh",
                        rule=f"requires {program}, which is not installed",
                        fix="install it, or remove launch.ssh.via",
                    )
                )
        self.channels = [Reached(plan) for plan in plans]
        self._folder = temporary.make()
        path = self._folder / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(len(plans))
        inside = [sys.executable, "-I", pdsh_rsh.__file__, str(path)]
        arguments = ["pdsh", "-R", "exec", "-f", str(len(plans)), "-w", ",".join(names)]
        arguments += [*(argument.replace("%", "%%") for argument in inside), "%n"]
        # Ignore the hosts that a user has configured for pdsh itself.
        names_of_pdsh = {
            key: value
            for key, value in os.environ.items()
            if key not in ("WCOLL", "PDSH_MODULE_DIR")
        }
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=names_of_pdsh,
            # Only the launcher receives Ctrl-C.
            start_new_session=True,
        )
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _accept(self) -> None:
        # The loop ends with an OSError when the listener is closed.
        with contextlib.suppress(OSError):
            while True:
                control, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(control,), daemon=True).start()

    def _serve(self, control: socket.socket) -> None:
        with control, contextlib.suppress(OSError, ValueError, IndexError):
            self.channels[int(control.recv(16))].serve(control)

    def _watch(self) -> None:
        """Report the last message of pdsh if it ends before starting all programs."""
        assert self._process.stdout is not None
        last_line = ""
        for line in self._process.stdout:
            last_line = line.decode(errors="replace").strip() or last_line
        self._process.wait()
        # Wait for exit statuses that may still arrive.
        time.sleep(POLL_SECONDS * 10)
        for one in self.channels:
            if one.files:
                one.end(LOST, f"pdsh has ended: {last_line}")

    def close(self) -> None:
        """Terminate pdsh and remove the socket."""
        self._listener.close()
        for one in self.channels:
            one.kill()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        temporary.remove(self._folder)
