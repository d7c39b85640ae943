"""Removal of secondary problems. A key that could not be read has its default, which may cause further problems."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardtrain.utils.errors import Problem


def without(unread: Sequence[Problem], problems: Iterable[Problem]) -> list[Problem]:
    """Return the ``problems`` except those about an option, section or table in ``unread``.

    If the fix of an unread problem suggests another name, problems about that name are removed too.

    >>> typo = Problem("training.stepz", 3, "is not an option", "did you mean training.steps?")
    >>> [one.option for one in without([typo], [Problem("training.steps", 0, "", ""), Problem("data.mode", 0, "", "")])]
    ['data.mode']
    """
    names: set[str] = set()
    for problem in unread:
        names.update(meant(problem))
    kept = []
    for problem in problems:
        if not any(_is_about(problem, name) for name in names):
            kept.append(problem)
    return kept


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Remove duplicate problems. Keep only the last problem about the number of
    data-parallel ranks for an option.
    """
    distinct_problems: dict[str, Problem] = {}
    for problem in problems:
        text = str(problem)
        if problem.rule.endswith("data-parallel ranks"):
            # Rules of the file count the ranks in the file. Later rules of the
            # machine count all available ranks.
            text = problem.option
        distinct_problems.pop(text, None)
        distinct_problems[text] = problem
    return list(distinct_problems.values())


def meant(problem: Problem) -> list[str]:
    """Return the option of a problem, and the option or section that its fix suggests."""
    near = re.match(r"did you mean \[?([\w.]+)\]?\?", problem.fix)
    return [problem.option.strip("[]-"), *([near[1]] if near else [])]


def _is_about(problem: Problem, name: str) -> bool:
    """True if a problem is about an option or section, or mentions it."""
    if problem.option == name or problem.option.startswith(f"{name}."):
        return True
    # A rule for several options contains the dotted names or the keys of the others.
    key = name.rpartition(".")[2]
    names = [name] if "." in name else []
    if "_" in key:
        names.append(key)
    return any(
        re.search(rf"(?<![\w.]){re.escape(mention)}(?!\w)", f"{problem.rule} {problem.fix}")
        for mention in names
    )
