"""Log lines of one rank: a file per rank that is appended to, the console where asked for, and no secrets in either.

Every module says ``from shardtrain.utils.log import logger``; the trainer calls ``setup`` once per process.
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

logger = logging.getLogger("shardtrain")

lost_lines: list[str] = []
"""Warnings about log files of this process that lost lines. The launcher repeats those of ranks without a terminal."""
MANY_RANKS = 1024
"""Above so many ranks a log file of each would be a flood of files on storage that all nodes share."""
_MOST_COLUMNS = 96
"""Of a message on a terminal, as of its table of steps."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class _Kept(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextlib.contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Warnings of the package as lines: no log has been set up, and Python's would print them bare."""
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
    """Send the log to this rank's file, and to stderr where ``console`` is set; returns the path of the file.

    ``file_pattern`` is a path below ``run_folder`` in which ``{rank}`` becomes the rank; the file is appended to, so
    a resumed run continues its log. ``prefix`` starts each line with ``[rank3]``, for consoles shared by ranks.
    ``color`` permits colours; a stream that is not a terminal, ``NO_COLOR`` and ``SLURM_JOB_ID`` forbid them. A second
    call replaces the first. Above 1,024 ranks only the first rank of each node has a file from the start; any other has
    one from its first warning on, and in it warnings and errors. Raises ConfigError where ranks would share a file,
    StorageError where it cannot be opened.
    """
    if world_size > 1 and "{rank}" not in file_pattern:
        rule = f"would make {world_size} ranks write one file"
        raise ConfigError(Problem("metrics.save_log_file", file_pattern, rule, "put {rank} into the name"))
    path = Path(run_folder) / file_pattern.replace("{rank}", str(rank))
    only_warnings = world_size > MANY_RANKS and os.environ.get("LOCAL_RANK", "0") != "0"
    try:
        file = _FileHandler(path, opens_late=only_warnings)
    except OSError as error:
        raise storage_errors.cannot("write the log file", path, error, "set metrics.save_log_file") from error
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
    # Libraries put handlers on the root logger; lines would then appear twice, and unmasked.
    logger.propagate = False
    return path


def _torchrun_adds_prefix(rank: int) -> bool:
    """True if ``torchrun --tee`` shows stderr and starts each line with this rank's number.

    Torchrun redirects stderr to ``<local rank>/stderr.log``. Its prefix has the local rank, so on other nodes than the
    first the lines need the global rank as well.
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
    """Close the handlers and undo ``setup``; a process that logs afterwards is back to Python's defaults."""
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, _LineFormatter):
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def console_ranks() -> set[int]:
    """Ranks that write to the console, from the variable ``LOG_RANK``: ``0`` unless set, or a list like ``0,1``.

    Raises ConfigError where the variable is not a list of ranks.
    """
    text = os.environ.get("LOG_RANK", "").strip() or "0"
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(Problem("LOG_RANK", text, "is not a list of ranks", 'write it like "0" or "0,1"'))
    return {int(part) for part in parts}


def color_allowed(stream: TextIO, wanted: bool = True) -> bool:
    """Whether ANSI colours may go to ``stream``: a terminal, outside Slurm, and nobody has said no.

    ``NO_COLOR`` is the convention of no-color.org: any value but the empty one forbids colours.
    """
    return wanted and not os.environ.get("NO_COLOR") and redraw_allowed(stream)


def redraw_allowed(stream: TextIO) -> bool:
    """Whether lines of ``stream`` may be drawn again: a terminal that can, outside Slurm, whose logs are files."""
    return not os.environ.get("SLURM_JOB_ID") and os.environ.get("TERM") != "dumb" and stream.isatty()


class SecretFilter(logging.Filter):
    """Masks secrets, and what a terminal would obey, in a record's message, its coloured form and its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact the record in place and let it pass."""
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
    """``[rank1] 2026-01-31 12:00:00 INFO message``; uses the coloured form of a message where colours are allowed.

    A person at a terminal reads the message alone, wrapped between words, and the level where it is a warning or an
    error; the file has time and level of every line. A message may have a form of its own for terminals.
    """

    def __init__(self, start: str) -> None:
        super().__init__(start + "%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
        self._start = start
        self.color = self.terminal = False

    def formatMessage(self, record: logging.LogRecord) -> str:
        if self.terminal:
            row = getattr(record, "terminal", None) or getattr(record, "colored", None)
            lines = str(row if self.color else _ANSI.sub("", row)).split("\n") if row else self._wrapped(record)
            return "\n".join(self._start + line for line in lines)
        colored = getattr(record, "colored", None)
        if self.color and colored:
            record.message = colored
        line = super().formatMessage(record)
        return line if self.color else _ANSI.sub("", line)

    def _wrapped(self, record: logging.LogRecord) -> list[str]:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        width = max(20, min(shutil.get_terminal_size().columns, _MOST_COLUMNS) - len(self._start))
        color = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}.get(record.levelno, "") if self.color else ""
        lines: list[str] = []
        for line in f"{level}{record.message}".split("\n"):
            # Spaces within a line stay as they are, as in tables; paths and numbers are not cut.
            lines += textwrap.wrap(
                line, width, subsequent_indent="    ", replace_whitespace=False, drop_whitespace=True,
                break_long_words=False, break_on_hyphens=False,
            ) or [""]  # fmt: skip
        return [f"{color}{line}\x1b[0m" if color else line for line in lines]


class _FileHandler(logging.Handler):
    """Appends each record in one write. A full disk or a lost folder stops no run: it is reported once on stderr.

    A file that was removed, with its folder or without, is made again.
    """

    def __init__(self, path: Path, opens_late: bool = False) -> None:
        super().__init__()
        self.path = path
        self.num_lost = 0
        self._descriptor = -1 if opens_late else self._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, but for what is of the moment alone."""
        if getattr(record, "console_only", False):
            return
        data = (self.format(record) + "\n").encode(errors="replace")
        try:
            if self._descriptor < 0 or self._is_gone():
                descriptor = self._open()
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                self._descriptor = descriptor
            # One write for each line, so that lines of processes that share a file are whole. A full disk may take a
            # part of one, which is taken back.
            size = os.fstat(self._descriptor).st_size
            written = os.write(self._descriptor, data)
            if written != len(data):
                os.ftruncate(self._descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.num_lost += 1
            if self.num_lost == 1:
                problem = redact(str(storage_errors.cannot("write the log file", self.path, error)))
                lost_lines.append(f"{problem}; its lines are lost until this is fixed")
                with contextlib.suppress(OSError, ValueError):
                    print(lost_lines[-1], file=sys.stderr, flush=True)

    def close(self) -> None:
        """Let the file go."""
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)
        super().close()

    def _open(self) -> int:
        return atomic_io.open_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, create_folder=True)

    def _is_gone(self) -> bool:
        try:
            there = os.lstat(self.path)
            own = os.fstat(self._descriptor)
        except FileNotFoundError:
            return True
        except OSError:
            # It cannot be seen at the moment, which does not make it gone.
            return False
        return (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino)


class _ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever ``sys.stderr`` is at that moment, so that a progress line can keep lines whole."""

    def __init__(self, start: str, color: bool) -> None:
        logging.Handler.__init__(self)
        self._formatter = _LineFormatter(start)
        self._color_wanted = color
        self.setFormatter(self._formatter)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The stream of this moment."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        self._formatter.color = color_allowed(sys.stderr, self._color_wanted)
        self._formatter.terminal = sys.stderr.isatty()
        super().emit(record)
