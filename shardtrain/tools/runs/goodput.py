"""Verb ``goodput``: print the wall time of a run by category."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from shardtrain.launch.goodput import events
from shardtrain.launch.goodput.account import MEANINGS, Account, Attempt, account, attempts_of
from shardtrain.utils.arguments import help_if_asked
from shardtrain.utils.errors import ConfigError, Problem

USAGE = """\
usage: shardtrain goodput RUN_FOLDER

Print how a run used its wall time, over all its attempts. The data are in RUN_FOLDER/goodput.jsonl. RUN_FOLDER is
job.dump_folder.

  shardtrain goodput outputs
"""
_MOST_SIZES = 20
"""Changes of the number of ranks that the report lists."""
_MEANING_COLUMN = 37
"""Column at which the description of a row begins."""


def main(words: Sequence[str]) -> int:
    """Print the table of a run folder. Raise ConfigError or DataError for invalid input."""
    help_if_asked(words, USAGE)
    if len(words) != 1 or words[0].startswith("-"):
        given = " ".join(words) or None
        raise ConfigError(
            Problem(
                "shardtrain goodput",
                given,
                rule="requires the folder of one run",
                fix="write it like shardtrain goodput outputs",
                where="command line",
            )
        )
    found, bad = events.read(Path(words[0]))
    attempts = attempts_of(found)
    if bad:
        print(f"ignored {_counted(bad, 'incomplete or damaged line')} of {Path(words[0]) / events.FILE}")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for text in table(attempts, account(attempts)):
        print(text if len(text) <= width or not width else _wrapped(text, width))
    return 0


def _wrapped(text: str, width: int) -> str:
    """Wrap a line for a narrow terminal. Continuation lines of a description are indented to its column."""
    indent = _MEANING_COLUMN if text[:1] != " " and text[_MEANING_COLUMN - 2 : _MEANING_COLUMN] == "  " else 4
    room = width if width >= indent + 16 else sys.maxsize
    return "\n".join(
        textwrap.wrap(text, room, subsequent_indent=" " * indent, drop_whitespace=True, break_on_hyphens=False)
    )


def table(attempts: Sequence[Attempt], found: Account) -> list[str]:
    """Return the lines of the report."""
    if not attempts:
        return ["no attempt has reached its first step"]
    running = found.running_seconds
    sizes = [attempt.start.world_size for attempt in attempts]
    sizes = [size for size, _ in itertools.groupby(sizes)]
    ranks = ", then ".join(map(str, sizes[:_MOST_SIZES]))
    if len(sizes) > _MOST_SIZES:
        ranks += f", ..., then {sizes[-1]}"
    lines = [
        f"{_counted(found.attempts, 'attempt')} on {ranks} rank{'s' if sizes[-1] != 1 else ''}, "
        f"{_counted(found.failures, 'failure')}, {_counted(found.saves, 'save')}",
        "",
    ]
    for name, seconds in found.seconds.items():
        share = 100 * seconds / running if running else 0.0
        lines.append(f"{name:<11} {seconds:12.1f} s {share:6.1f} %  {MEANINGS[name]}")  # from _MEANING_COLUMN on
    lines.append(f"{'running':<11} {running:12.1f} s  100.0 %")
    lines.append(f"{'idle':<11} {found.idle_seconds:12.1f} s           {MEANINGS['idle']}")
    lines += ["", f"goodput {100 * found.goodput:.1f} %: productive of running time"]
    predicted = found.predicted_ettr()
    compared = f"; predicted from these numbers: {100 * predicted:.1f} %" if predicted is not None else ""
    lines.append(f"ETTR    {100 * found.ettr:.1f} %: running time without saves, lost steps and recovery{compared}")
    return lines


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
