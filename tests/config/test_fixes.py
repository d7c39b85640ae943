"""Every fix that a message of the configuration suggests is applied, and works.

Each option gets wrong values and every word that it knows. Of each problem that the check then reports, the values that
the fix names are set, or the option is removed. The problem must be gone with each of them, and at least one must lead
to a configuration without problems: at once, or by the fixes of what is reported then.
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
OF_ONES_OWN = re.compile(r"needs (?:a folder|a device|files)|does not exist|is not installed|limits a sweep")
"""Rules about what only the user knows or has: no fix can name it."""

Given = dict[str, str]
"""Options of a command line, with their values."""


def values_of(kind: Any) -> list[str]:
    """Words for an option: all that a Literal has, and wrong values of other types."""
    if get_origin(kind) in (Union, UnionType):
        return [value for part in get_args(kind) for value in values_of(part)]
    if get_origin(kind) is Literal:
        return [str(word) for word in get_args(kind)]
    return WRONG.get(get_origin(kind) or kind, [])


def find(preset: str, given: Given) -> list[Problem]:
    """What `config check` reports for two ranks on CPUs."""
    return _find(preset, tuple(f"--{option}={value}" for option, value in given.items()))


@functools.cache
def _find(preset: str, words: tuple[str, ...]) -> list[Problem]:
    try:
        return problems_of(config.load(preset, words, keep_problems=True), 2, "cpu")
    except ConfigError as error:
        return [problem for problem in error.problems if isinstance(problem, Problem)]


def fixed(problem: Problem, given: Given) -> Iterator[Given]:
    """The command line with each fix that the problem suggests."""
    match = SET.search(problem.fix)
    if match:
        for value in filter(None, match.groups()[2:]):
            number = f"{float(value) + 1:g}" if match[2] == "above" else value.strip('"')
            yield {**given, match[1]: number}
    match = USE.match(problem.fix)
    if match:
        for value in filter(None, match.groups()):
            yield {**given, problem.option: value.strip('"')}
    if problem.fix == "use a positive number":
        yield {**given, problem.option: "1"}
    if problem.fix == "write a fraction: 10 % is 0.1":
        yield {**given, problem.option: "0.5"}
    if REMOVE.search(problem.fix) and problem.option in given:
        yield {option: value for option, value in given.items() if option != problem.option}


def leads_to_none(preset: str, given: Given, rounds: int = 4) -> bool:
    """Whether the fixes of what is reported lead to a configuration without problems."""
    found = [problem for problem in find(preset, given) if not OF_ONES_OWN.search(problem.rule)]
    if not found or not rounds:
        return not found
    return any(leads_to_none(preset, more, rounds - 1) for more in fixed(found[0], given))


@pytest.mark.parametrize("section", cases(DEFAULT, nightly=[name for name in SECTIONS if name not in DEFAULT]))
def test_the_fixes_of_every_problem_of_an_option_work(section: str) -> None:
    preset = "debug"
    for name, option in options().items():
        if name.partition(".")[0] != section:
            continue
        for value in values_of(option.kind):
            for problem in find(preset, {name: value}):
                fixes = list(fixed(problem, {name: value}))
                for given in fixes:
                    same = [
                        one for one in find(preset, given) if (one.option, one.rule) == (problem.option, problem.rule)
                    ]
                    assert not same, f"{problem}: still there with {given}"
                if fixes:
                    assert any(leads_to_none(preset, given) for given in fixes), f"{problem}: {fixes}"


@pytest.mark.nightly("it counts what the test above tries")
def test_most_fixes_name_what_can_be_applied() -> None:
    """Else the test above would say little."""
    reported = [
        (problem, {name: value})
        for name, option in options().items()
        if name.startswith(("optimizer.", "training.", "lr_scheduler."))
        for value in values_of(option.kind)
        for problem in find("debug", {name: value})
    ]
    named = [problem for problem, given in reported if list(fixed(problem, given))]
    assert len(named) > 60 and len(named) / len(reported) > 0.7


@pytest.mark.parametrize("preset", cases(["debug"], nightly=[name for name in presets.names() if name != "debug"]))
def test_a_user_is_not_told_to_remove_an_option_of_a_preset(preset: str) -> None:
    """It is in a file of the package: an override that makes it idle is enough."""
    before = {str(problem) for problem in find(preset, {})}
    for name, option in options().items():
        for value in values_of(option.kind)[:2]:
            for problem in find(preset, {name: value}):
                ours = problem.where.startswith(f"{preset}.toml") and str(problem) not in before
                assert not (ours and REMOVE.search(problem.fix)), f"--{name} {value}: {problem}"
