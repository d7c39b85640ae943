"""Configuration: a TOML file and ``--section.key value`` arguments become one frozen ``Config``.

``load`` reads, ``check`` and ``machine_notes`` find problems, ``require`` raises all of them, ``show`` prints every
value with its origin. None of it imports torch.
"""

from __future__ import annotations

from shardtrain.config import secondary
from shardtrain.config.availability import unavailable
from shardtrain.config.load import Loaded, load, load_settings, read_settings
from shardtrain.config.machine import is_for_training, machine_notes
from shardtrain.config.model_file import ModelFacts, model_names, read_model_file, shape
from shardtrain.config.options import help_text, nearest
from shardtrain.config.rules import check, notes
from shardtrain.config.rules.safety import code_of_a_run
from shardtrain.config.schema import Config
from shardtrain.config.show import resolved_toml, set_toml, show
from shardtrain.utils.errors import ConfigError, Problem

__all__ = [
    "Config",
    "Loaded",
    "ModelFacts",
    "check",
    "code_of_a_run",
    "help_text",
    "load",
    "load_settings",
    "machine_notes",
    "model_names",
    "nearest",
    "notes",
    "problems_of",
    "read_model_file",
    "read_settings",
    "require",
    "require_to_build",
    "resolved_toml",
    "set_toml",
    "shape",
    "show",
    "unavailable",
]


def problems_of(
    loaded: Loaded, world_size: int | None = None, device: str | None = None, num_devices: int | None = None
) -> list[Problem]:
    """Return every problem of reading, of the rules and of this machine that can be known without torch.

    The other arguments are those of ``machine_notes``. What only follows from a key or value that could not be read is
    left out: its default, which stands for it here, is not what the user wants.
    """
    found = [*check(loaded), *unavailable(loaded), *machine_notes(loaded, world_size, device, num_devices)]
    return secondary.distinct([*loaded.problems, *secondary.without(loaded.problems, found)])


def require(
    loaded: Loaded, world_size: int | None = None, device: str | None = None, num_devices: int | None = None
) -> tuple[str, ...]:
    """Raise ConfigError with all that ``problems_of`` finds.

    Returns the lines to tell the user instead where there is none: older names, options without effect.
    """
    if problems := problems_of(loaded, world_size, device, num_devices):
        raise ConfigError(problems)
    return (*loaded.notices, *notes(loaded))


def require_to_build(loaded: Loaded, world_size: int) -> tuple[str, ...]:
    """As ``require``, to build the model without memory and train nothing: what a training alone misses is told."""
    problems = problems_of(loaded, world_size)
    missing = [one for one in problems if is_for_training(one)]
    if len(missing) < len(problems):
        raise ConfigError([one for one in problems if one not in missing])
    return (*loaded.notices, *notes(loaded), *(f"a training would stop here: {one}" for one in missing))
