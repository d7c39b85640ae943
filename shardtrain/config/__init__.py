"""Configuration: a TOML file and ``--section.key value`` arguments become one frozen ``Config``.

``load`` reads, ``check`` and ``machine_notes`` find problems, ``require`` raises all of them, and ``show``
prints every value with its origin. This package does not import torch.

Rules and help are imported on first use. Modules that only need a ``Config`` or a derived value, such as
those of ``distributed/``, therefore do not import the rules of all options.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Import these modules now, because they share their names with functions. A later import of such a module
# would replace the function in this namespace.
from shardtrain.config.load import Loaded, load, load_settings, read_settings
from shardtrain.config.schema import Config
from shardtrain.config.toml_writer import resolved_toml, set_toml, show
from shardtrain.utils.errors import ConfigError, Problem

if TYPE_CHECKING:
    from shardtrain.config.availability import unavailable
    from shardtrain.config.machine_rules import machine_notes, without_effect_on_a_cpu
    from shardtrain.config.model_file import ModelFacts, model_names, read_model_file, shape
    from shardtrain.config.options import help_text, nearest
    from shardtrain.config.problems import problems_of, require, require_to_build
    from shardtrain.config.rules import check, notes
    from shardtrain.config.rules.safety_rules import code_of_a_run

__all__ = [
    "Config",
    "ConfigError",
    "Loaded",
    "ModelFacts",
    "Problem",
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
    "without_effect_on_a_cpu",
]

_FILE_OF = {
    "availability": ("unavailable",),
    "machine_rules": ("machine_notes", "without_effect_on_a_cpu"),
    "model_file": ("ModelFacts", "model_names", "read_model_file", "shape"),
    "options": ("help_text", "nearest"),
    "problems": ("problems_of", "require", "require_to_build"),
    "rules": ("check", "notes"),
    "rules.safety_rules": ("code_of_a_run",),
}


def __getattr__(name: str) -> Any:
    for file, names in _FILE_OF.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{file}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
