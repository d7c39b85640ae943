"""Values of ``model.overrides``: what a model rejects when it is built is found by the check, and its fix works."""

from __future__ import annotations

import re

import pytest

from shardtrain import config
from shardtrain.config import model_file
from shardtrain.train.preflight import memory_fit, meta_model
from shardtrain.utils.errors import ConfigError
from tests.tiers import cases

FAMILIES = [name for name in model_file.model_names() if name != "transformers"]  # its sizes come from a folder
DEFAULT = ["llama3", "neox"]
VALUES = {"int": [0, 1, 3, 7], "float": [0.0, 0.3, 1.5, -1.0], "str": ["nothing"]}
SUGGESTED = re.compile(r"^use (?:at most |one of )?\"?([\w.]+)\"?(?:,| or |$)")


def problems_of(family: str, flavor: str, words: list[str]) -> list:
    """Return what ``config check`` finds: by the rules, else by building the model, as it does with overrides."""
    loaded = config.load("debug", ["--model.name", family, "--model.flavor", flavor, *words], keep_problems=True)
    found = [problem for problem in [*loaded.problems, *config.check(loaded)] if problem.option.startswith("model.")]
    if found:
        return found
    assert memory_fit.only_building_tells(loaded)
    errors, _ = meta_model.build(loaded.config)
    assert all(isinstance(error, ConfigError) for error in errors), errors
    return [problem for error in errors for problem in error.problems]


@pytest.mark.parametrize("family", cases(DEFAULT, nightly=[name for name in FAMILIES if name not in DEFAULT]))
def test_wrong_sizes_are_found_and_their_fixes_work(family: str) -> None:
    facts = model_file.read_model_file(family)
    flavor = "debugmodel" if "debugmodel" in facts.flavors else next(iter(facts.flavors))
    tried = 0
    for name, (kind, _) in facts.fields.items():
        for value in VALUES.get(kind.removesuffix(" | None"), []):
            words = [f"--model.overrides.{name}", str(value)]
            for problem in problems_of(family, flavor, words):
                assert "\n" not in str(problem)
                suggested = SUGGESTED.match(problem.fix)
                if suggested is None:
                    continue
                given = dict([tuple(words), (f"--{problem.option}", suggested[1])])
                fixed = problems_of(family, flavor, [word for pair in given.items() for word in pair])
                left = [one for one in fixed if one.option == problem.option]
                assert not left, f"{problem}: with {suggested[1]} it is {left[0]}"
                tried += 1
    assert tried > 5
