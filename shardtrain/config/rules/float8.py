"""Rules about computing in float8: what ``model.converters`` may name, and what does not go with it."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest
from shardtrain.config.rules.model import model_shape
from shardtrain.config.rules.values import any_of, problem
from shardtrain.utils.errors import Problem

OPTION = "model.converters"
LINEAR = "quantize.linear.float8"
GROUPED = "quantize.grouped_mm.float8"
_MULTIPLE = 16
"""Of the rows and columns of a matrix of experts, as devices need it."""
CONVERTERS = (LINEAR, "quantize.linear.mx", GROUPED, "quantize.grouped_mm.mx")


def check_float8(loaded: Loaded) -> Iterator[Problem]:
    """``model.converters`` and the sections of ``[quantize]`` that it switches on."""
    config = loaded.config
    wanted = config.model.converters
    for name in wanted:
        if name not in CONVERTERS:
            near = nearest(name, CONVERTERS)
            fix = f"did you mean {near}?" if near else f"use {any_of(CONVERTERS)}"
            yield problem(loaded, OPTION, f"names {name}, which is not a converter", fix)
    for kind in ("linear", "grouped_mm"):
        if {f"quantize.{kind}.float8", f"quantize.{kind}.mx"} <= set(wanted):
            yield problem(loaded, OPTION, f"asks for two types of the same products ({kind})", "keep one of the two")
    if config.model.print_after_conversion and not wanted:
        rule = "prints what model.converters has changed, which is empty"
        yield problem(loaded, "model.print_after_conversion", rule, "remove it")
    if not {LINEAR, GROUPED} & set(wanted):
        return
    if config.lora.enable:
        rule = "leaves frozen weights and adapters in high precision, where float8 gains nothing"
        yield problem(loaded, OPTION, rule, "set model.converters = [], or lora.enable = false")
    if config.training.mixed_precision_param == "float16":
        rule = "is float16, which does not hold what gradients in float8 stand for"
        yield problem(loaded, "training.mixed_precision_param", rule, 'use "bfloat16"')
    if LINEAR in wanted:
        yield from _linear(loaded)
    if GROUPED in wanted and not config.quantize.grouped_mm.float8.fqns:
        fix = f'set it to ["experts"], or remove "{GROUPED}" from {OPTION}'
        yield problem(loaded, f"{GROUPED}.fqns", "names no experts", fix)
    elif GROUPED in wanted:
        yield from _grouped(loaded)


def _linear(loaded: Loaded) -> Iterator[Problem]:
    options = loaded.config.quantize.linear.float8
    gather = f"{LINEAR}.enable_fsdp_float8_all_gather"
    if options.enable_fsdp_float8_all_gather and options.recipe_name not in (None, "tensorwise"):
        rule = f"needs one scale for a weight, and recipe_name = {options.recipe_name} has one for each row and column"
        yield problem(loaded, gather, rule, 'set it to false, or recipe_name = "tensorwise"')
    if options.enable_fsdp_float8_all_gather and loaded.config.training.enable_cpu_offload:
        rule = "rounds weights on the device, and training.enable_cpu_offload keeps them in host memory"
        yield problem(loaded, gather, rule, "set one of the two to false")
    if options.precompute_float8_dynamic_scale_for_fsdp and not options.enable_fsdp_float8_all_gather:
        option = f"{LINEAR}.precompute_float8_dynamic_scale_for_fsdp"
        rule = "has no effect without enable_fsdp_float8_all_gather"
        yield problem(loaded, option, rule, "set that too, or remove it")


def _grouped(loaded: Loaded) -> Iterator[Problem]:
    """Experts are there, of sizes that devices take; a model file of the user's own says so when it is built."""
    sizes = model_shape(loaded)
    option = f"{GROUPED}.fqns"
    if sizes is None or loaded.config.model.name.endswith(".py"):
        return
    if "num_experts" not in sizes:
        rule = f"names experts, and {loaded.config.model.name} has none"
        yield problem(loaded, option, rule, f'remove "{GROUPED}" from {OPTION}')
        return
    for name in ("dim", "moe_ffn_dim"):
        size = sizes.get(name)
        if isinstance(size, int) and size % _MULTIPLE:
            rule = f"names experts whose {name} is {size}, which is not a multiple of {_MULTIPLE}"
            yield problem(loaded, option, rule, f'remove "{GROUPED}" from {OPTION}, or change model.overrides.{name}')


def needs_products(loaded: Loaded) -> bool:
    """Whether the device has to multiply in float8 itself."""
    wanted = loaded.config.model.converters
    quantize = loaded.config.quantize
    return (LINEAR in wanted and not quantize.linear.float8.emulate) or (
        GROUPED in wanted and not quantize.grouped_mm.float8.emulate
    )


def float8_notes(loaded: Loaded) -> list[str]:
    """What is asked for and changes nothing on this mesh."""
    config = loaded.config
    degrees = {config.parallelism.data_parallel_shard_degree, config.parallelism.context_parallel_degree}
    gather = config.quantize.linear.float8.enable_fsdp_float8_all_gather
    if LINEAR in config.model.converters and gather and degrees == {1}:
        return [f"{LINEAR}.enable_fsdp_float8_all_gather: without effect, one rank holds whole weights"]
    return []
