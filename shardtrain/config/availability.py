"""Options of the schema that are not available yet: one table, so that none of them is ignored in silence.

Whoever makes one of them work deletes its line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardtrain.config.load import Loaded
from shardtrain.config.rules.values import problem
from shardtrain.utils.errors import Problem

# (option, whether a value of it asks for something that is not here, what is not here, what to do)
UNAVAILABLE: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("job.custom_config_module", bool, "sections of your own", "remove it"),
    (
        "model.converters",
        lambda names: "quantize.grouped_mm.mx" in names,
        "experts in microscaling types",
        'use "quantize.grouped_mm.float8" for experts; linear layers have "quantize.linear.mx"',
    ),
    ("parallelism.expert_parallel_comm_backend", lambda v: v != "standard", "DeepEP", 'set it to "standard"'),
    (
        "comm.mode",
        lambda v: v == "local_tensor",
        "the numbers of many ranks in one process",
        'use "fake_backend" to check a mesh, or "default" with several processes on one CPU for its numbers',
    ),
    ("memory_estimation.enable", bool, "torchtitan's memory estimation", "set it to false"),
    ("fault_tolerance.enable", bool, "replica groups of torchft", "set it to false"),
    ("experimental.custom_import", bool, "importing a module at start", "name your model file in model.name"),
    ("experimental.custom_args_module", bool, "sections of your own", "remove it"),
)


def unavailable(loaded: Loaded) -> list[Problem]:
    """Return a problem for every option whose value asks for something that this version does not do."""
    return [
        problem(loaded, option, f"asks for {what}, not available yet", fix)
        for option, asks, what, fix in UNAVAILABLE
        if asks(loaded.value(option))
    ]
