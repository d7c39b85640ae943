"""Everything that is wrong with a configuration, at once: reading, rules, and the machine it is to run on."""

from __future__ import annotations

from shardtrain.config import secondary
from shardtrain.config.availability import unavailable
from shardtrain.config.load import Loaded
from shardtrain.config.machine_rules import is_for_training, machine_notes
from shardtrain.config.rules import check, notes
from shardtrain.utils.errors import ConfigError, Problem


def problems_of(
    loaded: Loaded, world_size: int | None = None, device: str | None = None, num_devices: int | None = None
) -> list[Problem]:
    """Return every problem of reading, of the rules and of this machine that can be known without torch.

    The other arguments are those of ``machine_notes``. What only follows from a key or value that could not be read is
    left out: its default, which takes its place, is not what the user wants.
    """
    found = [*check(loaded), *unavailable(loaded), *machine_notes(loaded, world_size, device, num_devices)]
    return secondary.distinct([*loaded.problems, *secondary.without(loaded.problems, found)])


def require(
    loaded: Loaded, world_size: int | None = None, device: str | None = None, num_devices: int | None = None
) -> tuple[str, ...]:
    """Raise ConfigError with all that ``problems_of`` finds.

    Returns the lines to tell the user instead where there is none: older names, options without effect.
    """
    problems = problems_of(loaded, world_size, device, num_devices)
    if problems:
        raise ConfigError(problems)
    return (*loaded.notices, *notes(loaded))


def require_to_build(loaded: Loaded, world_size: int) -> tuple[str, ...]:
    """As ``require``, to build the model without memory and train nothing: what only a training misses is a note."""
    problems = problems_of(loaded, world_size)
    of_training = [problem for problem in problems if is_for_training(problem)]
    if len(of_training) < len(problems):
        raise ConfigError([problem for problem in problems if problem not in of_training])
    lines = [f"a training would stop here: {problem}" for problem in of_training]
    return (*loaded.notices, *notes(loaded), *lines)
