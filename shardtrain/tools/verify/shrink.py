"""What verify trains: a small version of the model, batches that all meshes can share, and options that keep rounding
small. Every change from the user's configuration is a sentence in the output. No torch."""

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
"""Largest size of a small model, by the name of the field."""
MIN_TOKENS = 32


@dataclass(frozen=True)
class VerifyTask:
    """What is run: the plans on the model that is verified, the same on one process, and what was changed for it.

    ``unit_gain`` draws each matrix with a standard deviation of one over the root of its columns, and nothing as zero,
    so that each part of a small model matters to its loss.
    """

    plans: Sequence[MeshPlan]
    reference: Config
    notes: Sequence[str]
    steps: int
    unit_gain: bool


def prepare(
    plans: Sequence[MeshPlan], loaded: Loaded, steps: int, full: bool, own: Mapping[str, Any] | None = None
) -> VerifyTask:
    """Fit model, batch and precision to the plans that are possible; a plan that is not any more says why.

    ``own`` is what ``own_sizes.smaller`` found for a model file of a user's.
    """
    possible = [plan for plan in plans if not plan.problem]
    notes: list[str] = []
    sections: dict[str, dict[str, Any]] = {"parallelism": {}, "training": {}}
    if not full:
        sections = _small(possible, loaded, notes, own)
    _steady(sections, loaded.config, notes, steps)

    # One global batch that every mesh can deal out: all compare with the same record of one process.
    sequences = math.lcm(2, *(rows_per_data_rank(plan.degrees) * _data_ranks(plan.degrees) for plan in possible))
    seq_len = sections["training"].get("seq_len", loaded.config.training.seq_len)
    notes.append(f"batch: {sequences} sequences of {seq_len} synthetic tokens, some without loss")
    tried = [_fitted(plan, sections, sequences) if not plan.problem else plan for plan in plans]

    # One process takes the whole batch at once, with no mesh, no offload and no recomputation.
    one: dict[str, Any] = dict.fromkeys(OPTIONS.values(), 1)
    one |= {"shard_optimizer_states": False, "module_fqns_per_model_part": None}
    alone = {**sections, "parallelism": {**sections["parallelism"], **one}}
    alone["training"] = {**sections["training"], "local_batch_size": sequences, "global_batch_size": sequences}
    alone["training"]["enable_cpu_offload"] = False
    alone["activation_checkpoint"] = {"mode": "none", "cpu_offload": False}
    return VerifyTask(tried, changed(loaded, alone, set(), "").config, notes, steps, unit_gain=not full)


def _data_ranks(degrees: Mapping[str, int]) -> int:
    return degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)


def _fitted(plan: MeshPlan, sections: Mapping[str, dict[str, Any]], sequences: int) -> MeshPlan:
    """The plan on the small model, checked again: a size that verify chose may still not fit."""
    rows = sequences // _data_ranks(plan.degrees)
    # one pass of a pipeline holds all micro-batches; elsewhere up to four passes accumulate
    local = rows if plan.schedule else max(1, rows // 4)
    training = {**sections["training"], "local_batch_size": local, "global_batch_size": sequences}
    fitted = {**sections, "training": training}
    for option, value in plan.options.items():  # what the plan is about stays
        section, _, name = option.partition(".")
        fitted[section] = {**fitted.get(section, {}), name: value}
    loaded = changed(plan.loaded, fitted, set(), "")
    # The rules refuse an option that is set and has no effect. Options that verify has turned off itself must not be
    # refused, so only the mesh's own options count as set.
    origins = {option: where for option, where in loaded.origins.items() if option.startswith("parallelism.")}
    loaded = dataclasses.replace(loaded, origins=origins)
    found = configs.check(loaded)
    return dataclasses.replace(plan, loaded=loaded, problem="\n".join(str(problem) for problem in found))


def needed_layers(plans: Sequence[MeshPlan]) -> int:
    """Layers that each plan's stages need, and two in any case."""
    return max([2, *(stages.num_stages(plan.loaded.config.parallelism, 0) for plan in plans if plan.schedule)])


def _small(
    plans: Sequence[MeshPlan], loaded: Loaded, notes: list[str], own: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """The sections that make model and sequences small; what is changed is added to ``notes``."""
    sizes = model_shape(loaded) or {}
    layers = needed_layers(plans)
    model = loaded.config.model
    given: dict[str, Any] = dict(model.overrides)
    # Sizes that own_sizes found for a user's file, or those of our own models, whose names are known.
    if own is not None:
        sizes = {**sizes, **own["sizes"]}
        given = given | own["given"]
        notes += own["notes"]
    elif not model.name.endswith(".py"):
        given |= _small_sizes(sizes, plans, loaded.config)
    is_deep = sizes.get("num_layers", 0) > layers or not model.name.endswith(".py")
    if own is None and "num_layers" in sizes and is_deep:  # the file's own sizes have as many as are needed
        given["num_layers"] = max(layers, given.get("num_dense_layers", 0) + 1)
    changes = {name: value for name, value in given.items() if sizes.get(name) != value}
    if changes:
        notes.append("model: " + ", ".join(f"{name} {sizes.get(name)} -> {value}" for name, value in changes.items()))

    # The shortest sequence of at least MIN_TOKENS that tp and cp can cut.
    cuts = math.lcm(1, *(_cuts(plan.degrees) for plan in plans))
    seq_len = -(-MIN_TOKENS // cuts) * cuts
    notes.append(
        "weights: compared as training would draw them; then drawn at unit gain, and none zero, to compare steps"
    )
    return {
        "model": {"overrides": given},
        "training": {"seq_len": min(seq_len, loaded.config.training.seq_len)},
        "parallelism": {
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        },
    }


def _small_sizes(sizes: Mapping[str, Any], plans: Sequence[MeshPlan], config: Config) -> dict[str, int]:
    """Sizes up to CAPS that the degrees of all plans divide."""
    tensor = math.lcm(1, *(plan.degrees.get("tp", 1) for plan in plans))
    experts = math.lcm(1, *(plan.degrees.get("ep", 1) for plan in plans))
    small = {name: min(sizes[name], cap) for name, cap in CAPS.items() if isinstance(sizes.get(name), int)}
    for name in ("vocab_size", "ffn_dim", "moe_ffn_dim"):
        if small.get(name):
            small[name] = -(-small[name] // tensor) * tensor
    if "num_experts" in small:
        small["num_experts"] = min(sizes["num_experts"], -(-small["num_experts"] // experts) * experts)
    if "num_heads" in sizes:
        # Ulysses deals heads to the ranks of cp as well. Grouped attention keeps groups of up to two queries a key.
        ulysses = config.parallelism.context_parallel_method == "ulysses"
        parts = [plan.degrees.get("tp", 1) * (plan.degrees.get("cp", 1) if ulysses else 1) for plan in plans]
        heads = math.lcm(2, *parts)
        if "num_kv_heads" in sizes:
            small["num_kv_heads"] = heads
            heads *= min(2, max(1, sizes["num_heads"] // sizes["num_kv_heads"]))
        small["num_heads"] = heads
    return small


def _cuts(degrees: Mapping[str, int]) -> int:
    # ranks of cp hold two pieces each, one from either end of the sequence
    cp = degrees.get("cp", 1)
    return degrees.get("tp", 1) * (2 * cp if cp > 1 else 1)


def _steady(sections: dict[str, dict[str, Any]], config: Config, notes: list[str], steps: int) -> None:
    """Options that would hide a difference, or make one out of rounding, are off; each is said."""
    sections["training"] |= {
        "dtype": "float32",
        "mixed_precision_param": "float32",
        "mixed_precision_reduce": "float32",
        "max_norm": math.inf,
        "steps": steps,
        "epochs": None,
        "nonfinite_policy": "stop",
    }
    # with the usual eps the first updates are the signs of gradients: rounding would decide them
    sections["optimizer"] = {
        "name": "AdamW",
        "lr": 1e-2,
        "eps": 1e-2,
        "no_weight_decay": [],
        "implementation": "for-loop",
    }
    sections["lr_scheduler"] = {"name": "warmup_stable_decay", "warmup_steps": 0, "total_steps": None}
    sections["compile"] = {"enable": False}
    sections["model"] = {**sections.get("model", {}), "converters": []}
    clipped = "gradients clipped in the last step alone" if steps > 1 else "no clipping"
    notes.append(f"float32; {clipped}; AdamW with eps 0.01, whose update does not amplify rounding")
    if compute_dtype(config) != "float32":
        notes.append(f"precision: {compute_dtype(config)} -> float32")
    if config.optimizer.name != "AdamW":
        notes.append(f"optimizer: {config.optimizer.name} -> AdamW")
    if config.compile.enable:
        notes.append("compile: off")
    if config.lora.enable:
        sections["lora"] = {"rank": min(config.lora.rank, 4), "dropout": 0.0, "base_dtype": "training"}
        notes.append(f"lora: rank {config.lora.rank} -> {sections['lora']['rank']}, no dropout, frozen float32")
    if config.activation_checkpoint.mode == "memory_budget":
        sections["activation_checkpoint"] = {"mode": "full", "visualize_memory_budget_pareto": False}
        notes.append("recompute: memory_budget, which is the compiler's -> full")
    if config.parallelism.enable_async_tensor_parallel:
        sections["parallelism"] |= {"enable_async_tensor_parallel": False}
        notes.append("async tensor parallelism, which is the compiler's: off")
    if config.model.converters:
        notes.append(f"converters: {', '.join(config.model.converters)} off")
