"""Agent that ssh starts on a host. It reads a command and its variables from standard input, and runs the command.

``python -P -m shardtrain.launch.remote_agent`` imports only the standard library. The command and its variables
do not appear in process lists, and no shell parses them. When the launcher, its machine or the connection
dies, standard input ends, and the agent stops the run. A network interruption does not end the input. The
launcher therefore sends a keep-alive every few seconds, and the agent stops the run if they stop arriving.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardtrain import __version__
from shardtrain.utils import stop_signals

READY = "shardtrain host ready"
"""Start of the first line of output, which means that the agent waits for the command.

The version follows, and the address at which sshd accepted the connection (``-`` if unknown).
"""
STOP = b"stop\n"
KILL = b"kill\n"
BEAT = b"\n"
BEAT_SECONDS = 5.0
"""Interval between two keep-alives of the launcher."""
SILENCE_SECONDS = 30.0
"""Time without a keep-alive after which a host stops its run."""
POLL_SECONDS = 0.05


class Launcher:
    """Reader of the launcher's lines from standard input.

    ``gone`` is true if the launcher has closed the input, or was silent for ``SILENCE_SECONDS``.
    """

    def __init__(self) -> None:
        self.gone = False
        self._text = b""
        self._heard_at = time.monotonic()

    def listen(self, seconds: float) -> list[bytes]:
        """Wait up to ``seconds`` and return the lines that have arrived."""
        if self.gone:
            time.sleep(seconds)
        elif select.select([0], [], [], seconds)[0]:
            read = os.read(0, 65536)
            self.gone = not read
            self._text += read
            self._heard_at = time.monotonic()
        elif time.monotonic() - self._heard_at > SILENCE_SECONDS:
            self.gone = True
        *lines, self._text = self._text.split(b"\n")
        return [line + b"\n" for line in lines if line]


def main() -> int:
    """Run the command that standard input describes, and return its exit status."""
    # Report a missing package before any host starts.
    if importlib.util.find_spec("torch") is None:
        print(f"{sys.executable} has no package torch", flush=True)
        return 2
    address = os.environ.get("SSH_CONNECTION", "").split()
    print(READY, __version__, address[2] if len(address) == 4 else "-", flush=True)
    launcher = Launcher()
    lines = list[bytes]()
    # The launcher sends the command after all hosts have answered.
    while not lines and not launcher.gone:
        lines = launcher.listen(SILENCE_SECONDS)
    if not lines or lines[0] in (STOP, KILL):
        return 0
    job = json.loads(lines[0])
    try:
        process = subprocess.Popen(
            job["command"],
            env={**os.environ, **job["environment"]},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        print(
            f"error[2]: {job['command'][0]} cannot be started: {error.strerror}",
            file=sys.stderr,
            flush=True,
        )
        return 2
    return _watch(process, launcher, lines[1:], float(job["grace_seconds"]))


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to the command if this agent is killed."""
    stop_signals.die_with_parent(signal.SIGTERM)


def _watch(
    process: subprocess.Popen[bytes],
    launcher: Launcher,
    orders: list[bytes],
    grace_seconds: float,
) -> int:
    """Wait for the command. Stop it on request, or if the launcher is gone. Return its exit status."""
    end = float("inf")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # If the connection breaks, sshd terminates its processes. Treat this signal as a request to stop.
        signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
    while process.poll() is None:
        orders += launcher.listen(POLL_SECONDS)
        # Also stop if the launcher is gone, because nothing else would stop this command.
        if end == float("inf") and (launcher.gone or STOP in orders):
            process.send_signal(signal.SIGTERM)
            end = time.monotonic() + grace_seconds
        if KILL in orders or time.monotonic() > end:
            _kill(process.pid)
    _kill(process.pid)
    if process.returncode >= 0:
        return process.returncode
    return 128 - process.returncode


def _kill(pid: int) -> None:
    """Kill a process, all its descendants, and the remaining processes of its session."""
    for one in [*_below(pid), pid]:
        with contextlib.suppress(OSError):
            if os.getsid(one) == pid or one != pid:
                os.kill(one, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    """Return the descendants of a process, and orphaned processes of its session."""
    # Use the glob module, because it skips folders that disappear during the search. Path.glob would raise.
    children: list[int] = []
    for task in glob.glob(f"/proc/{pid}/task/*/children"):
        children += map(int, _text(Path(task)).split())
    pids = list(children)
    for child in children:
        pids += _below(child)
    # A process whose parent has ended is no longer a descendant, but stays in the session.
    for entry in map(Path, glob.glob("/proc/[0-9]*/stat")):
        fields = _text(entry).rpartition(")")[2].split()
        if len(fields) > 3 and fields[3] == str(pid) and int(entry.parent.name) not in (pid, *pids):
            pids.append(int(entry.parent.name))
    return pids


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
