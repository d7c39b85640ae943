"""Error messages have one line, and start with the fix if the rule has several sentences."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardtrain
from shardtrain.utils.errors import SENTENCES, ConfigError, Problem, fix_first

PACKAGE = Path(shardtrain.__file__).parent


PROBLEMS = [
    (
        Problem("a.b", 0, "must be at least 1", "use 1 or more"),
        "a.b=0 must be at least 1; use 1 or more",
    ),
    (
        Problem("a.b", None, "is empty, so that none fits", "fill it"),
        "a.b is empty, so that none fits; fill it",
    ),
    (
        Problem(
            "LAYOUT.context",
            "core",
            "doubles its scores, so its keys cannot be kept",
            "add --no_cache",
        ),
        'LAYOUT.context="core": add --no_cache; reason: it doubles its scores, so its keys cannot be kept',
    ),
    (
        Problem("--from", "hf", "is not a folder; nothing is fetched", "download it"),
        '--from="hf": download it; reason: it is not a folder; nothing is fetched',
    ),
    (
        Problem("a.b", 1, "needs c", "set c.d = 1, or remove it"),
        "a.b=1 needs c; set c.d = 1, or remove a.b",
    ),
    (Problem("a.b", 1, "is wrong", "use 2, or remove it"), "a.b=1 is wrong; use 2, or remove it"),
    (
        Problem(
            "--from",
            "hf",
            "is not a folder here, so nothing is read",
            "download it",
            "command line",
        ),
        'command line: --from="hf": download it; reason: it is not a folder here, so nothing is read',
    ),
]


@pytest.mark.parametrize(("problem", "text"), PROBLEMS)
def test_rule_with_several_sentences_comes_after_the_fix(problem: Problem, text: str) -> None:
    assert str(problem) == str(ConfigError(problem)) == text


def test_message_without_an_option_has_the_same_order() -> None:
    text = fix_first(
        "step 3: the loss is not finite", "lower optimizer.lr", "the weights are kept", "rank 1"
    )
    assert (
        text
        == "step 3: the loss is not finite: lower optimizer.lr; reason: the weights are kept; rank 1"
    )


def _text(node: ast.expr) -> str:
    """Return the text of a string literal, with {} for each inserted value. Empty for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    return ""


@functools.cache
def messages() -> list[tuple[str, str, str]]:
    """Return all messages of the package, except those whose text cannot be read from the source."""
    return [message for message in _messages() if message[2]]


def _messages() -> Iterator[tuple[str, str, str]]:
    """Yield the kind ("error" or "rule"), place and text of every error and every ``Problem`` rule in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name_of_file = path.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            place = f"{name_of_file}:{getattr(node, 'lineno', 0)}"
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == "rule"
            ):
                yield "rule", place, _text(node.value)
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name == "Problem" and len(node.args) > 2:
                    yield "rule", place, _text(node.args[2])
                for keyword in node.keywords:
                    if keyword.arg == "rule":
                        yield "rule", place, _text(keyword.value)
                if name.endswith("Error") and node.args:
                    yield "error", place, _text(node.args[0])


def test_all_long_rules_of_the_package_come_after_their_fix() -> None:
    rules = [text for kind, _, text in messages() if kind == "rule"]
    assert len(rules) > 500
    for rule in filter(SENTENCES.search, rules):
        assert str(Problem("option", 1, rule, "FIX")).startswith("option=1: FIX; reason: it ")


def test_long_errors_of_the_package_use_fix_first() -> None:
    """A message without ``Problem`` or ``fix_first`` has at most two parts: a fact and a fix.

    The fix is the last part, so it has no colon ("fact; reason: fix").
    """
    errors = [(place, text) for kind, place, text in messages() if kind == "error"]
    assert len(errors) > 300
    long = [f"{place}: {text}" for place, text in errors if re.search(r"[.;] .*[.;:] ", text)]
    assert long == []
