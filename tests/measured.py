"""Open a dataset in a new process, and measure its memory and time: ``python measured.py KIND PATH``."""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import patience

MAX_ROWS = 3000
CAP_BYTES = 4 * 2**30
"""Limit of the process. A bomb that exceeds it fails its test, and not the machine."""


@dataclass
class Measured:
    """Result of opening a dataset and reading its first rows.

    Attributes:
        error: the message of a ShardtrainError, or the type and message of another one.
        grown_bytes: growth of the peak memory, of this process only.
        seconds: CPU time, with that of child processes.
    """

    error: str = ""
    rows: int = 0
    bad_rows: int = 0
    last_bad_row: str = ""
    grown_bytes: int = 0
    seconds: float = 0.0


def open_measured(kind: str, path: Path) -> Measured:
    """Open a dataset with a source of the package in a new process."""
    tests = Path(__file__).resolve().parent
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-W", "ignore", __file__, kind, str(path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patience.seconds(200)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def peak_bytes() -> int:
    """Return the largest resident memory of this process.

    On Linux, getrusage would include the memory of the parent before it started this program.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def grown_in_fork(call: Callable[[], object], patience_seconds: float) -> tuple[int, str]:
    """Call a function in a fork of this process.

    Return the growth of the peak memory in bytes, and the message of a ShardtrainError or ValueError.
    """
    from shardtrain.utils.errors import ShardtrainError

    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        try:
            gc.freeze()
            resource.setrlimit(resource.RLIMIT_DATA, (2 * CAP_BYTES, 2 * CAP_BYTES))
            message = ""
            before = peak_bytes()
            try:
                call()
            except (ShardtrainError, ValueError) as error:
                message = str(error)
            result = json.dumps([peak_bytes() - before, message[:3000]])
            os.write(sender, result.encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(sender)
    try:
        is_ready, _, _ = select.select([receiver], [], [], patience.seconds(patience_seconds))
        answer = os.read(receiver, 2**16) if is_ready else b""
    finally:
        os.close(receiver)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert answer, "the fork failed, or did not answer in time"
    grown, message = json.loads(answer)
    return grown, message


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main(kind: str, path: str) -> None:
    from shardtrain.data import sources
    from shardtrain.utils.errors import ShardtrainError

    module = sources.find(kind)
    if kind == "parquet":
        import pyarrow.parquet  # noqa: F401 - the memory of libraries does not count
    if kind == "huggingface":
        import datasets  # noqa: F401
    resource.setrlimit(resource.RLIMIT_DATA, (CAP_BYTES, CAP_BYTES))
    result = Measured()
    before = peak_bytes()
    start = cpu_seconds()
    try:
        source = module.open_source(sources.Request(path=path))
        for _, row in islice(sources.every_row(source), MAX_ROWS):
            result.rows += 1
            if isinstance(row, sources.BadRow):
                result.bad_rows += 1
                result.last_bad_row = str(row)
    except ShardtrainError as error:
        result.error = str(error)
    except Exception as error:
        result.error = f"unexpected\n{type(error).__name__}: {error}"
    result.grown_bytes = peak_bytes() - before
    result.seconds = cpu_seconds() - start
    print(json.dumps(asdict(result)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
