"""``model.overrides``: the check finds values that the model would reject, and the suggested fix works."""

from __future__ import annotations

import itertools
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
    options = ["--model.name", family, "--model.flavor", flavor, *arguments]
    loaded = config.load("debug", options, keep_problems=True)
    problems = [*loaded.problems, *config.check(loaded)]
    problems = [problem for problem in problems if problem.option.startswith("model.")]
    if problems:
        return problems

    assert memory_fit.needs_model_build(loaded)
    errors, _ = meta_model.build(loaded.config)
    for error in errors:
        assert isinstance(error, ConfigError), error
        problems += error.problems
    return problems


@pytest.mark.parametrize(
    "family", cases(DEFAULT, nightly=[name for name in FAMILIES if name not in DEFAULT])
)
def test_invalid_sizes_are_found_and_their_fixes_work(family: str) -> None:
    facts = model_file.read_model_file(family)
    flavor = "debugmodel" if "debugmodel" in facts.flavors else next(iter(facts.flavors))
    num_fixes = 0
    for name, (kind, _) in facts.fields.items():
        for value in VALUES.get(kind.removesuffix(" | None"), []):
            arguments = [f"--model.overrides.{name}", str(value)]
            for problem in problems_of(family, flavor, arguments):
                assert "\n" not in str(problem)
                suggested = SUGGESTED.match(problem.fix)
                if suggested is None:
                    continue

                # With the suggested value, the option has no problem.
                fixed_options = {arguments[0]: arguments[1]}
                fixed_options[f"--{problem.option}"] = suggested[1]
                fixed_arguments = list(itertools.chain.from_iterable(fixed_options.items()))
                fixed = problems_of(family, flavor, fixed_arguments)
                remaining = [other for other in fixed if other.option == problem.option]
                assert not remaining, f"{problem}: with {suggested[1]} it is {remaining[0]}"
                num_fixes += 1

    assert num_fixes > 5
