"""Files of strangers are opened first in a process of their own, with hard limits on memory, time and what it says.

Libraries that read a tokenizer, a Parquet or an Arrow file are made of other languages: one that asks for too much
memory ends its process, and no exception tells of it. So the process that ends is a child, which the kernel holds to
its limits and which knows none of this one's environment; afterwards this process opens the same bytes, known by their
hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.utils import python_child
from shardtrain.utils.errors import ShardtrainError
from shardtrain.utils.limits import is_out_of_memory

PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""What of the environment a process needs to find Python and its packages: no token, no proxy."""
_ANSWER_BYTES = 16 * 1024
_WHOLE_BYTES = 2**28
_WALL_FACTOR = 4
_START_SECONDS = 60
"""A busy machine gives a process a part of its time, and may be slow to start it."""


@dataclass(frozen=True)
class Limits:
    """Bounds of opening one artefact: data.artefact_memory_bytes and data.artefact_seconds (of CPU time)."""

    memory_bytes: int = 2**30
    seconds: int = 30


_limits = Limits()
_proved: set[str] = set()
_spent = 0.0


class Refused(Exception):
    """An artefact cannot be opened within its bounds; the text completes a sentence about it."""


def set_limits(limits: Limits) -> None:
    """Set the bounds of what this process opens from now on."""
    global _limits
    _limits = limits


def limits() -> Limits:
    """The bounds of what this process opens."""
    return _limits


def spent_seconds() -> float:
    """CPU time of the children of this process since it was last asked for."""
    global _spent
    seconds = _spent
    _spent = 0.0
    return seconds


def prove(kind: str, request: Mapping[str, Any], key: str) -> None:
    """Let a child open an artefact, unless one of this ``key`` (hash and what else decides) was proved before.

    Raises:
        Refused: it goes beyond the bounds, or the child says what is wrong with it.
    """
    if key in _proved:
        return
    answer = _ask({**request, "kind": kind, "memory_bytes": _limits.memory_bytes, "seconds": _limits.seconds})
    if answer:
        raise Refused(answer)
    _proved.add(key)


def _ask(request: Mapping[str, Any]) -> str:
    """Start a child that opens the artefact; gives what is wrong with it, empty where nothing is."""
    global _spent
    command = python_child.command("shardtrain.data.sandbox")
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # Threads take address space, of which the child has little, and Arrow's other pools reserve a GiB of it at once.
    environment |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    before = _of_children()
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    # RLIMIT_CPU does not count a child that sleeps, so its time on the clock is bounded too.
    late = threading.Timer(_START_SECONDS + _WALL_FACTOR * _limits.seconds, child.kill)
    late.daemon = True
    late.start()
    try:
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(request).encode())
            child.stdin.close()
        # One line, up to the most that it may say: a child that was taken over could write without end.
        answer = b""
        while len(answer) < _ANSWER_BYTES and not answer.endswith(b"\n"):
            part = os.read(child.stdout.fileno(), _ANSWER_BYTES - len(answer))
            if not part:
                break
            answer += part
    finally:
        late.cancel()
        child.kill()  # one that has answered has nothing left to do
        status = child.wait()
        _spent += _of_children() - before
        for pipe in filter(None, (child.stdin, child.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()
    return _verdict(answer, status)


def _of_children() -> float:
    """CPU seconds of the children of this process that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _verdict(answer: bytes, status: int) -> str:
    """What is wrong, from the child's answer or from how it ended; empty where nothing is."""
    try:
        refused = json.loads(answer)["refused"]
        if isinstance(refused, str):
            return refused
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    # It ended without an answer: the kernel or the timer ended it for its time, or it could not get memory.
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than data.artefact_seconds={_limits.seconds} to open"
    return f"needs more than data.artefact_memory_bytes={_limits.memory_bytes} to open, or its library fails on it"


# --- the child


def _lower(kind: int, limit: int) -> None:
    """Set a limit, or keep the one that is there where it is lower: a scheduler's cannot be raised."""
    _, most = resource.getrlimit(kind)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(kind, (limit, most))


def _bound(memory_bytes: int, seconds: int, file_bytes: int = 0) -> None:
    """Hold this process to its limits; ``file_bytes`` are those of files that it will map, which takes no memory."""
    if sys.platform == "linux":  # elsewhere the kernel does not hold a process to it
        sizes = [int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()]
        mapped, resident, _, _, _, data, _ = sizes
        more = max(memory_bytes - resident, 0)
        # A file may be mapped twice; what is in no file stays bounded however large (and empty) the file is.
        _lower(resource.RLIMIT_AS, mapped + more + 2 * file_bytes)
        _lower(resource.RLIMIT_DATA, data + more)
    _lower(resource.RLIMIT_CPU, seconds)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _open_tokenizer(request: Mapping[str, Any]) -> None:
    from shardtrain.data.tokenizers.open_file import open_content

    path = Path(request["path"])
    _bound(request["memory_bytes"], request["seconds"])
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != request["sha256"]:
        raise ValueError("it was changed while it was opened")
    tokenizer = open_content(path, content, request["option"], request["spec"])
    # Some files open well and fail, or take for ever, on the first text: words, a long run, all kinds of characters.
    for text in ("hello world", "a" * 1000, "".join(map(chr, range(32, 1000))), "日本 é\u0301 🦜\n\t"):
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)


def _open_parquet(request: Mapping[str, Any]) -> None:
    import pyarrow.parquet

    # half of the limit: the trainer needs as much again for itself and for what it makes of the columns
    _bound(request["memory_bytes"] // 2, request["seconds"])
    pyarrow.set_cpu_count(1)
    parquet = pyarrow.parquet.ParquetFile(request["path"], pre_buffer=False)
    for _ in parquet.iter_batches(batch_size=request["rows"], row_groups=request["groups"], use_threads=False):
        pass


def _open_arrow(request: Mapping[str, Any]) -> None:
    import datasets  # reads the files just as this process's parent will

    from shardtrain.data.sources._batches import rows_of_batch

    _bound(request["memory_bytes"], request["seconds"], request["file_bytes"])
    try:
        if "folder" in request:
            saved = datasets.load_from_disk(request["folder"])
            opened = list(saved.values()) if isinstance(saved, Mapping) else [saved]
        else:
            opened = [datasets.Dataset.from_file(path) for path in request["paths"]]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ShardtrainError from None  # the parent finds the same, and knows which file it is
    for dataset in opened:
        table = dataset.data.table
        # Lengths and offsets that lead out of their buffers would be followed; of large files none is read whole.
        table.validate(full=table.nbytes <= _WHOLE_BYTES)
        rows = dataset.with_format("arrow")
        for index in {0, len(rows) // 2, len(rows) - 1} if len(rows) else ():
            list(rows_of_batch(rows[index], request["max_row_bytes"]))


_OPENERS = {"tokenizer": _open_tokenizer, "parquet": _open_parquet, "arrow": _open_arrow}


def main() -> None:
    """Open what standard input names; says one line of JSON."""
    request = json.loads(sys.stdin.buffer.read())
    try:
        _OPENERS[request["kind"]](request)
        refused = ""
    except MemoryError:
        refused = f"needs more than data.artefact_memory_bytes={request['memory_bytes']} to open"
    except ShardtrainError:
        refused = ""  # within the limits: who opens it next tells what is wrong with it
    except BaseException as error:  # a library may raise anything; panics of Rust are not an Exception
        refused = f"cannot be opened ({' '.join(str(error).split())[:200]})"
        if is_out_of_memory(error):
            refused = f"needs more than data.artefact_memory_bytes={request['memory_bytes']} to open"
    os.write(1, json.dumps({"refused": refused[:1000]}).encode() + b"\n")
    os._exit(0)  # nothing that was loaded gets another turn


if __name__ == "__main__":
    main()
