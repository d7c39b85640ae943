"""Error types with their exit codes. Each message has the option or path, the broken rule and the fix.

ShardtrainError
├── ConfigError        exit 2   the configuration or an input is wrong; a retry cannot help
├── DataError          exit 3   the data is unusable or has ended
├── NumericalError     exit 4   a number is not finite, or ranks disagree
├── CheckpointError    exit 5   a checkpoint cannot be used
├── PeerError          exit 6   another rank or a collective failed; a retry may help
├── OutOfMemoryError   exit 7   host or device memory ran out
├── StorageError       exit 8   a file could not be written, or storage did not answer; retry later
├── Preempted          exit 75  stopped on request; the run is saved
└── NotSaved           exit 76  stopped on request; the steps since the last checkpoint are lost
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.utils.redact import MASK, one_line, shown

SENTENCES = re.compile(r", so (?!that)|; ")
"""Separator of the two sentences of a rule: the fact, and its consequence or explanation."""
COMMAND_LINE = "command line"
"""Origin of values that the command line sets."""
_MOST_SHOWN = 600
"""Maximum number of characters of a value in a message."""
_MOST_ITEMS = 40
"""Maximum number of items of a list or table in a message.

A hundred problems may be about the same long list.
"""


def fix_first(subject: str, fix: str, *reasons: str) -> str:
    """Return a message with the subject first, then the fix, then the reasons.

    >>> fix_first("step 3: the loss is not finite", "lower optimizer.lr", "the weights are those of step 2")
    'step 3: the loss is not finite: lower optimizer.lr; reason: the weights are those of step 2'
    """
    return f"{subject}: {fix}; reason: {'; '.join(reasons)}"


def causes(error: BaseException) -> list[BaseException]:
    """Return an error and its causes."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    # Exceptions may refer to each other in a cycle.
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration: the option, its value, the rule it breaks and the fix.

    ``where`` is the origin of the value: ``run.toml:12`` or ``command line``; empty for a default.
    """

    option: str
    value: Any
    rule: str
    fix: str
    where: str = ""

    def __str__(self) -> str:
        """One line: ``run.toml:12: training.steps=0 must be at least 1; set it to ...``.

        A rule of two sentences (``SENTENCES``) comes after the fix. If the fix first names another option, "it" would
        be ambiguous, so this option's name replaces it: ``set b.c = 1, or remove it`` becomes ``set b.c = 1, or
        remove a.b``.
        """
        origin = f"{self.where}: " if self.where else ""
        # A secret must not appear in the message, wherever it is in the value.
        masked = shown(self.option, _first_items(self.value))
        value = "" if self.value is None else f"={_toml_like(masked)}"
        # an option may be an entire command-line argument, with a secret in it
        subject = f"{origin}{shown('', self.option)}{value}"
        # After "set b.c = 1", "it" would be b.c
        it = self.option if self.fix.startswith("set ") else "it"
        fix = self.fix.replace(", or remove it", f", or remove {it}")
        text = f"{subject} {self.rule}; {fix}"
        if SENTENCES.search(self.rule):
            text = fix_first(subject, fix, f"it {self.rule}")
        if masked == MASK:  # the rule or the fix may repeat the value
            text = text.replace(str(self.value), MASK)
        # one line whatever the value holds, and nothing that a terminal would obey
        return "".join(char if char.isprintable() else "?" for char in text)


class ShardtrainError(Exception):
    """Base of all errors with a message for the user. ``exit_code`` is the process's exit status."""

    exit_code = 1
    problems: tuple[Problem | str, ...]
    """The lines of an error that has several. Not set for others."""


class ConfigError(ShardtrainError):
    """The configuration cannot work. Contains every problem that was found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Problem | str | Sequence[Problem | str]) -> None:
        if isinstance(problems, Problem | str):
            problems = (problems,)
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class FolderTaken(ConfigError):
    """Another run is writing the folder of this run. Nothing in the folder was changed."""


class DataError(ShardtrainError):
    """The data cannot be read, is inconsistent, or has ended."""

    exit_code = 3


class NumericalError(ShardtrainError):
    """A loss or gradient is not finite, loss spikes continue, or replicas of the same weights differ."""

    exit_code = 4


class CheckpointError(ShardtrainError):
    """A checkpoint is missing, incomplete or does not fit this run."""

    exit_code = 5


class PeerError(ShardtrainError):
    """Another rank failed or a collective did not complete."""

    exit_code = 6


class OutOfMemoryError(ShardtrainError):
    """Host or device memory ran out."""

    exit_code = 7


class StorageError(ShardtrainError):
    """A file could not be written, or storage did not answer when it was read."""

    exit_code = 8


class Preempted(ShardtrainError):
    """The run was stopped on request and has saved its state."""

    exit_code = 75


class NotSaved(ShardtrainError):
    """The run was stopped on request and had no time to save."""

    exit_code = 76


class HelpPrinted(Exception):
    """The requested help of a command has been printed. ``cli.run`` exits with status 0."""


def print_error(error: ShardtrainError) -> int:
    """Print an error to stderr, one line for each of its problems, and return its exit status."""
    # A stop on request is not an error.
    kind = "stopped" if isinstance(error, Preempted | NotSaved) else "error"
    for problem in getattr(error, "problems", (error,)):
        print(f"{kind}[{error.exit_code}]: {one_line(str(problem))}", file=sys.stderr, flush=True)
    return error.exit_code


def require_new(path: Path) -> None:
    """Raise ConfigError if a folder to be written exists."""
    if path.exists():
        raise ConfigError(f"{path} exists; give a new folder")


def _first_items(value: Any) -> Any:
    """Cut a list or table after ``_MOST_ITEMS`` items, with a note of their number. Return other values unchanged.

    >>> _first_items([0] * 1000)[-2:], _first_items([0])
    ([0, '... (1000 items)'], [0])
    """
    if not isinstance(value, list | tuple | dict) or len(value) <= _MOST_ITEMS:
        return value
    # Keep the beginning, by which a user recognizes the value.
    note = f"... ({len(value)} items)"
    if isinstance(value, dict):
        return dict([*list(value.items())[:_MOST_ITEMS], (note, "")])
    return [*value[:_MOST_ITEMS], note]


def _toml_like(value: Any) -> str:
    """Write a value as the user would: booleans in lower case, text in double quotes. The middle of long text is cut.

    >>> _toml_like(True), _toml_like("a"), _toml_like(3)
    ('true', '"a"', '3')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = value
        if len(value) > _MOST_SHOWN:
            text = f"{value[: _MOST_SHOWN // 2]}...{value[-_MOST_SHOWN // 2 :]}"
        return f'"{text}"'
    return str(value)
