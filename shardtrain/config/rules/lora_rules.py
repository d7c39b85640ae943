"""Rules about low-rank adapters: what they need, and what they do not go with."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardtrain.config import derived
from shardtrain.config.load import Loaded
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.rules.task_rules import NEW_HEAD, WITH_REFERENCE
from shardtrain.config.rules.values import problem
from shardtrain.utils.errors import Problem

_HEADS = ("head", "lm_head")
"""What the last module is called here and by Hugging Face; other patterns are looked up when the model is built."""


def check_lora(loaded: Loaded) -> Iterator[Problem]:
    """Options of ``[lora]``: each by itself always, and with those of other sections where it is on."""
    lora = loaded.config.lora
    if lora.rank < 1:
        yield problem(loaded, "lora.rank", "must be at least 1", "use 8 to 64")
    if not 0 < lora.alpha < math.inf:
        yield problem(loaded, "lora.alpha", "must be a number above 0", "use once or twice lora.rank")
    if not 0 <= lora.dropout < 1:
        yield problem(loaded, "lora.dropout", "must be at least 0 and below 1", "use 0 to 0.1")
    if not lora.enable:
        return
    yield from _base(loaded)
    yield from _task(loaded)
    yield from _sizes(loaded)
    if lora.dropout > 0 and loaded.config.parallelism.tensor_parallel_degree > 1:
        rule = "would drop other numbers on each tensor-parallel rank of what they all hold whole"
        yield problem(loaded, "lora.dropout", rule, "use 0, or set parallelism.tensor_parallel_degree = 1")

    # What adapters beside a stack of experts cannot be, here as in PEFT
    if lora.target_parameters and lora.dropout > 0:
        rule = "drops inputs of a module, and a stack of experts (lora.target_parameters) is not one"
        yield problem(loaded, "lora.dropout", rule, "use 0, or leave lora.target_parameters out")
    if lora.target_parameters and lora.use_dora:
        rule = "is for linear modules, and lora.target_parameters names stacks of experts' weights"
        yield problem(loaded, "lora.use_dora", rule, "use one of them")
    yield from _low_bits(loaded)


def _base(loaded: Loaded) -> Iterator[Problem]:
    lora = loaded.config.lora
    checkpoint = loaded.config.checkpoint
    initial = derived.initial_weights(loaded.config)
    if initial is None and not lora.random_base:
        rule = "trains adapters beside given weights, and none are given"
        fix = "set checkpoint.initial_load_path and checkpoint.enable = true, or lora.random_base = true to try it"
        yield problem(loaded, "lora.enable", rule, fix)
    if initial is not None and lora.random_base:
        rule = f"freezes initial weights, and the checkpoint options name others: {initial}"
        yield problem(loaded, "lora.random_base", rule, "remove one of them")
    if lora.initial_load_path is not None and not checkpoint.enable:
        rule = "loads nothing while checkpoints are off"
        yield problem(loaded, "lora.initial_load_path", rule, "set checkpoint.enable = true, or remove it")
    if not checkpoint.initial_load_model_only and lora.initial_load_path is None:
        rule = "would take an optimizer's state for weights that are frozen"
        yield problem(loaded, "checkpoint.initial_load_model_only", rule, "remove it")


def _task(loaded: Loaded) -> Iterator[Problem]:
    lora = loaded.config.lora
    task = loaded.config.task
    if task.name in WITH_REFERENCE and lora.initial_load_path is not None:
        rule = f'begins with adapters, which the frozen reference of task.name="{task.name}" would not have'
        yield problem(loaded, "lora.initial_load_path", rule, "merge them first (shardtrain merge)")
    if task.name in WITH_REFERENCE and lora.base_dtype != "training":
        rule = f'rounds the weights, and the frozen reference of task.name="{task.name}" is not rounded'
        yield problem(loaded, "lora.base_dtype", rule, 'use "training"')


def _sizes(loaded: Loaded) -> Iterator[Problem]:
    shape = model_shape(loaded) or {}
    width = shape.get("dim")
    if isinstance(width, int) and loaded.config.lora.rank > width > 0:
        rule = f"is above the model's width of {width}: no weight of it has a higher rank"
        yield problem(loaded, "lora.rank", rule, f"use at most {width}")
    head = next((name for name in loaded.config.lora.target_modules if name in _HEADS), None)
    if head is not None and shape.get("tied_embeddings"):
        rule = f"names {head}, whose weight is the embedding's: merging would change both"
        yield problem(loaded, "lora.target_modules", rule, "leave it out")
    c = loaded.config
    whole = ""
    if c.task.name in NEW_HEAD:
        whole = f"task.name={c.task.name}"
    elif {*_HEADS} & {*c.lora.modules_to_save}:
        whole = "lora.modules_to_save"
    if head is not None and whole:
        yield problem(loaded, "lora.target_modules", f"names {head}, which {whole} trains whole", "leave it out")


def _low_bits(loaded: Loaded) -> Iterator[Problem]:
    c = loaded.config
    if c.lora.base_dtype == "training":
        return
    where = c.checkpoint.initial_load_path or ""
    for wrong, rule, fix in (
        (c.parallelism.tensor_parallel_degree > 1, "does not go with tensor parallelism: blocks are not split", ""),
        (c.compile.enable and "model" in c.compile.components, "does not go with compile.enable", "compile nothing"),
        (c.comm.mode == "local_tensor", "is not simulated", 'set comm.mode = "default"'),
        (c.training.enable_cpu_offload, "does not go with training.enable_cpu_offload", "set that to false"),
        (c.checkpoint.storage == "first_node", 'does not go with checkpoint.storage = "first_node"', "share a folder"),
        ("://" in where, "needs weights in a folder, and checkpoint.initial_load_path is a store", "fetch them first"),
    ):
        if wrong:
            yield problem(loaded, "lora.base_dtype", rule, fix or 'set tensor_parallel_degree = 1, or use "training"')
