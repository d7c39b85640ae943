"""What ssh starts on a host: it takes the command and its variables from standard input, and ends with that input.

``python -m shardtrain.launch.remote_agent`` imports the standard library alone. Nothing that it receives is in a
list of processes, no shell reads it, and when the launcher, its machine or the connection dies, the run here is
stopped. A network that is cut ends no input, so the launcher says something every few seconds, and its silence is an
end too.
"""

from __future__ import annotations

import contextlib
import ctypes
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

READY = "shardtrain host ready"
"""How the first line of its output begins: the package is here, and the command is awaited. The version follows, and
the address at which sshd took the connection (``-`` where there was none)."""
STOP = b"stop\n"
KILL = b"kill\n"
BEAT = b"\n"
BEAT_SECONDS = 5.0
"""How often the launcher says something at least."""
SILENCE_SECONDS = 30.0
"""How long a host hears nothing until it stops its run."""
POLL_SECONDS = 0.05
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


class Launcher:
    """What the launcher says over standard input, line by line."""

    def __init__(self) -> None:
        self.gone = False
        """Whether it has left, or said nothing for ``SILENCE_SECONDS``."""
        self._text = b""
        self._heard_at = time.monotonic()

    def listen(self, seconds: float) -> list[bytes]:
        """Wait up to so many seconds; gives the lines that came."""
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
    """Run the command that standard input describes; gives its status."""
    if importlib.util.find_spec("torch") is None:  # before any host begins, and not as a trace of the run
        print(f"{sys.executable} has no package torch", flush=True)
        return 2
    address = os.environ.get("SSH_CONNECTION", "").split()
    print(READY, __version__, address[2] if len(address) == 4 else "-", flush=True)
    launcher = Launcher()
    lines = list[bytes]()
    # nothing starts here before all hosts have answered
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
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
    except OSError as error:
        print(f"error[2]: {job['command'][0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        return 2
    return _watch(process, launcher, lines[1:], float(job["grace_seconds"]))


def _end_with_parent() -> None:
    """Have the kernel ask the command to stop when this process is killed: nobody else could find it then."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)


def _watch(process: subprocess.Popen[bytes], launcher: Launcher, orders: list[bytes], grace_seconds: float) -> int:
    """Wait for the command; stop it when asked to, or when nobody is there to ask."""
    end = float("inf")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # sshd ends what it started where the connection breaks: the run hears of that as of any request
        signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
    while process.poll() is None:
        orders += launcher.listen(POLL_SECONDS)
        # a launcher that has gone is as good as a request to stop: nobody would notice how the run ends
        if end == float("inf") and (launcher.gone or STOP in orders):
            process.send_signal(signal.SIGTERM)
            end = time.monotonic() + grace_seconds
        if KILL in orders or time.monotonic() > end:
            _kill(process.pid)
    _kill(process.pid)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _kill(pid: int) -> None:
    """Kill a process with all below it, and what is left of its session."""
    for one in [*_below(pid), pid]:
        with contextlib.suppress(OSError):
            if os.getsid(one) == pid or one != pid:
                os.kill(one, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    """Processes below one, by Linux's list of children, and others of its session that have lost their parent."""
    # by the module, which skips a folder that ends meanwhile; Path.glob raises what the kernel answers then
    pids = [int(p) for task in glob.glob(f"/proc/{pid}/task/*/children") for p in _text(Path(task)).split()]
    pids += [one for child in pids for one in _below(child)]
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
