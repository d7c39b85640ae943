"""Problems that only follow from others: a key that could not be read has its default, which nobody asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardtrain.utils.errors import Problem


def without(unread: Sequence[Problem], found: Iterable[Problem]) -> list[Problem]:
    """The problems of ``found`` that are not about an option, section or table that ``unread`` names.

    A misspelt name counts as the one that was meant, where the problem says which.

    >>> typo = Problem("training.stepz", 3, "is not an option", "did you mean training.steps?")
    >>> [one.option for one in without([typo], [Problem("training.steps", 0, "", ""), Problem("data.mode", 0, "", "")])]
    ['data.mode']
    """
    names = {name for problem in unread for name in meant(problem)}
    return [problem for problem in found if not any(_is_about(problem, name) for name in names)]


def distinct(problems: Iterable[Problem]) -> list[Problem]:
    """Each problem once: no line is repeated."""
    found: dict[str, Problem] = {}
    for problem in problems:
        text = str(problem)
        if problem.rule.endswith("data-parallel ranks"):
            # the rules of the file count the ranks that it names, those of the machine after them all that there are
            text = problem.option
        found.pop(text, None)
        found[text] = problem
    return list(found.values())


def meant(problem: Problem) -> list[str]:
    """Options and sections that a problem of reading leaves unknown."""
    near = re.match(r"did you mean \[?([\w.]+)\]?\?", problem.fix)
    return [problem.option.strip("[]-"), *([near[1]] if near else [])]


def _is_about(problem: Problem, name: str) -> bool:
    if problem.option == name or problem.option.startswith(f"{name}."):
        return True
    # a rule that joins several options names the others, by their dotted names or by their keys
    key = name.rpartition(".")[2]
    words = [name] if "." in name else []
    words += [key] if "_" in key else []
    return any(re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", f"{problem.rule} {problem.fix}") for word in words)
