"""Rules about computing in float8 and MX: what ``model.converters`` may name, and what does not go with it."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.rules.values import any_of, problem
from shardtrain.facts.quantization import CONVERTERS, FLOAT8_MULTIPLE, GROUPED, LINEAR, MX, MX_BLOCK
from shardtrain.utils.errors import Problem

OPTION = "model.converters"


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
    if not {LINEAR, MX, GROUPED} & set(wanted):
        return
    if config.lora.enable:
        rule = "leaves frozen weights and adapters in high precision, where 8 bits gain nothing"
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
        if isinstance(size, int) and size % FLOAT8_MULTIPLE:
            rule = f"names experts whose {name} is {size}, which is not a multiple of {FLOAT8_MULTIPLE}"
            yield problem(loaded, option, rule, f'remove "{GROUPED}" from {OPTION}, or change model.overrides.{name}')


def needs_products(loaded: Loaded) -> bool:
    """Whether the device has to multiply in float8 itself."""
    wanted = loaded.config.model.converters
    quantize = loaded.config.quantize
    return (LINEAR in wanted and not quantize.linear.float8.emulate) or (
        GROUPED in wanted and not quantize.grouped_mm.float8.emulate
    )


def needs_mx_products(loaded: Loaded) -> bool:
    """Whether the device has to multiply in MX itself."""
    config = loaded.config
    return MX in config.model.converters and config.quantize.linear.mx.recipe_name != "mxfp8_emulated"


def float8_notes(loaded: Loaded) -> list[str]:
    """What is asked for and changes nothing here, or does so on other meshes."""
    config = loaded.config
    if MX in config.model.converters:
        return _mx_notes(loaded)
    degrees = {config.parallelism.data_parallel_shard_degree, config.parallelism.context_parallel_degree}
    gather = config.quantize.linear.float8.enable_fsdp_float8_all_gather
    if LINEAR in config.model.converters and gather and degrees == {1}:
        return [f"{LINEAR}.enable_fsdp_float8_all_gather: without effect, one rank holds whole weights"]
    return []


def _mx_notes(loaded: Loaded) -> list[str]:
    found = []
    option = f"{MX}.mxfp8_dim1_cast_kernel_choice"
    if loaded.is_set(option):
        found.append(f"{option}: without effect, casts are PyTorch's operations here")
    # Gradients of weights sum over tokens, in blocks of 32. Context parallelism gives a rank two pieces of a row
    config = loaded.config
    length = config.training.seq_len
    degree = config.parallelism.context_parallel_degree
    pieces = 2 * degree if degree > 1 else 1
    if length % (MX_BLOCK * pieces):
        piece = f"{length} tokens" if pieces == 1 else f"{length} tokens in {pieces} pieces"
        found.append(
            f"training.seq_len={length}: a row is {piece}, not whole blocks of {MX_BLOCK}, "
            f"so that gradients of weights in MX are rounded otherwise on another mesh"
        )
    return found
