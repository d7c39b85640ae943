"""Verb ``goodput``: print the wall time of a run by category."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from shardtrain.launch.goodput import events
from shardtrain.launch.goodput.account import MEANINGS, Account, Attempt, account, attempts_of
from shardtrain.utils.arguments import print_requested_help
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


def main(arguments: Sequence[str]) -> int:
    """Print the table of a run folder. Raise ConfigError or DataError for invalid input."""
    print_requested_help(arguments, USAGE)
    if len(arguments) != 1 or arguments[0].startswith("-"):
        given = " ".join(arguments) or None
        raise ConfigError(
            Problem(
                "shardtrain goodput",
                given,
                rule="requires the folder of one run",
                fix="write it like shardtrain goodput outputs",
                where="command line",
            )
        )
    folder = Path(arguments[0])
    events_of_run, bad_lines = events.read(folder)
    attempts = attempts_of(events_of_run)
    if bad_lines:
        print(
            f"ignored {_counted(bad_lines, 'incomplete or damaged line')} of {folder / events.FILE}"
        )
    # Do not wrap a table in a file or pipe.
    width = sys.maxsize
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns or sys.maxsize
    for text in table(attempts, account(attempts)):
        if len(text) > width:
            text = _wrapped(text, width)
        print(text)
    return 0


def _wrapped(text: str, width: int) -> str:
    """Wrap a line for a narrow terminal. Continuation lines of a description are indented to its column."""
    indent = 4
    has_description = text[:1] != " " and text[_MEANING_COLUMN - 2 : _MEANING_COLUMN] == "  "
    if has_description:
        indent = _MEANING_COLUMN
    # Below 16 columns for the text, wrapping makes it harder to read.
    if width < indent + 16:
        width = sys.maxsize
    lines = textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)
    return "\n".join(lines)


def table(attempts: Sequence[Attempt], division: Account) -> list[str]:
    """Return the lines of the report."""
    if not attempts:
        return ["no attempt has reached its first step"]
    lines = [_headline(attempts, division), ""]

    # The descriptions begin at _MEANING_COLUMN.
    running = division.running_seconds
    for name, seconds in division.seconds.items():
        percent = 0.0
        if running:
            percent = 100 * seconds / running
        lines.append(f"{name:<11} {seconds:12.1f} s {percent:6.1f} %  {MEANINGS[name]}")
    lines.append(f"{'running':<11} {running:12.1f} s  100.0 %")
    lines.append(f"{'idle':<11} {division.idle_seconds:12.1f} s           {MEANINGS['idle']}")

    lines += ["", f"goodput {100 * division.goodput:.1f} %: productive of running time"]
    ettr = (
        f"ETTR    {100 * division.ettr:.1f} %: running time without saves, lost steps and recovery"
    )
    predicted = division.predicted_ettr()
    if predicted is not None:
        ettr += f"; predicted from these numbers: {100 * predicted:.1f} %"
    lines.append(ettr)
    return lines


def _headline(attempts: Sequence[Attempt], division: Account) -> str:
    """Return the number of attempts, ranks, failures and saves as one line."""
    # List the sizes in order. Consecutive attempts with the same size count once.
    sizes: list[int] = []
    for attempt in attempts:
        size = attempt.start.world_size
        if not sizes or size != sizes[-1]:
            sizes.append(size)
    ranks = ", then ".join(str(size) for size in sizes[:_MOST_SIZES])
    if len(sizes) > _MOST_SIZES:
        ranks += f", ..., then {sizes[-1]}"
    noun = "rank" if sizes[-1] == 1 else "ranks"
    num_attempts = _counted(division.attempts, "attempt")
    failures = _counted(division.failures, "failure")
    saves = _counted(division.saves, "save")
    return f"{num_attempts} on {ranks} {noun}, {failures}, {saves}"


def _counted(count: int, noun: str) -> str:
    if count != 1:
        noun += "s"
    return f"{count} {noun}"
