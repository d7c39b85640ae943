"""Per-rank logging to a file and, optionally, the console. Secrets are redacted in both.

Modules use ``from shardtrain.utils.log import logger``. The trainer calls ``setup`` once per process.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.redact import redact, visible
from shardtrain.utils.variables import is_whole_number

logger = logging.getLogger("shardtrain")

lost_lines: list[str] = []
"""Warnings about log files of this process that lost lines.

The launcher repeats those of ranks without a terminal.
"""
MANY_RANKS = 1024
"""Maximum world size with a log file for each rank. More files would overload shared storage."""
_MOST_COLUMNS = 96
"""Maximum width of messages on a terminal, equal to the width of the table of steps."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class _Kept(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextlib.contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Collect the package's warnings in a list.

    Use it before ``setup``, when Python would print them unformatted.
    """
    # Without a handler, Python's last resort would print each warning.
    lines: list[str] = []
    handler = _Kept(lines)
    propagates = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def setup(
    rank: int,
    world_size: int,
    run_folder: Path,
    file_pattern: str,
    console: bool = True,
    color: bool = True,
    prefix: bool = False,
) -> Path:
    """Send the log to this rank's file and, optionally, to stderr. Return the path of the file.

    A second call replaces the first. With more than 1,024 ranks, only the first rank of each node logs
    everything. The others log warnings and errors, and create their file with the first one.

    Args:
        file_pattern: Path below ``run_folder`` in which ``{rank}`` is replaced. A resumed run appends to
            the file.
        console: Also log to stderr.
        color: Allow colors. They are still off if the stream is not a terminal, or with ``NO_COLOR`` or in Slurm.
        prefix: Start each line with ``[rank3]``, for consoles that ranks share.

    Raises:
        ConfigError: ranks would share a file.
        StorageError: the file cannot be opened.
    """
    if world_size > 1 and "{rank}" not in file_pattern:
        raise ConfigError(
            Problem(
                "metrics.save_log_file",
                file_pattern,
                rule=f"would make {world_size} ranks write one file",
                fix="put {rank} into the name",
            )
        )
    path = Path(run_folder) / file_pattern.replace("{rank}", str(rank))
    # The first rank of a node reports for all of them.
    only_warnings = world_size > MANY_RANKS and os.environ.get("LOCAL_RANK", "0") != "0"
    try:
        file = _FileHandler(path, opens_late=only_warnings)
    except OSError as error:
        raise storage_errors.cannot(
            "write the log file", path, error, "set metrics.save_log_file"
        ) from error
    # Open the new file first: if that fails, the old log still works.
    reset()
    if only_warnings:
        file.setLevel(logging.WARNING)
    start = f"[rank{rank}] " if prefix else ""
    handlers: list[logging.Handler] = [file]
    file.setFormatter(_LineFormatter(start))
    if console:
        handlers.append(_ConsoleHandler("" if _torchrun_adds_prefix(rank) else start, color))
    for handler in handlers:
        # On the handlers, not the logger: a logger's filters do not see the records of its children.
        handler.addFilter(SecretFilter())
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # Libraries add handlers to the root logger. With propagation, lines would appear twice, without
    # redaction.
    logger.propagate = False
    return path


def _torchrun_adds_prefix(rank: int) -> bool:
    """True if ``torchrun --tee`` shows stderr and starts each line with this rank's number.

    Torchrun redirects stderr to ``<local rank>/stderr.log``. Its prefix has the local rank, so on other
    nodes than the first the lines need the global rank as well.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("LOCAL_RANK") != str(rank):
        return False
    try:
        target = Path(os.readlink("/proc/self/fd/2"))
    except OSError:  # no /proc, as on macOS
        return False
    return target.name == "stderr.log" and target.parent.name == str(rank)


@contextlib.contextmanager
def without_torchao_warnings() -> Iterator[None]:
    """Silence the warnings of importing torchao, also by ``transformers``, about extensions that nobody requested."""
    # Both loggers warn during the import.
    noisy = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [one.level for one in noisy]
    for one in noisy:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for one, level in zip(noisy, levels, strict=True):
            one.setLevel(level)


def reset() -> None:
    """Undo ``setup``: close the handlers and restore Python's defaults."""
    # Keep handlers of other code, such as those of a test.
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, _LineFormatter):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def console_ranks() -> set[int]:
    """Return the ranks that log to the console, from the variable ``LOG_RANK``: a list like ``0,1``, by default 0.

    Raises:
        ConfigError: the variable is not a list of ranks.
    """
    # An empty value means the default.
    text = os.environ.get("LOG_RANK", "").strip() or "0"
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(is_whole_number(part) for part in parts):
        raise ConfigError(
            Problem(
                "LOG_RANK",
                text,
                rule="is not a list of ranks",
                fix='write it like "0" or "0,1"',
            )
        )
    return {int(part) for part in parts}


def color_allowed(stream: TextIO, wanted: bool = True) -> bool:
    """True if ANSI colors are allowed: ``stream`` is a terminal, not in a Slurm job, and ``NO_COLOR`` is not set.

    An empty ``NO_COLOR`` counts as not set (https://no-color.org).
    """
    return wanted and not os.environ.get("NO_COLOR") and redraw_allowed(stream)


def redraw_allowed(stream: TextIO) -> bool:
    """True if lines of ``stream`` can be redrawn: a capable terminal, not in a Slurm job, whose output is a file."""
    return (
        not os.environ.get("SLURM_JOB_ID") and os.environ.get("TERM") != "dumb" and stream.isatty()
    )


class SecretFilter(logging.Filter):
    """Redact secrets and terminal control sequences in a record's message, its colored form and its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the record in place and let it pass."""
        # A message may contain text from files or other programs.
        record.msg = redact(visible(_ANSI.sub("", record.getMessage())))
        record.args = None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(visible(record.exc_text))
        if record.stack_info:
            record.stack_info = redact(visible(record.stack_info))
        colored = getattr(record, "colored", None)
        if colored:
            record.colored = redact(visible(colored, colors=True))
        terminal = getattr(record, "terminal", None)
        if terminal:
            record.terminal = redact(visible(terminal, colors=True))
        return True


class _LineFormatter(logging.Formatter):
    """Format lines as ``[rank1] 2026-01-31 12:00:00 INFO message``, or for a terminal.

    On a terminal the line has no time, is wrapped at spaces, and has the level only for warnings and
    errors. A record may have separate forms: ``colored`` if colors are allowed, ``terminal`` for a
    terminal.
    """

    def __init__(self, start: str) -> None:
        super().__init__(start + "%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._start = start
        self.color = self.terminal = False

    def formatMessage(self, record: logging.LogRecord) -> str:
        colored = getattr(record, "colored", None)
        if self.terminal:
            row = getattr(record, "terminal", None) or colored
            # A record without a row is ordinary text.
            if not row:
                lines = self._wrapped(record)
            elif self.color:
                lines = str(row).split("\n")
            else:
                lines = _ANSI.sub("", row).split("\n")
            return "\n".join(self._start + line for line in lines)
        if self.color and colored:
            record.message = colored
        line = super().formatMessage(record)
        if self.color:
            return line
        return _ANSI.sub("", line)

    def _wrapped(self, record: logging.LogRecord) -> list[str]:
        message = record.message
        if record.levelno > logging.INFO:
            message = f"{record.levelname.lower()}: {message}"
        # Very narrow terminals still get readable lines.
        width = max(20, min(shutil.get_terminal_size().columns, _MOST_COLUMNS) - len(self._start))
        lines: list[str] = []
        for line in message.split("\n"):
            # Keep spaces within a line, because tables align with them. Do not break paths and numbers.
            lines += textwrap.wrap(
                line, width, subsequent_indent="    ", replace_whitespace=False, drop_whitespace=True,
                break_long_words=False, break_on_hyphens=False,
            ) or [""]  # fmt: skip
        color = ""
        if self.color:
            color = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}.get(record.levelno, "")
        if not color:
            return lines
        return [f"{color}{line}\x1b[0m" for line in lines]


class _FileHandler(logging.Handler):
    """Append each record with one write. Write errors do not stop the run and are reported once, on stderr.

    If the file or its folder is removed, it is created again.
    """

    def __init__(self, path: Path, opens_late: bool = False) -> None:
        super().__init__()
        self.path = path
        self.num_lost = 0
        self._descriptor = -1 if opens_late else self._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, except those that are only for the console."""
        if getattr(record, "console_only", False):
            # The file gets each line once, and reports of waiting are only for a person.
            return
        data = (self.format(record) + "\n").encode(errors="replace")
        try:
            # The file may have been rotated or removed.
            if self._descriptor < 0 or self._is_gone():
                descriptor = self._open()
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                self._descriptor = descriptor
            # Processes may share a file, so write each line at once. A full disk may accept a part of it:
            # remove it.
            size = os.fstat(self._descriptor).st_size
            written = os.write(self._descriptor, data)
            if written != len(data):
                os.ftruncate(self._descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # One warning is enough: the next lines fail for the same reason.
            self.num_lost += 1
            if self.num_lost == 1:
                problem = redact(str(storage_errors.cannot("write the log file", self.path, error)))
                lost_lines.append(f"{problem}; its lines are lost until this is fixed")
                with contextlib.suppress(OSError, ValueError):
                    print(lost_lines[-1], file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the file."""
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)
        super().close()

    def _open(self) -> int:
        return atomic_io.open_file(
            self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, create_folder=True
        )

    def _is_gone(self) -> bool:
        try:
            current = os.lstat(self.path)
            opened = os.fstat(self._descriptor)
        except FileNotFoundError:
            return True
        except OSError:
            # The storage does not answer. The file may still exist.
            return False
        # Another file may have the same name.
        return (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino)


class _ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Log to the current ``sys.stderr``, which a progress display may replace so lines do not break its drawing."""

    def __init__(self, start: str, color: bool) -> None:
        logging.Handler.__init__(self)
        self._formatter = _LineFormatter(start)
        self._color_wanted = color
        self.setFormatter(self._formatter)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The current standard error."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self._formatter.color = color_allowed(sys.stderr, self._color_wanted)
        self._formatter.terminal = sys.stderr.isatty()
        super().emit(record)
