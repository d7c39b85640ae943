"""Hosts that are reached by pdsh: it starts the connections, and each has streams and a status of its own all the same.

pdsh gives its remote commands no input, mixes their output, and does not end them with itself. So it is asked to run a
local program for each host (``-R exec``), ``pdsh_rsh``, which is handed the two ends of one connection.
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
from shardtrain.launch.platforms.ssh import HostCommand
from shardtrain.utils import temporary
from shardtrain.utils.errors import ConfigError, Problem

POLL_SECONDS = 0.02
LOST = 255
END_SECONDS = 5.0


class Reached:
    """One host's connection as ``subprocess.Popen`` would show it, were it a child of this process."""

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
        """The status of ssh; None while it runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises ``subprocess.TimeoutExpired``."""
        if not self._ended.wait(timeout) or self._code is None:
            raise subprocess.TimeoutExpired(self.plan.ssh, timeout or 0)
        return self._code

    def kill(self) -> None:
        """End it: its program sees that the launcher is gone."""
        with self._lock:
            if self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_WR)
                return
        self.end(-signal.SIGKILL)

    def serve(self, control: socket.socket) -> None:
        """Hand over the command and its streams, and wait for the status."""
        with self._lock:
            if self._code is not None:
                return
            self._control = control
        with contextlib.suppress(OSError):
            # the program becomes the reader and writer of the pipes: ssh speaks with the launcher without pdsh
            # between them
            socket.send_fds(control, [json.dumps(self.plan.ssh).encode() + b"\n"], self.files)
            self._release()
            text = control.makefile("rb").readline().strip()
            self.end(int(text) if text else LOST)
        self.end(LOST)

    def end(self, code: int, why: str = "") -> None:
        """Note its end, unless that is known."""
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
    """One pdsh, and the socket at which its programs ask for their connections."""

    def __init__(self, plans: Sequence[HostCommand]) -> None:
        names = [plan.host.name for plan in plans]
        if len(set(names)) < len(names):
            rule = "knows hosts by name, and two have the same"
            raise ConfigError(Problem("launch.ssh.via", "pdsh", rule, "give them names in ~/.ssh/config, or use ssh"))
        for program in ("pdsh", "ssh"):
            if shutil.which(program) is None:
                fix = "install it, or leave out launch.ssh.via"
                raise ConfigError(Problem("launch.ssh.via", "pdsh", f"needs {program}, which is not here", fix))
        self.channels = [Reached(plan) for plan in plans]
        self._folder = temporary.make()
        path = self._folder / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(len(plans))
        inside = [sys.executable, "-I", pdsh_rsh.__file__, str(path)]
        words = ["pdsh", "-R", "exec", "-f", str(len(plans)), "-w", ",".join(names)]
        words += [*(word.replace("%", "%%") for word in inside), "%n"]
        # hosts that a user has set for pdsh itself are not those of this launch
        names_of_pdsh = {key: value for key, value in os.environ.items() if key not in ("WCOLL", "PDSH_MODULE_DIR")}
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=names_of_pdsh,
            start_new_session=True,  # Ctrl-C is for the launcher
        )
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed at the end
            while True:
                control, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(control,), daemon=True).start()

    def _serve(self, control: socket.socket) -> None:
        with control, contextlib.suppress(OSError, ValueError, IndexError):
            self.channels[int(control.recv(16))].serve(control)

    def _watch(self) -> None:
        """Tell what pdsh says where it ends without having started all."""
        assert self._process.stdout is not None
        last_line = ""
        for line in self._process.stdout:
            last_line = line.decode(errors="replace").strip() or last_line
        self._process.wait()
        time.sleep(POLL_SECONDS * 10)  # the last status may be on its way
        for one in self.channels:
            if one.files:
                one.end(LOST, f"pdsh has ended: {last_line}")

    def close(self) -> None:
        """End pdsh, and remove the socket."""
        self._listener.close()
        for one in self.channels:
            one.kill()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        temporary.remove(self._folder)
