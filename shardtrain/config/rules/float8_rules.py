"""Rules about computing in float8 and MX: the names in ``model.converters``, and the options they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.rules.values import any_of, problem
from shardtrain.facts.quantization import (
    CONVERTERS,
    FLOAT8_MULTIPLE,
    GROUPED,
    LINEAR,
    MX,
    MX_BLOCK,
    OPTION,
)
from shardtrain.utils.errors import Problem


def check_float8(loaded: Loaded) -> Iterator[Problem]:
    """Yield the problems of ``model.converters`` and of the sections of ``[quantize]`` that it enables."""
    config = loaded.config
    converters = config.model.converters
    for name in converters:
        if name not in CONVERTERS:
            near = nearest(name, CONVERTERS)
            yield problem(
                loaded,
                OPTION,
                rule=f"names {name}, which is not a converter",
                fix=f"did you mean {near}?" if near else f"use {any_of(CONVERTERS)}",
            )
    for kind in ("linear", "grouped_mm"):
        if {f"quantize.{kind}.float8", f"quantize.{kind}.mx"} <= set(converters):
            yield problem(
                loaded,
                OPTION,
                rule=f"names two dtypes for the same products ({kind})",
                fix="keep one of the two",
            )
    if config.model.print_after_conversion and not converters:
        yield problem(
            loaded,
            "model.print_after_conversion",
            rule="prints the changes of model.converters, which is empty",
            fix="remove it",
        )
    if not {LINEAR, MX, GROUPED} & set(converters):
        return

    # Float8 and MX are supported neither with adapters nor with float16.
    if config.lora.enable:
        yield problem(
            loaded,
            OPTION,
            rule="is not supported with adapters, whose frozen weights stay in high precision",
            fix="set model.converters = [], or lora.enable = false",
        )
    if config.training.mixed_precision_param == "float16":
        yield problem(
            loaded,
            "training.mixed_precision_param",
            rule="is float16, which cannot represent the range of float8 gradients",
            fix='use "bfloat16"',
        )

    if LINEAR in converters:
        yield from float8_all_gather(loaded)
    if GROUPED in converters:
        yield from float8_experts(loaded)


def float8_all_gather(loaded: Loaded) -> Iterator[Problem]:
    """FSDP gathers weights in float8 only if they have one scale and are on the device."""
    options = loaded.config.quantize.linear.float8
    option = f"{LINEAR}.enable_fsdp_float8_all_gather"
    if not options.enable_fsdp_float8_all_gather:
        return
    if options.recipe_name not in (None, "tensorwise"):
        yield problem(
            loaded,
            option,
            rule=f"requires one scale per weight, and recipe_name = {options.recipe_name} has one per row and column",
            fix='set it to false, or recipe_name = "tensorwise"',
        )
    if loaded.config.training.enable_cpu_offload:
        yield problem(
            loaded,
            option,
            rule="rounds weights on the device, and training.enable_cpu_offload keeps them in host memory",
            fix="set one of the two to false",
        )


def float8_experts(loaded: Loaded) -> Iterator[Problem]:
    """The model has experts of sizes that devices support. For a user's model file this is checked
    when it is built.
    """
    option = f"{GROUPED}.fqns"
    if not loaded.config.quantize.grouped_mm.float8.fqns:
        yield problem(
            loaded,
            option,
            rule="names no experts",
            fix=f'set it to ["experts"], or remove "{GROUPED}" from {OPTION}',
        )
        return
    sizes = model_shape(loaded)
    if sizes is None or loaded.config.model.name.endswith(".py"):
        return
    if "num_experts" not in sizes:
        yield problem(
            loaded,
            option,
            rule=f"names experts, and {loaded.config.model.name} has none",
            fix=f'remove "{GROUPED}" from {OPTION}',
        )
        return
    for name in ("dim", "moe_ffn_dim"):
        size = sizes.get(name)
        if isinstance(size, int) and size % FLOAT8_MULTIPLE:
            yield problem(
                loaded,
                option,
                rule=f"names experts whose {name} is {size}, which is not a multiple of {FLOAT8_MULTIPLE}",
                fix=f'remove "{GROUPED}" from {OPTION}, or change model.overrides.{name}',
            )


def needs_float8_matmuls(loaded: Loaded) -> bool:
    """True if the device must support float8 matrix products."""
    converters = loaded.config.model.converters
    quantize = loaded.config.quantize
    uses_linear = LINEAR in converters and not quantize.linear.float8.emulate
    uses_grouped = GROUPED in converters and not quantize.grouped_mm.float8.emulate
    return uses_linear or uses_grouped


def needs_mx_matmuls(loaded: Loaded) -> bool:
    """True if the device must support MX matrix products."""
    config = loaded.config
    return (
        MX in config.model.converters and config.quantize.linear.mx.recipe_name != "mxfp8_emulated"
    )


def float8_notes(loaded: Loaded) -> list[str]:
    """Return notes about options without effect, and about results that depend on the mesh."""
    config = loaded.config
    if MX in config.model.converters:
        return _mx_notes(loaded)
    degrees = {
        config.parallelism.data_parallel_shard_degree,
        config.parallelism.context_parallel_degree,
    }
    has_gather = config.quantize.linear.float8.enable_fsdp_float8_all_gather
    if LINEAR in config.model.converters and has_gather and degrees == {1}:
        return [
            f"{LINEAR}.enable_fsdp_float8_all_gather: without effect, one rank has unsharded weights"
        ]
    return []


def _mx_notes(loaded: Loaded) -> list[str]:
    lines = []
    option = f"{MX}.mxfp8_dim1_cast_kernel_choice"
    if loaded.is_set(option):
        lines.append(f"{option}: without effect, casts are PyTorch's operations here")

    # Gradients of weights are sums over tokens, in blocks of 32. With context parallelism a rank
    # has two pieces of a row, so blocks may differ from those of one rank.
    config = loaded.config
    length = config.training.seq_len
    degree = config.parallelism.context_parallel_degree
    pieces = 2 * degree if degree > 1 else 1
    if length % (MX_BLOCK * pieces):
        row = f"{length} tokens in {pieces} pieces"
        if pieces == 1:
            row = f"{length} tokens"
        lines.append(
            f"training.seq_len={length}: a row is {row}, which does not fill blocks of {MX_BLOCK}; "
            "rounding of weight gradients in MX differs on another mesh"
        )
    return lines
