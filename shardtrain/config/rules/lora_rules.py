"""Rules about low-rank adapters: their requirements, and the options they cannot be combined with."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardtrain.config import derived
from shardtrain.config.load import Loaded
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.rules.task_rules import NEW_HEAD
from shardtrain.config.rules.values import problem
from shardtrain.utils.errors import Problem

_HEADS = ("head", "lm_head")
"""Names of the output layer here and in Hugging Face models. Other patterns are resolved when the
model is built.
"""


def check_lora(loaded: Loaded) -> Iterator[Problem]:
    """Yield the problems of ``[lora]``. Ranges are always checked, combinations only if adapters
    are enabled.
    """
    lora = loaded.config.lora
    if lora.rank < 1:
        yield problem(loaded, "lora.rank", "must be at least 1", "use 8 to 64")
    if not 0 < lora.alpha < math.inf:
        yield problem(
            loaded,
            "lora.alpha",
            rule="must be a number above 0",
            fix="use once or twice lora.rank",
        )
    if not 0 <= lora.dropout < 1:
        yield problem(loaded, "lora.dropout", "must be at least 0 and below 1", "use 0 to 0.1")
    # Combinations only matter with adapters.
    if not lora.enable:
        return
    yield from frozen_weights(loaded)
    yield from adapted_modules(loaded)
    yield from dropout(loaded)
    yield from expert_stacks(loaded)
    yield from quantized_weights(loaded)


def frozen_weights(loaded: Loaded) -> Iterator[Problem]:
    """Adapters are trained next to frozen initial weights, whose optimizer state is not loaded."""
    lora = loaded.config.lora
    checkpoint = loaded.config.checkpoint
    # Adapters are only useful together with the weights that they were trained with.
    initial = derived.initial_weights(loaded.config)
    if initial is None and not lora.random_base:
        yield problem(
            loaded,
            "lora.enable",
            rule="requires initial weights to freeze, and no option names them",
            fix="set checkpoint.initial_load_path and checkpoint.enable = true, or lora.random_base = true to try it",
        )
    if initial is not None and lora.random_base:
        yield problem(
            loaded,
            "lora.random_base",
            rule=f"freezes random weights, and the checkpoint options name others: {initial}",
            fix="remove one of them",
        )
    if lora.initial_load_path is not None and not checkpoint.enable:
        yield problem(
            loaded,
            "lora.initial_load_path",
            rule="loads nothing while checkpoints are off",
            fix="set checkpoint.enable = true, or remove it",
        )
    # lora.initial_load_path is a checkpoint of adapters, whose optimizer state fits.
    if not checkpoint.initial_load_model_only and lora.initial_load_path is None:
        yield problem(
            loaded,
            "checkpoint.initial_load_model_only",
            rule="would load the optimizer state of weights that are frozen",
            fix="remove it",
        )


def adapted_modules(loaded: Loaded) -> Iterator[Problem]:
    """The rank is at most the model's width, and the output layer is not trained in two ways."""
    c = loaded.config
    shape = model_shape(loaded) or {}
    width = shape.get("dim")
    if isinstance(width, int) and c.lora.rank > width > 0:
        yield problem(
            loaded,
            "lora.rank",
            rule=f"is above the model's width of {width}: no weight of it has a higher rank",
            fix=f"use at most {width}",
        )

    # The output layer may share its weight, or be trained fully. An adapter on it would conflict with both.
    head = next((name for name in c.lora.target_modules if name in _HEADS), None)
    if head is None:
        return
    # The sum of weight and adapter would be stored in a weight that the embedding also uses.
    if shape.get("tied_embeddings"):
        yield problem(
            loaded,
            "lora.target_modules",
            rule=f"names {head}, whose weight is the embedding's: merging would change both",
            fix="leave it out",
        )
    trained_by = ""
    if c.task.name in NEW_HEAD:
        trained_by = f"task.name={c.task.name}"
    elif {*_HEADS} & {*c.lora.modules_to_save}:
        trained_by = "lora.modules_to_save"
    if trained_by:
        yield problem(
            loaded,
            "lora.target_modules",
            rule=f"names {head}, whose full weight {trained_by} trains",
            fix="leave it out",
        )


def dropout(loaded: Loaded) -> Iterator[Problem]:
    """With tensor parallelism every rank has the full input of an adapter, and would drop different
    elements.
    """
    if loaded.config.lora.dropout > 0 and loaded.config.parallelism.tensor_parallel_degree > 1:
        yield problem(
            loaded,
            "lora.dropout",
            rule="would drop different elements of the same input on each tensor-parallel rank",
            fix="use 0, or set parallelism.tensor_parallel_degree = 1",
        )


def expert_stacks(loaded: Loaded) -> Iterator[Problem]:
    """Adapters of stacks of expert weights support neither dropout nor DoRA, here and in PEFT."""
    lora = loaded.config.lora
    if not lora.target_parameters:
        return
    if lora.dropout > 0:
        yield problem(
            loaded,
            "lora.dropout",
            rule="is not supported for stacks of expert weights (lora.target_parameters)",
            fix="use 0, or leave lora.target_parameters out",
        )
    if lora.use_dora:
        yield problem(
            loaded,
            "lora.use_dora",
            rule="is only supported for linear modules, and lora.target_parameters names stacks of expert weights",
            fix="use one of them",
        )


def quantized_weights(loaded: Loaded) -> Iterator[Problem]:
    """Frozen weights in 8 or 4 bits exclude everything that splits, compiles, simulates or moves them."""
    c = loaded.config
    option = "lora.base_dtype"
    # "training" keeps the frozen weights unquantized, and has no limits.
    if c.lora.base_dtype == "training":
        return
    if c.parallelism.tensor_parallel_degree > 1:
        yield problem(
            loaded,
            option,
            rule="is not supported with tensor parallelism: blocks are not split",
            fix='set tensor_parallel_degree = 1, or use "training"',
        )
    if c.compile.enable and "model" in c.compile.components:
        yield problem(
            loaded,
            option,
            rule="is not supported with compile.enable",
            fix="set compile.enable = false",
        )
    if c.comm.mode == "local_tensor":
        yield problem(loaded, option, "is not simulated", 'set comm.mode = "default"')
    if c.training.enable_cpu_offload:
        yield problem(
            loaded,
            option,
            rule="is not supported with training.enable_cpu_offload",
            fix="set training.enable_cpu_offload = false",
        )
    if c.checkpoint.storage == "first_node":
        yield problem(
            loaded,
            option,
            rule='is not supported with checkpoint.storage = "first_node"',
            fix="use a shared folder",
        )
    if "://" in (c.checkpoint.initial_load_path or ""):
        yield problem(
            loaded,
            option,
            rule="requires weights in a folder, and checkpoint.initial_load_path is an object store",
            fix="download them first",
        )
