"""What ssh starts on a host: it takes the command and its variables from standard input, and ends with that input.

``python -m shardtrain.launch.host`` imports the standard library alone. Nothing that it is told stands in a list of
processes, no shell reads it, and when the launcher, its machine or the connection dies, the run here is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

READY = "shardtrain host ready"
"""The first line of its output: the package is here, and the command is awaited."""
STOP, KILL = b"stop\n", b"kill\n"
POLL_SECONDS = 0.05


def main() -> int:
    """Run the command that standard input describes; gives its status."""
    print(READY, flush=True)
    line = sys.stdin.buffer.raw.readline()  # type: ignore[union-attr]
    if not line:
        return 0
    job = json.loads(line)
    try:
        process = subprocess.Popen(
            job["command"],
            env={**os.environ, **job["environment"]},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        print(f"error[2]: {job['command'][0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        return 2
    return _watch(process, float(job["grace_seconds"]))


def _watch(process: subprocess.Popen[bytes], grace_seconds: float) -> int:
    """Wait for the command; stop it when asked to, or when nobody is there to ask."""
    told, end, listens = b"", float("inf"), True
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: process.send_signal(signal.SIGTERM))
    while process.poll() is None:
        if not listens:
            time.sleep(POLL_SECONDS)
        elif select.select([0], [], [], POLL_SECONDS)[0]:
            read = os.read(0, 4096)
            listens, told = bool(read), told + read
        if end == float("inf") and (not listens or STOP in told):
            process.send_signal(signal.SIGTERM)
            end = time.monotonic() + grace_seconds
        if KILL in told or time.monotonic() > end:
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
    found = [int(p) for task in Path(f"/proc/{pid}/task").glob("*/children") for p in _text(task).split()]
    found += [one for child in found for one in _below(child)]
    for entry in Path("/proc").glob("[0-9]*/stat"):
        fields = _text(entry).rpartition(")")[2].split()
        if len(fields) > 3 and fields[3] == str(pid) and int(entry.parent.name) not in (pid, *found):
            found.append(int(entry.parent.name))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
