"""The words after ``train`` and ``config``: a file, a few options of ours, and overrides of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.errors import ConfigError, Problem


@dataclass(frozen=True)
class CommandLine:
    """What follows a verb: the configuration file, options of ours, and overrides for the configuration to read."""

    path: str | None
    nproc: int | None
    overrides: tuple[str, ...]
    help: bool = False
    max_restarts: int = 0


def split(words: Sequence[str]) -> CommandLine:
    """Take the file, ``--nproc``, ``--max_restarts`` and ``--help`` out of the words; all others are overrides.

    The file stands before the first override, because an override may take several values.

    Raises:
        ConfigError: ``--nproc`` has no whole number above 0, or ``--max_restarts`` none.
    """
    path: str | None = None
    nproc: int | None = None
    max_restarts = 0
    overrides: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            return CommandLine(path, nproc, (), help=True)
        if name == "--max_restarts":
            text = value if equals else (remaining.pop(0) if remaining else "")
            if not text.isdecimal():
                rule = "must be a whole number of restarts"
                raise ConfigError(
                    Problem("--max_restarts", text, rule, "write it like --max_restarts 3", "command line")
                )
            max_restarts = int(text)
        elif name == "--nproc":
            text = value if equals else (remaining.pop(0) if remaining else "")
            if not text.isdecimal() or int(text) < 1:
                rule = "must be a whole number of processes above 0"
                raise ConfigError(Problem("--nproc", text, rule, "write it like --nproc 2", "command line"))
            nproc = int(text)
        elif path is None and not overrides and not word.startswith("-"):
            path = word
        else:
            overrides.append(word)
    return CommandLine(path, nproc, tuple(overrides), max_restarts=max_restarts)
