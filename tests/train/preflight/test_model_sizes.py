"""``model.overrides``: the check finds values that the model would reject, and the suggested fix works."""

from __future__ import annotations

import re

import pytest

from shardtrain import config
from shardtrain.config import model_file
from shardtrain.train.preflight import memory_fit, meta_model
from shardtrain.utils.errors import ConfigError
from tests.tiers import cases

# a folder defines its sizes
FAMILIES = [name for name in model_file.model_names() if name != "transformers"]
DEFAULT = ["llama3", "neox"]
VALUES = {"int": [0, 1, 3, 7], "float": [0.0, 0.3, 1.5, -1.0], "str": ["nothing"]}
SUGGESTED = re.compile(r"^use (?:at most |one of )?\"?([\w.]+)\"?(?:,| or |$)")


def problems_of(family: str, flavor: str, arguments: list[str]) -> list:
    """Return the problems that ``config check`` finds, by the rules or, if they find none, by building the model."""
    loaded = config.load(
        "debug", ["--model.name", family, "--model.flavor", flavor, *arguments], keep_problems=True
    )
    problems = [
        problem
        for problem in [*loaded.problems, *config.check(loaded)]
        if problem.option.startswith("model.")
    ]
    if problems:
        return problems
    assert memory_fit.needs_model_build(loaded)
    errors, _ = meta_model.build(loaded.config)
    assert all(isinstance(error, ConfigError) for error in errors), errors
    return [problem for error in errors for problem in error.problems]


@pytest.mark.parametrize(
    "family", cases(DEFAULT, nightly=[name for name in FAMILIES if name not in DEFAULT])
)
def test_invalid_sizes_are_found_and_their_fixes_work(family: str) -> None:
    facts = model_file.read_model_file(family)
    flavor = "debugmodel" if "debugmodel" in facts.flavors else next(iter(facts.flavors))
    tried = 0
    for name, (kind, _) in facts.fields.items():
        for value in VALUES.get(kind.removesuffix(" | None"), []):
            arguments = [f"--model.overrides.{name}", str(value)]
            for problem in problems_of(family, flavor, arguments):
                assert "\n" not in str(problem)
                suggested = SUGGESTED.match(problem.fix)
                if suggested is None:
                    continue
                fixed_options = dict([tuple(arguments), (f"--{problem.option}", suggested[1])])
                fixed_arguments = [text for pair in fixed_options.items() for text in pair]
                fixed = problems_of(family, flavor, fixed_arguments)
                remaining = [other for other in fixed if other.option == problem.option]

                assert not remaining, f"{problem}: with {suggested[1]} it is {remaining[0]}"

                tried += 1

    assert tried > 5
