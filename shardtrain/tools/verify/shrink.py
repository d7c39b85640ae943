"""Change the user's configuration for verify: a small model, one batch for all meshes, and options
for small rounding.

The output lists each change. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtrain import config as configs
from shardtrain.config import Config, Loaded, stages
from shardtrain.config.derived import compute_dtype
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.tools.verify.meshes import OPTIONS, MeshPlan, changed, rows_per_data_rank

CAPS = {
    "dim": 32,
    "head_dim": 8,
    "vocab_size": 128,
    "ffn_dim": 64,
    "moe_ffn_dim": 32,
    "num_experts": 8,
    "top_k": 2,
    "num_groups": 2,
    "top_groups": 1,
    "num_shared_experts": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 13,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 11,
    "floor_scale": 5,
}
"""Maximum value of each size field in a small model."""
MIN_TOKENS = 32
OWN_TOKENS = 320
"""Tokens of a sequence if the run's own precision is kept. bfloat16 does not represent all integers
above 256, so only longer sequences reveal positions in bfloat16.
"""
LOSS_SCALE = 1024.0
"""Loss scale of float16. Its gradients neither overflow nor underflow in a small model."""
MOST_DOUBLINGS = 4
"""Number of times that a run doubles its loss scale. More could overflow."""


@dataclass(frozen=True)
class VerifyTask:
    """A planned verification.

    Attributes:
        plans: The meshes.
        reference: Configuration of one process, with the same model and batch.
        notes: Changes from the user's configuration.
        steps: Number of optimizer steps.
        unit_gain: True to draw each matrix with a standard deviation of 1/sqrt(columns), and no parameter as
            zero, so every part of a small model affects its loss.
        own_precision: Configuration of one process in the run's own precision. None if all meshes compute
            in float32.
    """

    plans: Sequence[MeshPlan]
    reference: Config
    notes: Sequence[str]
    steps: int
    unit_gain: bool
    own_precision: Config | None = None


def prepare(
    plans: Sequence[MeshPlan],
    loaded: Loaded,
    steps: int,
    full: bool,
    small_copy: Mapping[str, Any] | None = None,
    precision: str = "float32",
) -> VerifyTask:
    """Choose sizes, batch and precision for all possible plans. A plan that becomes impossible gets
    a problem.

    Args:
        plans: The meshes.
        loaded: The user's configuration.
        steps: Number of optimizer steps.
        full: Keep the size of the model and its sequences.
        small_copy: Result of ``own_sizes.smaller`` for a user's model file.
        precision: "float32", or "own" for meshes in the precision of the configuration.
    """
    possible = [plan for plan in plans if not plan.problem]
    notes: list[str] = []
    sections: dict[str, dict[str, Any]] = {"parallelism": {}, "training": {}}
    if not full:
        tokens = OWN_TOKENS if precision == "own" else MIN_TOKENS
        sections = _small(possible, loaded, notes, small_copy, tokens)
    keeps_precision = precision == "own"
    own_sections = _own_precision(loaded.config, notes, steps) if keeps_precision else {}
    _reduce_rounding(sections, loaded.config, notes, steps, keeps_precision)
    mesh_sections = dict(sections)
    for name, values in own_sections.items():
        mesh_sections[name] = {**sections.get(name, {}), **values}

    # All meshes divide the same global batch, so one record of one process serves all comparisons.
    sequences = 2
    for plan in possible:
        sequences_of_mesh = rows_per_data_rank(plan.degrees) * _data_ranks(plan.degrees)
        sequences = math.lcm(sequences, sequences_of_mesh)
    seq_len = sections["training"].get("seq_len", loaded.config.training.seq_len)
    notes.append(f"batch: {sequences} sequences of {seq_len} synthetic tokens, some without loss")
    fitted_plans = []
    for plan in plans:
        fitted_plans.append(plan if plan.problem else _fitted(plan, mesh_sections, sequences))

    # One process trains on the full batch without mesh, offload and recomputation.
    no_mesh: dict[str, Any] = dict.fromkeys(OPTIONS.values(), 1)
    no_mesh |= {"shard_optimizer_states": False, "module_fqns_per_model_part": None}
    batch = {
        "local_batch_size": sequences,
        "global_batch_size": sequences,
        "enable_cpu_offload": False,
    }
    no_recomputation = {"mode": "none", "cpu_offload": False}

    def one_process(sections: Mapping[str, dict[str, Any]], rows: int) -> Config:
        sections_of_process = {
            **sections,
            "parallelism": {**sections["parallelism"], **no_mesh},
            "training": {**sections["training"], **batch, "local_batch_size": rows},
            "activation_checkpoint": no_recomputation,
        }
        return changed(loaded, sections_of_process, set(), "").config

    reference = one_process(sections, sequences)
    own_config = None
    if keeps_precision:
        # Several micro-batches, because their gradients must be added in the configured precision.
        own_config = one_process(mesh_sections, max(1, sequences // 4))
    return VerifyTask(fitted_plans, reference, notes, steps, not full, own_config)


def _data_ranks(degrees: Mapping[str, int]) -> int:
    return degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)


def _fitted(plan: MeshPlan, sections: Mapping[str, dict[str, Any]], sequences: int) -> MeshPlan:
    """Apply the sections to a plan and check it again, because the chosen sizes may not fit its mesh."""
    rows = sequences // _data_ranks(plan.degrees)
    # A pipeline processes all micro-batches in one pass. Other meshes accumulate gradients over up
    # to four passes.
    local = rows if plan.schedule else max(1, rows // 4)
    training = {**sections["training"], "local_batch_size": local, "global_batch_size": sequences}
    fitted = {**sections, "training": training}
    # The plan's own options take precedence.
    for option, value in plan.options.items():
        section, _, name = option.partition(".")
        fitted[section] = {**fitted.get(section, {}), name: value}
    loaded = changed(plan.loaded, fitted, set(), "")
    # The rules reject an option that the user set without effect. They must not reject options that verify
    # has turned off, so only the options of the mesh count as set.
    origins = {}
    for option, where in loaded.origins.items():
        if option.startswith("parallelism."):
            origins[option] = where
    loaded = dataclasses.replace(loaded, origins=origins)
    problems = configs.check(loaded)
    return dataclasses.replace(plan, loaded=loaded, problem="\n".join(map(str, problems)))


def needed_layers(plans: Sequence[MeshPlan]) -> int:
    """Return the number of layers that the pipeline stages of all plans need, and at least 2."""
    numbers = [2]
    for plan in plans:
        if plan.schedule:
            numbers.append(stages.num_stages(plan.loaded.config.parallelism, 0))
    return max(numbers)


def _small(
    plans: Sequence[MeshPlan],
    loaded: Loaded,
    notes: list[str],
    small_copy: Mapping[str, Any] | None,
    tokens: int,
) -> dict[str, dict[str, Any]]:
    """Return configuration sections for a small model with short sequences. Add the changes to ``notes``."""
    sizes = model_shape(loaded) or {}
    layers = needed_layers(plans)
    model = loaded.config.model
    is_file = model.name.endswith(".py")
    overrides: dict[str, Any] = dict(model.overrides)
    # Sizes of the small model: found by ``own_sizes`` for a user's file, else at most ``CAPS``.
    if small_copy is not None:
        sizes = {**sizes, **small_copy["sizes"]}
        overrides = overrides | small_copy["given"]
        notes += small_copy["notes"]
    elif not is_file:
        overrides |= _small_sizes(sizes, plans, loaded.config)
    # A model file that has no more layers than needed keeps its number of layers.
    is_deep = sizes.get("num_layers", 0) > layers or not is_file
    if small_copy is None and "num_layers" in sizes and is_deep:
        overrides["num_layers"] = max(layers, overrides.get("num_dense_layers", 0) + 1)
    changes = []
    for name, value in overrides.items():
        if sizes.get(name) != value:
            changes.append(f"{name} {sizes.get(name)} -> {value}")
    if changes:
        notes.append("model: " + ", ".join(changes))

    # The shortest sequence of at least ``tokens`` that tp and cp can split.
    parts = 1
    for plan in plans:
        # Each rank of cp has two parts, which are from both ends of the sequence.
        cp = plan.degrees.get("cp", 1)
        cp_parts = 2 * cp if cp > 1 else 1
        parts = math.lcm(parts, plan.degrees.get("tp", 1) * cp_parts)
    longest = _longest_sequence({**sizes, **overrides})
    tokens = min(tokens, max(MIN_TOKENS, longest))
    seq_len = -(-tokens // parts) * parts  # rounded up to a multiple
    notes.append(
        "weights: the initialization of training is compared; steps start from other weights, at unit gain and not zero"
    )
    return {
        "model": {"overrides": overrides},
        "training": {"seq_len": min(seq_len, loaded.config.training.seq_len)},
        "parallelism": {
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        },
    }


def _small_sizes(
    sizes: Mapping[str, Any], plans: Sequence[MeshPlan], config: Config
) -> dict[str, int]:
    """Return sizes of at most ``CAPS``, rounded up to multiples of the degrees of all plans."""
    tensor = 1
    experts = 1
    for plan in plans:
        tensor = math.lcm(tensor, plan.degrees.get("tp", 1))
        experts = math.lcm(experts, plan.degrees.get("ep", 1))
    small = {}
    for name, cap in CAPS.items():
        if isinstance(sizes.get(name), int):
            small[name] = min(sizes[name], cap)
    for name in ("vocab_size", "ffn_dim", "moe_ffn_dim"):
        if small.get(name):
            small[name] = -(-small[name] // tensor) * tensor
    if "num_experts" in small:
        num_experts = -(-small["num_experts"] // experts) * experts
        small["num_experts"] = min(sizes["num_experts"], num_experts)
    if "num_heads" in sizes:
        # Ulysses also divides heads among the ranks of cp.
        is_ulysses = config.parallelism.context_parallel_method == "ulysses"
        head_parts = []
        for plan in plans:
            cp = plan.degrees.get("cp", 1) if is_ulysses else 1
            head_parts.append(plan.degrees.get("tp", 1) * cp)
        heads = math.lcm(2, *head_parts)
        # Grouped-query attention keeps up to two query heads per key head.
        if "num_kv_heads" in sizes:
            small["num_kv_heads"] = heads
            query_heads_per_kv_head = sizes["num_heads"] // sizes["num_kv_heads"]
            heads *= min(2, max(1, query_heads_per_kv_head))
        small["num_heads"] = heads
    return small


def _longest_sequence(sizes: Mapping[str, Any]) -> int:
    """Return the smallest limit of the sequence length among the sizes of a model, judged by their names."""
    limits = [OWN_TOKENS]
    names_of_limits = ("block_size", "num_positions", "n_ctx", "n_positions")
    for name, value in sizes.items():
        is_limit = name.startswith("max_") or name in names_of_limits
        if is_limit and isinstance(value, int) and value > 0:
            limits.append(value)
    return min(limits)


def _reduce_rounding(
    sections: dict[str, dict[str, Any]],
    config: Config,
    notes: list[str],
    steps: int,
    keeps_precision: bool,
) -> None:
    """Disable options that hide differences or amplify rounding in ``sections``, and add the
    changes to ``notes``. ``keeps_precision``: meshes compute in the run's own precision.
    """
    sections["training"] |= {
        "dtype": "float32",
        "mixed_precision_param": "float32",
        "mixed_precision_reduce": "float32",
        "max_norm": math.inf,
        "steps": steps,
        "epochs": None,
        "nonfinite_policy": "stop",
    }
    # With the default eps, the first updates are the signs of the gradients, which rounding may flip.
    sections["optimizer"] = {
        "name": "AdamW",
        "lr": 1e-2,
        "eps": 1e-2,
        "no_weight_decay": [],
        "implementation": "for-loop",
        "state_dtype": "default",
        "bf16_stochastic_round": False,
        "qk_clip_threshold": 0.0,
    }
    sections["lr_scheduler"] = {
        "name": "warmup_stable_decay",
        "warmup_steps": 0,
        "total_steps": None,
    }
    sections["compile"] = {"enable": False}
    sections["model"] = {**sections.get("model", {}), "converters": []}
    clipped = "no clipping"
    if steps > 1:
        clipped = "gradients clipped only in the last step"
    dtypes = "float32"
    if keeps_precision:
        dtypes = "one process in float32, meshes in the run's own precision"
    notes.append(
        f"{dtypes}; {clipped}; AdamW with eps 0.01, whose update does not amplify rounding"
    )
    # Options that need compilation or change numbers, each with a note.
    if compute_dtype(config) != "float32" and not keeps_precision:
        notes.append(f"precision: {compute_dtype(config)} -> float32")
    if config.optimizer.name != "AdamW":
        notes.append(f"optimizer: {config.optimizer.name} -> AdamW")
    if config.optimizer.qk_clip_threshold:
        notes.append(
            "optimizer.qk_clip_threshold: off; it scales weights after the compared update"
        )
    if config.compile.enable:
        notes.append("compile: off")
    if config.lora.enable:
        sections["lora"] = {
            "rank": min(config.lora.rank, 4),
            "dropout": 0.0,
            "base_dtype": "training",
        }
        notes.append(
            f"lora: rank {config.lora.rank} -> {sections['lora']['rank']}, no dropout, frozen float32",
        )
    if config.activation_checkpoint.mode == "memory_budget":
        sections["activation_checkpoint"] = {
            "mode": "full",
            "visualize_memory_budget_pareto": False,
        }
        notes.append("recompute: memory_budget, which needs compile -> full")
    if config.parallelism.enable_async_tensor_parallel:
        sections["parallelism"] |= {"enable_async_tensor_parallel": False}
        notes.append("async tensor parallelism, which needs compile: off")
    if config.model.converters and not keeps_precision:
        notes.append(f"converters: {', '.join(config.model.converters)} off")


def _own_precision(config: Config, notes: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """Return the sections that keep the precision of the configuration. Add changes to ``notes``."""
    training = config.training
    sections: dict[str, dict[str, Any]] = {
        "training": {
            "dtype": training.dtype,
            "mixed_precision_param": training.mixed_precision_param,
            "mixed_precision_reduce": training.mixed_precision_reduce,
        },
        "optimizer": {
            "state_dtype": config.optimizer.state_dtype,
            "bf16_stochastic_round": config.optimizer.bf16_stochastic_round,
        },
        "model": {"converters": list(config.model.converters)},
    }
    notes.append(
        f"precision: weights {training.dtype}, compute {compute_dtype(config)}, "
        f"reduction {training.mixed_precision_reduce}"
    )
    # The loss scale is configured for the full model. Gradients of the small model could overflow with it.
    if training.mixed_precision_param == "float16":
        # With the configured interval, the scale would be constant, which hides the use of another step's scale.
        interval = math.ceil(steps / MOST_DOUBLINGS)
        sections["training"]["initial_loss_scale"] = LOSS_SCALE
        sections["training"]["loss_scale_growth_interval"] = interval
        notes.append(
            f"loss scale: {training.initial_loss_scale:g} -> {LOSS_SCALE:g}, doubled after each {interval} steps"
        )
    if config.model.converters:
        on_cpu = training.device in ("auto", "cpu")
        suffix = ", emulated" if on_cpu else ""
        notes.append(f"converters: {', '.join(config.model.converters)}{suffix}")
        if on_cpu:
            sections["quantize"] = _emulated(config)
    return sections


def _emulated(config: Config) -> dict[str, Any]:
    """Return the quantize section with products that a CPU can compute."""
    quantize = config.quantize
    float8 = dataclasses.replace(quantize.linear.float8, emulate=True)
    mx = dataclasses.replace(quantize.linear.mx, recipe_name="mxfp8_emulated")
    linear = dataclasses.replace(quantize.linear, float8=float8, mx=mx)
    grouped_float8 = dataclasses.replace(quantize.grouped_mm.float8, emulate=True)
    grouped = dataclasses.replace(quantize.grouped_mm, float8=grouped_float8)
    return {"linear": linear, "grouped_mm": grouped}
