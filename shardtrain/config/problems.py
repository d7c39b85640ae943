"""Collect all problems of a configuration: of parsing, of the rules, and of this machine."""

from __future__ import annotations

from shardtrain.config import secondary
from shardtrain.config.availability import unavailable
from shardtrain.config.load import Loaded
from shardtrain.config.machine_rules import is_for_training, machine_notes
from shardtrain.config.rules import check, notes
from shardtrain.utils.errors import ConfigError, Problem


def problems_of(
    loaded: Loaded,
    world_size: int | None = None,
    device: str | None = None,
    num_devices: int | None = None,
) -> list[Problem]:
    """Return all problems that can be found without torch.

    A key or value that could not be parsed is replaced by its default, which the user does
    not want. Problems that only follow from such a default are skipped. For the other arguments,
    see ``machine_notes``.
    """
    problems = [
        *check(loaded),
        *unavailable(loaded),
        *machine_notes(loaded, world_size, device, num_devices),
    ]
    return secondary.distinct([*loaded.problems, *secondary.without(loaded.problems, problems)])


def require(
    loaded: Loaded,
    world_size: int | None = None,
    device: str | None = None,
    num_devices: int | None = None,
) -> tuple[str, ...]:
    """Raise ConfigError if there are problems. Otherwise return notices: deprecated names,
    options without effect.
    """
    problems = problems_of(loaded, world_size, device, num_devices)
    if problems:
        raise ConfigError(problems)
    return (*loaded.notices, *notes(loaded))


def require_to_build(loaded: Loaded, world_size: int) -> tuple[str, ...]:
    """Like ``require``, for building the model without training. Problems of training only become notices."""
    problems = problems_of(loaded, world_size)
    of_training = [problem for problem in problems if is_for_training(problem)]
    if len(of_training) < len(problems):
        raise ConfigError([problem for problem in problems if problem not in of_training])
    lines = [f"a training would stop here: {problem}" for problem in of_training]
    return (*loaded.notices, *notes(loaded), *lines)
