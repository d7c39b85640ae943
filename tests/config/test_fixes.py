"""Every fix that a configuration error suggests works.

Each option is set to wrong values and to all of its valid names. For each reported problem, the suggested fixes are
applied: the values are set, or the option is removed. Each fix must remove its problem, and at least one must lead to a
configuration without problems, immediately or with further fixes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from tiers import cases

from shardtrain import config
from shardtrain.config import presets
from shardtrain.config.options import options
from shardtrain.config.problems import problems_of
from shardtrain.utils.errors import ConfigError, Problem

SECTIONS = sorted({name.partition(".")[0] for name in options()})
DEFAULT = ["lr_scheduler", "optimizer"]
WRONG: dict[type, list[str]] = {
    bool: ["true", "false"],
    int: ["-2", "0", "3", "1000000"],
    float: ["-1.0", "0.0", "2.5"],
    str: ["nothing"],
    list: ["nothing"],
}
VALUE = r'("[^"]*"|-?[\d.]+(?:e-?\d+)?|true|false)'
SET = re.compile(rf"set ([a-z_]+\.[\w.]+) (=|above|to) {VALUE}(?: or {VALUE}(?!\w|\.))?")
USE = re.compile(
    rf"(?:use|set it to) (?:for example |at most )?{VALUE}(?:(?:, | or |, or ){VALUE})?(?:$|,| or| and|\.)"
)
REMOVE = re.compile(r"(?:^|, or )(?:remove it|leave it out)")
NEEDS_USER = re.compile(
    r"needs (?:a folder|a device|files)|does not exist|is not installed|requires launch\.slurm\.sweep"
)
"""Rules about facts that only the user knows, so no fix can be applied."""

Given = dict[str, str]
"""Options on a command line -> values."""


def values_of(kind: Any) -> list[str]:
    """Return values for an option: all those of a Literal, and wrong values of other types."""
    if get_origin(kind) in (Union, UnionType):
        return [value for part in get_args(kind) for value in values_of(part)]
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    return WRONG.get(get_origin(kind) or kind, [])


def find(preset: str, command_line: Given) -> list[Problem]:
    """Return the problems that `config check` reports for two CPU ranks."""
    return _find(preset, tuple(f"--{option}={value}" for option, value in command_line.items()))


@functools.cache
def _find(preset: str, arguments: tuple[str, ...]) -> list[Problem]:
    try:
        return problems_of(config.load(preset, arguments, keep_problems=True), 2, "cpu")
    except ConfigError as error:
        return [problem for problem in error.problems if isinstance(problem, Problem)]


def fixed(problem: Problem, command_line: Given) -> Iterator[Given]:
    """Yield the command line with each fix that the problem suggests."""
    match = SET.search(problem.fix)
    if match:
        for value in filter(None, match.groups()[2:]):
            number = f"{float(value) + 1:g}" if match[2] == "above" else value.strip('"')
            yield {**command_line, match[1]: number}
    match = USE.match(problem.fix)
    if match:
        for value in filter(None, match.groups()):
            yield {**command_line, problem.option: value.strip('"')}
    if problem.fix == "use a positive number":
        yield {**command_line, problem.option: "1"}
    if problem.fix == "write a fraction: 10 % is 0.1":
        yield {**command_line, problem.option: "0.5"}
    if REMOVE.search(problem.fix) and problem.option in command_line:
        yield {option: value for option, value in command_line.items() if option != problem.option}


def leads_to_none(preset: str, command_line: Given, rounds: int = 4) -> bool:
    """True if fixes of the reported problems lead to a configuration without problems."""
    problems = [
        problem for problem in find(preset, command_line) if not NEEDS_USER.search(problem.rule)
    ]
    if not problems or not rounds:
        return not problems
    return any(leads_to_none(preset, more, rounds - 1) for more in fixed(problems[0], command_line))


@pytest.mark.parametrize(
    "section", cases(DEFAULT, nightly=[name for name in SECTIONS if name not in DEFAULT])
)
def test_the_fixes_of_every_problem_of_an_option_work(section: str) -> None:
    preset = "debug"
    for name, option in options().items():
        if name.partition(".")[0] != section:
            continue
        for value in values_of(option.kind):
            for problem in find(preset, {name: value}):
                fixes = list(fixed(problem, {name: value}))
                for command_line in fixes:
                    remaining = {(other.option, other.rule) for other in find(preset, command_line)}
                    assert (problem.option, problem.rule) not in remaining, (
                        f"{problem}: still there with {command_line}"
                    )
                if fixes:
                    assert any(leads_to_none(preset, command_line) for command_line in fixes), (
                        f"{problem}: {fixes}"
                    )


@pytest.mark.nightly("it counts the cases of the test above")
def test_most_fixes_can_be_applied() -> None:
    """The test above skips problems whose fix it cannot apply, so these must be few."""
    num_problems = 0
    num_with_fix = 0
    for name, option in options().items():
        if not name.startswith(("optimizer.", "training.", "lr_scheduler.")):
            continue
        for value in values_of(option.kind):
            command_line = {name: value}
            for problem in find("debug", command_line):
                num_problems += 1
                num_with_fix += bool(list(fixed(problem, command_line)))

    assert num_with_fix > 60
    assert num_with_fix / num_problems > 0.7


@pytest.mark.parametrize(
    "preset", cases(["debug"], nightly=[name for name in presets.names() if name != "debug"])
)
def test_no_fix_removes_an_option_of_a_preset(preset: str) -> None:
    """A user cannot remove an option from a preset's file, so a fix must not suggest it."""
    before = {str(problem) for problem in find(preset, {})}
    for name, option in options().items():
        for value in values_of(option.kind)[:2]:
            for problem in find(preset, {name: value}):
                is_of_preset = problem.where.startswith(f"{preset}.toml")
                if is_of_preset and str(problem) not in before:
                    assert not REMOVE.search(problem.fix), f"--{name} {value}: {problem}"
