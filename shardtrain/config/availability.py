"""Options of the schema that are not implemented.
Setting them is an error, because no option is silently ignored.

Delete the line of an option when you implement it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtrain.config.load import Loaded
from shardtrain.config.rules.values import problem
from shardtrain.utils.errors import Problem

# Columns: option, predicate that is true for unsupported values, the missing feature, the fix.
UNAVAILABLE: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "model.converters",
        lambda names: "quantize.grouped_mm.mx" in names,
        "experts in microscaling types",
        'use "quantize.grouped_mm.float8" for experts; linear layers have "quantize.linear.mx"',
    ),
    (
        "parallelism.expert_parallel_comm_backend",
        lambda v: v != "standard",
        "DeepEP",
        'set it to "standard"',
    ),
    (
        "comm.mode",
        lambda v: v == "local_tensor",
        "the numbers of many ranks in one process",
        'use "fake_backend" to check a mesh, or "default" with several processes on one CPU for its numbers',
    ),
    ("memory_estimation.enable", bool, "torchtitan's memory estimation", "set it to false"),
    ("fault_tolerance.enable", bool, "replica groups of torchft", "set it to false"),
    (
        "experimental.custom_import",
        bool,
        "importing a module at start",
        "name your model file in model.name",
    ),
    (
        "experimental.custom_args_module",
        bool,
        "options of a module",
        "set job.custom_config_module to a file",
    ),
)


def unavailable(loaded: Loaded) -> list[Problem]:
    """Return a problem for every option whose value requires a missing feature."""
    return [
        problem(loaded, option, f"asks for {what}, not available yet", fix)
        for option, asks, what, fix in UNAVAILABLE
        if asks(loaded.value(option))
    ]
