"""Report failures: one line in the terminal, the traceback in the rank's log, and ``exit.json`` for programs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, get_type_hints

from shardtrain.checkpoint.storage import Place
from shardtrain.config.schema import Config
from shardtrain.launch import run_ends
from shardtrain.utils import activity, atomic_io, bounded_reads, limits, log, storage_errors
from shardtrain.utils.checked_json import record_of
from shardtrain.utils.errors import ConfigError, DataError, FolderTaken, ShardtrainError
from shardtrain.utils.redact import one_line, redact, visible
from shardtrain.utils.units import format_bytes

GENERAL = 1
PEER = 6
OUT_OF_MEMORY = 7
PREEMPTED = 75
NOT_SAVED = 76
MEANINGS = frozenset({0, 2, 3, 4, 5, PEER, OUT_OF_MEMORY, 8, PREEMPTED, NOT_SAVED, 93})
"""Exit statuses with a documented meaning for users and schedulers."""
RETRYABLE = frozenset({6, 8, 75, 76})
MESSAGE_LENGTH = 500
END_LINES = ("error[", "stopped[")
"""Prefixes of the lines that report how a run ended."""
STOP_LINE = re.compile(r"stopped\[(\d+)\]: ")
"""Start of the line about a run that was stopped on request, with its code."""
SUPERVISED = "SHARDTRAIN_SUPERVISED"
"""Variable that is set if another command or script of shardtrain supervises this process.
It expects status 75.
"""
RESERVED = ".exit.json.reserved"
_RESERVED_BYTES = 16 * 1024
_MAX_RECORD_BYTES = 2**22
IN = "in "
"""Prefix of the note on an exception that contains the step."""

_KILLED: dict[int, str] = {
    signal.SIGKILL: "was killed by signal 9 (the kernel sends it when memory runs out)",
    signal.SIGXCPU: "was killed by signal 24 (the CPU time of `ulimit -t` is used up); raise the limit",
    signal.SIGXFSZ: "was killed by signal 25 (a file exceeded the size of `ulimit -f`); raise the limit",
    signal.SIGSTOP: "was stopped (by SIGSTOP, or a read from the terminal in the background) for more than "
    "twice comm.hang_timeout_seconds, and then killed by its launcher",
}
_PEER_TYPES = {"DistBackendError", "DistNetworkError", "DistStoreError", "ForgedError", "PeerError"}
# Substrings of errors of gloo, NCCL and the store about a lost peer. The
# rank that raises one is not the cause.
_PEER_WORDS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL communicator was abort",
)
_OF_RANK = re.compile(r"rank (\d+) on (\S+): (.+)")


@dataclass(frozen=True)
class Failure:
    """End of one rank.

    Attributes:
        where: Source position of the error, such as ``file.py:12``.
        time_seconds: Time since the epoch by the clock of the host. The failure with the
            smallest time is the first one of a run. For a failure of another node, the time is
            converted to this node's clock.
        is_peer: True if this rank only lost its connection to a rank that had failed.
        problems: Lines of a ConfigError.
        place: Step and data of an error in a step: ``step 41 (sequences 320 to 327)``.
        phase: Activity of a hanging rank. The message of such a failure
            is a sentence about the rank.
        is_sentence: True if the message is written for users. The report then omits
            the exception's class and source line.
        leaves_folder_alone: True if another run writes to the run's folder. Its
            exit.json and logs must not be changed.
        step: Last step that this rank completed, or 0 if unknown.
        lost_lines: Warning about log lines of this rank that could not be written.
    """

    rank: int | None
    host: str
    kind: str
    message: str
    where: str
    time_seconds: float
    exit_code: int
    is_peer: bool = False
    trace: str = ""
    problems: tuple[str, ...] = ()
    place: str = ""
    phase: str = ""
    is_sentence: bool = False
    leaves_folder_alone: bool = False
    step: int = 0
    lost_lines: str = ""


def describe(error: BaseException, rank: int) -> Failure:
    """Convert an exception of this process to a Failure. Values of secret
    environment variables are masked.
    """
    if isinstance(error, KeyboardInterrupt):
        return stopped(rank, str(error) or "SIGINT")
    kind = type(error).__name__
    text = visible(" ".join(str(error).split()))
    if not isinstance(error, ShardtrainError) and limits.is_out_of_memory(error):
        text = limits.explain(error)
    if isinstance(error, SystemExit):
        text = f"sys.exit({text or 'None'}) was called before the end of the run"
    host = socket.gethostname()
    # If all ranks raise the same error, its text names the rank on which it occurred.
    named_rank = None
    if isinstance(error, ShardtrainError):
        named_rank = _OF_RANK.fullmatch(text)
    if named_rank is not None:
        rank = int(named_rank[1])
        host = named_rank[2]
        text = named_rank[3]
    message = redact(text)
    if len(message) > MESSAGE_LENGTH:
        message = message[: MESSAGE_LENGTH - 3] + "..."
    # A lost peer makes collectives fail on the other ranks. Their errors are not the cause.
    is_peer = kind in _PEER_TYPES
    if isinstance(error, RuntimeError) and any(word in text for word in _PEER_WORDS):
        is_peer = True
    problems: tuple[str, ...] = ()
    if isinstance(error, ConfigError):
        problems = tuple(redact(visible(str(problem), lines=False)) for problem in error.problems)
    # A note of the exception names the step.
    place = ""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(IN)]
    if notes:
        place = notes[0].removeprefix(IN)
    return Failure(
        rank=rank,
        host=host,
        kind=kind,
        message=message,
        where=_origin(error.__traceback__),
        time_seconds=time.time(),
        exit_code=_exit_code(error, kind, text, is_peer),
        is_peer=is_peer,
        trace=redact(visible("".join(traceback.format_exception(error)))),
        problems=problems,
        place=place,
        is_sentence=isinstance(error, ShardtrainError),
        leaves_folder_alone=isinstance(error, FolderTaken),
        **own_end(),
    )


def own_end() -> dict[str, Any]:
    """Return the facts that each rank reports when it ends: ``step`` and ``lost_lines``."""
    return {"step": activity.now().done, "lost_lines": "; ".join(log.lost_lines)}


def stop_status(config: Config) -> int:
    """Return the exit status of a run that has saved after a request to stop."""
    if SUPERVISED in os.environ:
        return PREEMPTED
    return config.checkpoint.stop_exit_code


def killed(rank: int | None, signal_number: int, time_seconds: float) -> Failure:
    """Return the failure of a process that was killed by a signal, so it could not report the failure itself.

    Args:
        rank: None for the process that checks data, tokenizer and model before the ranks start.
        signal_number: SIGSTOP if the process was stopped until its launcher killed it.
    """
    what = "the process that checks data, tokenizer and model before ranks start "
    if rank is not None:
        what = ""
    how = _KILLED.get(signal_number, f"was killed by signal {_numbered(signal_number)}")
    cgroup_limit = limits.cgroup_memory()[0]
    if signal_number == signal.SIGKILL and cgroup_limit:
        how += f", under memory of the cgroup={format_bytes(cgroup_limit)}"
    return Failure(rank, socket.gethostname(), "", what + how, "", time_seconds, PEER)


def _numbered(signal_number: int) -> str:
    """Return the number of a signal with its name.

    >>> _numbered(11), _numbered(40)
    ('11 (SIGSEGV)', '40')
    """
    names = {member.value: member.name for member in signal.Signals}
    name = names.get(signal_number)
    return f"{signal_number} ({name})" if name else str(signal_number)


def ended(rank: int, exit_code: int, time_seconds: float) -> Failure:
    """Return the failure of a rank that called ``os._exit`` or ``sys.exit`` without an exception.

    If the status equals an exit code of shardtrain, use the general code instead, because the rank did not
    choose its status by shardtrain's list.
    """
    message = f"exited with status {exit_code} without an exception"
    status = GENERAL if exit_code in MEANINGS else exit_code
    return Failure(rank, socket.gethostname(), "", message, "", time_seconds, status)


def lost_with_node(rank: int, host: str) -> Failure:
    """Return the failure of a node that did not report how its ranks ended. ``rank`` is its first rank."""
    message = "was lost with its node, which did not report how its ranks ended; check the machine and its network"
    return Failure(rank, host, "", message, "", time.time(), PEER)


def stopped(
    rank: int | None,
    reason: str,
    newest: Place | None = None,
    run_end: run_ends.RunEnd = run_ends.AT_ONCE,
) -> Failure:
    """Return the failure of a process that stopped on request without saving.

    Args:
        rank: None before ranks exist.
        reason: Request to stop, such as "SIGTERM".
        newest: The last checkpoint.
    """
    kept = f"; the last checkpoint is {newest}" if newest else ""
    message = run_end.line.format(reason=reason, kept=kept)
    return Failure(rank, socket.gethostname(), "", message, "", time.time(), run_end.code)


def crash_loop(why: str, code: int, newest: Place | None, run_folder: Path) -> Failure:
    """Return the failure of a run that would fail again after a restart.

    ``why`` contains the step if it is known.
    """
    kept = "there is no checkpoint"
    if newest:
        kept = f"the last checkpoint is {newest}"
    message = f"{why} ({kept}), and each ended with the error above ({code})"
    if step := re.search(r"in step (\d+)", why):
        message += f"; its data: shardtrain data show {shlex.quote(str(run_folder))} --step {step.group(1)}"
    return Failure(0, socket.gethostname(), "CrashLoop", message, "", time.time(), 93)


def culprit(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others: the earliest one of a rank that did not only lose a peer.

    Its ``step`` is the last step that any of the ranks completed.
    """
    # False sorts before True, so ranks that only lost a peer come last.
    ordered = sorted(failures, key=lambda failure: (failure.is_peer, failure.time_seconds))
    return replace(ordered[0], step=max(failure.step for failure in ordered))


def lines(failure: Failure, log_path: Path | str, world_size: int) -> list[str]:
    """Return the lines for the terminal: one line, or one per problem of a configuration."""
    return [one_line(line) for line in _lines(failure, log_path, world_size)]


def _lines(failure: Failure, log_path: Path | str, world_size: int) -> list[str]:
    if failure.exit_code in (PREEMPTED, NOT_SAVED):
        return [f"stopped[{failure.exit_code}]: {failure.message}"]
    start = f"error[{failure.exit_code}]: "
    if failure.problems:
        return [start + problem for problem in failure.problems]
    # With one rank, its number has no meaning.
    rank = ""
    if world_size > 1:
        rank = f"rank {failure.rank} (host {failure.host})"
    if failure.is_sentence:
        if rank:
            rank += ": "
        return [f"{start}{rank}{failure.message}; see {log_path}"]

    # Name the class of an exception. The message of a hang is a sentence about the rank.
    has_class = bool(failure.kind) and not failure.phase
    cause = failure.message
    if has_class:
        cause = ": ".join(filter(None, (failure.kind, failure.message)))
    if rank and has_class:
        cause = f"{rank} failed: {cause}"
    elif rank:
        cause = f"{rank} {cause}"
    line = start + cause
    if failure.where:
        line += f" ({failure.where})"
    # Before ranks exist, there is no log.
    if failure.rank is not None and failure.trace:
        line += f"; full trace: {log_path}"
    elif failure.rank is not None:
        line += f"; see {log_path}"
    return [line]


def append_trace(failure: Failure, log_path: Path) -> None:
    """Append the traceback to the rank's log, whose path is in the error line. Ignore write errors.

    For an error in the configuration or the data, append only the message,
    because the traceback does not help.
    """
    text = failure.trace
    if failure.is_sentence and failure.exit_code in (ConfigError.exit_code, DataError.exit_code):
        # Extract the message from the traceback, because ``failure.message`` may be truncated.
        message = text.rpartition(f".{failure.kind}: ")[2].strip() or failure.message
        text = "\n".join(f"error[{failure.exit_code}]: {line}" for line in message.splitlines())
    if not text:
        return
    if not text.endswith("\n"):
        text += "\n"
    try:
        descriptor = atomic_io.open_file(
            log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, create_folder=True
        )
        with open(descriptor, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        pass


def write_record(failure: Failure, path: str | os.PathLike[str]) -> None:
    """Write a failure as JSON for the parent process, with the keys of torchelastic and of shardtrain."""
    stamp = int(failure.time_seconds)
    extra = {"py_callstack": failure.trace, "timestamp": str(stamp)}
    record = {
        "message": {"message": f"{failure.kind}: {failure.message}", "errorCode": failure.exit_code}
    }
    record["message"]["extraInfo"] = extra
    # If the disk is full, the parent only gets the exit status.
    with contextlib.suppress(OSError):
        _replace_file(Path(path), {**record, "shardtrain": asdict(failure)})


def read_record(path: str | os.PathLike[str]) -> Failure | None:
    """Read the failure that a rank has written. Return None if the file does not exist or is incomplete."""
    try:
        return from_fields(
            json.loads(bounded_reads.read_all(path, _MAX_RECORD_BYTES))["shardtrain"]
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def from_fields(fields: dict[str, Any]) -> Failure:
    """Build a failure from JSON fields written with ``dataclasses.asdict``.

    Raises:
        TypeError, KeyError, ValueError: ``fields`` does not describe a failure.
    """
    report = replace(Failure(**fields), problems=tuple(fields["problems"]))
    for name, kind in get_type_hints(Failure).items():
        value = getattr(report, name)
        # JSON does not distinguish 10 and 10.0.
        expected = {float: int | float, tuple[str, ...]: tuple}.get(kind, kind)
        if not isinstance(value, expected):
            raise TypeError(f"{name} of a failure must not be {value!r}")
    if not all(isinstance(problem, str) for problem in report.problems):
        raise TypeError("problems of a failure must be texts")
    if not 0 < report.exit_code < 256:
        raise ValueError(
            f"the exit code of a failure must be from 1 to 255, not {report.exit_code}"
        )
    return report


def write_exit(run_folder: Path, failure: Failure | None, code: int, step: int = 0) -> None:
    """Write ``exit.json``: code, class, message, rank, host, retryable and, if known, the last step.

    ``step`` is the last step that the ranks reported if there is no failure. If no rank reported a step, the
    last logged step is written.

    If the file cannot be written, print the error. The exit status does not change.
    """
    try:
        if failure:
            step = step or failure.step
        _write_exit(run_folder, failure, code, step)
    except Exception as error:
        problem = redact(visible(f"{type(error).__name__}: {error}", lines=False))
        with contextlib.suppress(OSError, ValueError):
            print(
                f"cannot write {run_folder / 'exit.json'}: {problem}", file=sys.stderr, flush=True
            )


def _write_exit(run_folder: Path, failure: Failure | None, code: int, step: int) -> None:
    record: dict[str, Any] = {
        "code": code,
        "class": "",
        "message": "",
        "rank": None,
        "host": socket.gethostname(),
        "retryable": code in RETRYABLE,
    }
    if failure:
        record |= {"class": failure.kind, "message": failure.message, "host": failure.host}
        # A request to stop concerns all ranks.
        if code not in (PREEMPTED, NOT_SAVED):
            record["rank"] = failure.rank
        if failure.phase:
            record["phase"] = failure.phase
    record["last_step"] = step or last_step(run_folder / "metrics.jsonl")
    reserve = run_folder / RESERVED
    try:
        _replace_file(run_folder / "exit.json", record)
    except OSError as error:
        _write_elsewhere(run_folder / "exit.json", reserve, record, error)
    with contextlib.suppress(OSError):
        reserve.unlink(missing_ok=True)


def reserve_exit(run_folder: Path) -> None:
    """Reserve disk space for ``exit.json``, so it can still be written when the disk is full.
    Raises OSError.
    """
    atomic_io.write(run_folder / RESERVED, b" " * _RESERVED_BYTES, durable=True)


def killed_before(run_folder: Path) -> str:
    """Return the note on a run that has left no ``exit.json``."""
    step = last_step(run_folder / "metrics.jsonl") or 0
    return (
        f"note: the last run in {run_folder} was killed after step {step} without writing "
        "exit.json: by SIGKILL, which the kernel also sends when memory runs out, "
        "or because the machine went down"
    )


def _write_elsewhere(path: Path, reserve: Path, record: dict[str, Any], error: OSError) -> None:
    """Write ``exit.json`` to its reserved space or, if that fails, to the temporary directory,
    and print the path.
    """
    # Pad the text to the size of the reserved file, so no block has to be allocated on a full disk.
    data = json.dumps(record, indent=2).encode().ljust(_RESERVED_BYTES - 1) + b"\n"
    try:
        descriptor = atomic_io.open_file(reserve, os.O_WRONLY)
        try:
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
        os.replace(reserve, path)
        return
    except OSError:
        pass
    where = ""
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix="shardtrain-exit-", suffix=".json")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        where = f"; it was written to {name}"
    # Even without the file, the scheduler gets the exit status.
    print(
        f"cannot write {path}: {storage_errors.explain(error, path)}{where}",
        file=sys.stderr,
        flush=True,
    )


def last_step(metrics: Path) -> int | None:
    """Return the step of the last complete line of ``metrics.jsonl``, or None."""
    try:
        # Read only the end, because the file of a long run is large.
        tail: Sequence[bytes] = bounded_reads.end(metrics, 65_536).splitlines()
    except OSError:
        return None
    # The last line may be incomplete.
    for line in reversed(tail):
        record = record_of(line)
        if record is not None and type(record.get("step")) is int:
            return int(record["step"])
    return None


def _exit_code(error: BaseException, kind: str, text: str, is_peer: bool) -> int:
    if isinstance(error, ShardtrainError):
        return error.exit_code
    # Shardtrain never raises SystemExit, so the user's code or a library did.
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int) or error.code in MEANINGS:
            return GENERAL
        return error.code & 0xFF or GENERAL
    if limits.is_out_of_memory(error):
        return OUT_OF_MEMORY
    return PEER if is_peer else GENERAL


def _origin(trace: TracebackType | None) -> str:
    frames = traceback.extract_tb(trace)
    if frames:
        return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    return ""


def _replace_file(path: Path, record: dict[str, Any]) -> None:
    """Replace a JSON file atomically."""
    atomic_io.write(path, json.dumps(record, indent=2) + "\n", create_folder=True)
