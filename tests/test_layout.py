"""Layout: globs stop at dots, and each broken promise is reported once, by name."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
from collections.abc import Iterator

import pytest

from shardtrain.layout import TENSOR_STYLES, Layout, check, matches, style_of

GOOD = Layout(
    first=("embed",),
    layers="layers",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "layers.*.attn": "gather",
        "layers.*.attn.w[qk]": "colwise",
        "layers.*.attn.wo": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="layers.*.attn.core",
)
MODULES = ["", "embed", "layers", "layers.0", "layers.0.attn", "layers.0.attn.core", "norm", "head"]
MODULES += [f"layers.0.attn.{name}" for name in ("wq", "wk", "wo")]
PARAMETERS = ["embed.weight", "norm.weight", "head.weight"]
PARAMETERS += [f"layers.0.attn.{name}.weight" for name in ("wq", "wk", "wo")]


def changed(**fields) -> Layout:
    return dataclasses.replace(GOOD, **fields)


@pytest.mark.parametrize(
    ("path", "pattern", "fits"),
    [
        ("layers.3.ffn", "layers.*.ffn", True),
        ("layers.12.ffn", "layers.*.ffn", True),
        ("layers.3.ffn.w1", "layers.*.ffn", False),
        ("layers.3.ffn.w1", "layers.*", False),
        ("layers.3.ffn.w1", "*", False),
        ("layers.3.attn.wq", "layers.*.attn.w[qkv]", True),
        ("layers.3.attn.wo", "layers.*.attn.w[qkv]", False),
        ("layers.3.attn.wqkv", "layers.*.attn.w[qkv]", False),
        ("layers.3", "layers.?", True),
        ("layers.33", "layers.?", False),
        ("a.b", "a?b", False),
        ("norm.weight", "*norm.weight", True),
        ("attn_norm.weight", "*norm.weight", True),
        ("layers.0.attn_norm.weight", "*norm.weight", False),
        ("axb", "a.b", False),
        ("a+b", "a+b", True),
        ("", "*", True),
        ("layers.3.attn.wq", "layers.*.attn.w[!o]", True),
        ("layers.3.attn.wo", "layers.*.attn.w[!o]", False),
        ("layers.3.attn.w!", "layers.*.attn.w[!o]", True),
        ("layers.attn", "layers[!o]attn", False),
        ("layers.11.attn", "layers.[!0].attn", False),
    ],
)
def test_star_stops_at_a_dot(path: str, pattern: str, fits: bool) -> None:
    assert matches(path, pattern) is fits


def test_patterns_within_a_part_match_like_fnmatch() -> None:
    """Compare all globs of up to four characters, including sets and ranges, on names of up to two letters."""

    def strings(letters: str, lengths: range) -> Iterator[str]:
        """Yield all strings of these letters with these lengths."""
        for length in lengths:
            for chosen in itertools.product(letters, repeat=length):
                yield "".join(chosen)

    names = list(strings("ab]!-", range(3)))
    for pattern in strings("[]!a-*", range(1, 5)):
        for name in names:
            is_match = matches(f"x.{name}", f"x.{pattern}")
            assert is_match is fnmatch.fnmatchcase(name, pattern), (name, pattern)


def test_style_of_a_path_is_that_of_the_matching_rule() -> None:
    assert style_of(GOOD, "layers.0.attn.wk") == "colwise"
    assert style_of(GOOD, "layers.0.attn") == "gather"
    assert style_of(GOOD, "layers.0.attn.core") is None
    assert style_of(GOOD, "") is None


def test_valid_layout_has_no_problem() -> None:
    assert check(GOOD, MODULES, PARAMETERS) == []


def test_generators_of_names_are_accepted() -> None:
    assert check(GOOD, iter(MODULES), iter(PARAMETERS)) == []


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (
            changed(tensor={**GOOD.tensor, "norm": "sequenec"}),
            ["'sequenec'", "not a known style", "colwise"],
        ),
        (
            changed(tensor={**GOOD.tensor, "layers.*.ffn": "gather"}),
            ["'layers.*.ffn'", "names no module"],
        ),
        (changed(first=("embedding",)), ["LAYOUT.first", "'embedding'", "not a module"]),
        (changed(layers="blocks"), ["LAYOUT.layers", "'blocks'", "not a module"]),
        (changed(last=("norm", "output")), ["LAYOUT.last", "'output'", "not a module"]),
        (changed(context="layers.*.core"), ["LAYOUT.context", "names no module"]),
        (changed(expert="layers.*.moe"), ["LAYOUT.expert", "names no module"]),
    ],
)
def test_each_broken_promise_is_reported_once(layout: Layout, parts: list[str]) -> None:
    problems = check(layout, MODULES, PARAMETERS)
    assert len(problems) == 1
    for part in parts:
        assert part in problems[0], problems


def test_a_parameter_without_a_rule_is_reported() -> None:
    (problem,) = check(GOOD, [*MODULES, "layers.0.moe"], [*PARAMETERS, "layers.0.moe.router"])
    assert "layers.0.moe.router" in problem
    assert "matches 0 rules" in problem


def test_a_parameter_of_the_model_itself_needs_a_rule_too() -> None:
    (problem,) = check(GOOD, MODULES, [*PARAMETERS, "scale"])
    assert "parameter scale" in problem
    assert "matches 0 rules" in problem


@pytest.mark.parametrize(
    ("parameter", "advice"),
    [
        ("layers.0.scale", '"layers.0.CHILD": "sequence"'),
        ("layers.0.extra.weight", 'a rule for "layers.0.extra" with a style of docs/own_model.md'),
        ("scale", "move it into a module of LAYOUT.first, layers or last"),
    ],
)
def test_advice_for_a_parameter_without_a_rule_depends_on_its_module(
    parameter: str, advice: str
) -> None:
    """A parameter directly in a block cannot get a rule, because a block's style applies to all its modules."""
    (problem,) = check(GOOD, [*MODULES, "layers.0.extra"], [*PARAMETERS, parameter])
    assert advice in problem


def test_parameter_with_two_rules_is_reported() -> None:
    twice = changed(tensor={**GOOD.tensor, "layers.*.attn.w?": "colwise"})
    problems = check(twice, MODULES, PARAMETERS)
    assert len(problems) == 3  # for wq, wk and wo
    for problem in problems:
        assert "matches 2 rules" in problem
        assert "'layers.*.attn.w?'" in problem


def test_gathering_module_with_a_parameter_is_reported() -> None:
    (problem,) = check(GOOD, MODULES, [*PARAMETERS, "layers.0.attn.bias"])
    assert "layers.0.attn.bias" in problem
    assert "'gather'" in problem


def test_several_problems_are_reported_together() -> None:
    assert len(check(changed(layers="blocks", context="x", first=("y",)), MODULES, PARAMETERS)) == 3


def test_every_style_is_described() -> None:
    assert {"embed", "sequence", "gather", "colwise", "rowwise", "head"} <= set(TENSOR_STYLES)
    assert all(len(meaning) > 20 for meaning in TENSOR_STYLES.values())
