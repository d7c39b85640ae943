"""Sections of the user's own have types, defaults, origins, help and errors like the package's."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from shardtrain.config import ConfigError, changes, check, load, resolved_toml
from shardtrain.config.options import help_text, options

FILE = '''
"""My options."""
from dataclasses import dataclass, field
from typing import Literal, Optional
raise SystemExit("this file is parsed and never run")

@dataclass
class Reward:
    """Rewards of my task."""
    scale: float = 1
    """Factor of
    the reward."""
    kind: Literal["mean", "last"] = "mean"
    names: list[str] = field(default_factory=lambda: ["x"])
    limit: Optional[int] = None
    cap: "int | None" = 3
    weights: dict[str, float] = field(default_factory=dict)

@dataclass
class Optimizer:
    trust: float = 0.5
    lr: float = 0.125

@dataclass
class JobConfig:
    reward: Reward = field(default_factory=Reward)
    optimizer: Optimizer = field(default_factory=Optimizer)
'''


@pytest.fixture
def module(tmp_path: Path) -> str:
    """Path of a file with a new section and an extension of [optimizer]."""
    return write(tmp_path, FILE)


def write(folder: Path, text: str) -> str:
    path = folder / "my_options.py"
    path.write_text(text)
    return str(path)


def test_defaults_are_those_of_the_file(module: str) -> None:
    config = load(None, ["--job.custom_config_module", module]).config
    reward = config.reward
    assert (reward.scale, reward.kind, reward.limit, reward.cap) == (1.0, "mean", None, 3)
    assert isinstance(reward.scale, float), "an integer default of a float option is a float"
    assert reward.names == ["x"]
    assert reward.weights == {}
    assert (config.optimizer.trust, config.optimizer.lr, config.optimizer.beta1) == (
        0.5,
        0.125,
        0.9,
    )


def test_values_and_origins_come_from_file_and_command_line(tmp_path: Path, module: str) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        f'[job]\ncustom_config_module = "{module}"\n[reward]\nscale = 2\nweights.a = 3\n[optimizer]\ntrust = 1\n'
    )
    loaded = load(
        run, ["--reward.kind", "last", "--reward.names", "p", "q", "--reward.weights.b=4"]
    )
    reward = loaded.config.reward

    assert (reward.scale, reward.kind, reward.names) == (2.0, "last", ["p", "q"])
    assert reward.weights == {"a": 3.0, "b": 4.0}
    assert loaded.config.optimizer.trust == 1.0
    assert loaded.origins["reward.scale"] == "run.toml:4"
    assert loaded.origins["reward.kind"] == "command line"
    assert loaded.origins["reward.limit"] == "default"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reward.scal", "2"], "did you mean reward.scale?"),
        (["--rewards.scale", "2"], "did you mean reward.scale?"),
        (["--optimizer.trus", "2"], "did you mean optimizer.trust?"),
        (["--reward.kind", "first"], 'must be one of "mean", "last"'),
        (["--reward.limit", "1.5"], "must be an integer"),
        (["--reward", "1"], "is a section, not an option"),
    ],
    ids=str,
)
def test_wrong_options_get_the_usual_errors(
    module: str, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, ["--job.custom_config_module", module, *arguments])
    assert message in str(error.value)


def test_options_of_a_file_are_unknown_without_it(module: str) -> None:
    load(None, ["--job.custom_config_module", module, "--reward.scale", "2"])
    with pytest.raises(ConfigError, match="is not an option"):
        load(None, ["--reward.scale", "2"])
    assert "reward.scale" not in options()


def test_saved_configuration_loads_to_an_equal_one(tmp_path: Path, module: str) -> None:
    config = load(
        None,
        ["--job.custom_config_module", module, "--reward.scale", "2", "--optimizer.trust", "3"],
    ).config
    saved = tmp_path / "saved.toml"
    saved.write_text(resolved_toml(config))

    assert "[reward]" in saved.read_text()
    assert load(saved).config == config


def test_configuration_survives_pickle_and_copies(module: str) -> None:
    config = load(None, ["--job.custom_config_module", module, "--reward.scale", "2"]).config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_two_loads_share_no_list(module: str) -> None:
    arguments = ["--job.custom_config_module", module]
    first = load(None, arguments).config
    first.reward.names.append("y")
    assert load(None, arguments).config.reward.names == ["x"]


def test_changed_file_is_read_again(tmp_path: Path, module: str) -> None:
    arguments = ["--job.custom_config_module", module]
    assert load(None, arguments).config.reward.cap == 3
    write(tmp_path, FILE.replace("= 3", "= 4"))
    assert load(None, arguments).config.reward.cap == 4


def test_help_has_the_docstrings(module: str) -> None:
    schema = type(load(None, ["--job.custom_config_module", module]).config)
    text = help_text("reward", schema)
    assert "Rewards of my task." in text
    assert "Factor of the reward." in text
    assert "--optimizer.trust  (number; default 0.5)" in help_text("optimizer", schema)
    assert "dtype" in help_text("optimizer.state_dtype", schema), (
        "inherited options keep their texts"
    )


def test_changed_value_on_resume_is_an_error_that_can_be_accepted(module: str) -> None:
    arguments = ["--job.custom_config_module", module]
    saved = changes.to_record(load(None, arguments).config, 1)
    loaded = load(
        None, [*arguments, "--reward.scale", "2", "--checkpoint.accept_changes", "reward.scale"]
    )
    (change,) = changes.find(saved, loaded.config, 1)

    assert (change.option, change.kind) == ("reward.scale", "error")
    assert not list(changes.check_accepted(loaded))


def test_valid_configuration_has_no_problems(module: str) -> None:
    loaded = load(None, ["--job.custom_config_module", module])
    with_module = {str(problem) for problem in check(loaded)}
    assert with_module == {str(problem) for problem in check(load(None, []))}


SECTION = "class A:\n    x: int = 1\n"
INVALID = {
    "x = 1": "does not define the class JobConfig",
    "class JobConfig(": "cannot be read as Python",
    "class JobConfig:\n    a: int = 1": "JobConfig.a, which is not a dataclass of this file",
    "class JobConfig:\n    a: Other = 1": "JobConfig.a, which is not a dataclass of this file",
    f"{SECTION}class JobConfig:\n    job: A": "the section [job], which cannot be changed",
    f"{SECTION}class JobConfig:\n    _a: A": "the section [_a], which cannot be changed",
    f"{SECTION}class JobConfig:\n    a: A\n    a: A": "a field of JobConfig twice",
    "class A:\n    pass\nclass JobConfig:\n    a: A": "the section [a] without options",
    "class A:\n    x: set = 1\nclass JobConfig:\n    a: A": "a.x as set, which is not supported",
    "class A:\n    x: list[list[int]] = 1\nclass JobConfig:\n    a: A": "a.x as list[list[int]]",
    "class A:\n    x: int\nclass JobConfig:\n    a: A": "a.x without a default",
    "class A:\n    x: int = f()\nclass JobConfig:\n    a: A": "a default of a.x that is not a literal",
    "class A:\n    x: int = 'no'\nclass JobConfig:\n    a: A": "a default of a.x that must be an integer",
    "class A:\n    x: int = None\nclass JobConfig:\n    a: A": "a default of a.x that must be an integer",
    "class A:\n    x: Literal[f()] = 1\nclass JobConfig:\n    a: A": "which is not supported",
    "class A:\n    x: 'int +' = 1\nclass JobConfig:\n    a: A": "which is not supported",
    "class A:\n    lr: int = 1\nclass JobConfig:\n    optimizer: A": "optimizer.lr another type than it has",
}


@pytest.mark.parametrize("text", INVALID, ids=list(INVALID.values()))
def test_invalid_file_is_one_line(tmp_path: Path, text: str) -> None:
    module = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load(None, ["--job.custom_config_module", module])

    message = str(error.value)
    assert INVALID[text] in message
    assert "\n" not in message
    assert "job.custom_config_module" in message


@pytest.mark.parametrize("path", ["missing.py", "torchtitan.experiments.flux", "."])
def test_path_that_is_no_python_file_is_one_line(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="is not a Python file"):
        load(None, ["--job.custom_config_module", path])
