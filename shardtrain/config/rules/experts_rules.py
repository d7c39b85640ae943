"""Rules of models with experts: routing of tokens, and the division of experts over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardtrain.config import derived, folder_model
from shardtrain.config.load import Loaded
from shardtrain.config.rules.model_rules import dense_layers, model_shape
from shardtrain.config.rules.values import any_of, divisors, problem
from shardtrain.utils.errors import Problem

DEGREE = "parallelism.expert_parallel_degree"


def check_experts(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of routing and of expert parallelism, which divides the experts equally over
    its ranks.
    """
    config = loaded.config
    sizes = model_shape(loaded)
    p = config.parallelism
    if p.expert_tensor_parallel_degree not in (1, p.tensor_parallel_degree):
        yield problem(
            loaded,
            "parallelism.expert_tensor_parallel_degree",
            rule="must be 1 or tensor_parallel_degree, as in torchtitan",
            fix=f"set it to 1, and spread the experts with {DEGREE}",
        )
    if sizes is None:
        return
    experts = sizes.get("num_experts")
    if config.model.name == folder_model.NAME:
        # config.json has other names for its experts; the check of the built network finds them
        yield from _check_forced_balance(
            loaded, f"is not supported for model.name={folder_model.NAME}"
        )
        if p.data_parallel_shard_degree != -1:
            yield from _check_ranks(loaded, p.data_parallel_shard_degree)
        return
    if not isinstance(experts, int) or experts < 1:
        yield from _check_without_experts(loaded)
        return
    yield from _check_choice(loaded, sizes, experts)
    # Expert-parallel ranks have equal numbers of experts, and need layers with experts.
    degree = p.expert_parallel_degree
    if degree > 1 and experts % degree:
        rule = f"does not divide the {experts} experts of model {config.model.name}/{config.model.flavor}"
        legal = divisors(experts)
        yield problem(loaded, DEGREE, rule, f"use {any_of(legal)}")
    layers = _count(sizes, "num_layers")
    if degree > 1 and 0 < layers <= dense_layers(sizes):
        name = "num_dense_layers"
        if "interleave_moe_layer_step" in sizes:
            name = "interleave_moe_layer_step"
        yield problem(
            loaded,
            DEGREE,
            rule=f"requires layers with experts, and all {layers} layers are dense ({name} {sizes[name]})",
            fix=f"set it to 1, or lower model.overrides.{name}",
        )
    if p.data_parallel_shard_degree != -1:
        yield from _check_ranks(loaded, p.data_parallel_shard_degree)


def experts_notes(loaded: Loaded) -> list[str]:
    """Return a note that experts are not split, if a configuration of torchtitan requests it."""
    degree = loaded.config.parallelism.expert_tensor_parallel_degree
    if degree == 1:
        return []
    return [
        f"parallelism.expert_tensor_parallel_degree={degree}: without effect, "
        f"experts are not split and results are the same; {DEGREE} divides experts over ranks"
    ]


def check_experts_of_world(loaded: Loaded, world_size: int) -> Iterator[Problem]:
    """Check the number of ranks if ``data_parallel_shard_degree`` is -1 and follows from the world size."""
    others = derived.other_degrees(loaded.config)
    if loaded.config.parallelism.data_parallel_shard_degree == -1 and world_size % others == 0:
        yield from _check_ranks(loaded, world_size // others)


def _check_ranks(loaded: Loaded, shard_degree: int) -> Iterator[Problem]:
    p = loaded.config.parallelism
    sizes = model_shape(loaded) or {}
    ranks = shard_degree * p.context_parallel_degree * p.tensor_parallel_degree
    degree = p.expert_parallel_degree
    if ranks < 1 or degree < 1:
        return
    if ranks % degree:
        rule = f"does not divide the {ranks} ranks of data_parallel_shard, context and tensor parallelism together"
        legal = divisors(ranks)
        yield problem(loaded, DEGREE, rule, f"use {any_of(legal)}")
        return
    experts = _count(sizes, "num_experts")
    has_moe_layers = "num_experts" in sizes and _count(sizes, "num_layers") > dense_layers(sizes)
    if not has_moe_layers or ranks <= experts or experts % degree:
        return

    # With more ranks than experts, the ranks of one expert split its matrices by rows.
    row_counts = (_count(sizes, "moe_ffn_dim"), _count(sizes, "dim"))
    ranks_per_expert = ranks // degree
    uneven = {rows for rows in row_counts if rows % ranks_per_expert}
    if not uneven:
        return
    # Suggest degrees with which the matrices can be split, or else no split at all.
    legal = []
    for n in divisors(experts):
        if ranks % n == 0 and all(rows % (ranks // n) == 0 for rows in row_counts):
            legal.append(n)
    fix = f"use {experts} ranks or fewer"
    if legal:
        fix = f"use {any_of(legal)}"
    yield problem(
        loaded,
        DEGREE,
        rule=(
            f"leaves {ranks_per_expert} ranks to share experts, "
            f"which does not divide their sizes ({any_of(sorted(uneven))})"
        ),
        fix=fix,
    )


def _check_without_experts(loaded: Loaded) -> Iterator[Problem]:
    model = f"{loaded.config.model.name}/{loaded.config.model.flavor}"
    rule = f"requires a model with experts, and {model} has none"
    if loaded.config.parallelism.expert_parallel_degree > 1:
        yield problem(
            loaded,
            DEGREE,
            rule=rule,
            fix="set it to 1, or use a model such as qwen3_moe, mixtral or deepseek_v3",
        )
    yield from _check_forced_balance(loaded, rule)


def _check_forced_balance(loaded: Loaded, rule: str) -> Iterator[Problem]:
    if loaded.config.debug.moe_force_load_balance:
        yield problem(loaded, "debug.moe_force_load_balance", rule, "set it to false")


def _check_choice(loaded: Loaded, sizes: dict[str, Any], experts: int) -> Iterator[Problem]:
    top_k = _count(sizes, "top_k")
    groups = _count(sizes, "num_groups")
    top_groups = _count(sizes, "top_groups")
    group_top_k = _count(sizes, "group_top_k")
    option = "model.overrides.top_k"
    # Report only the first problem of the counts, because each rule assumes that the previous rules hold.
    if not 1 <= top_k <= experts:
        yield problem_of(
            loaded,
            option,
            top_k,
            rule=f"is not between 1 and the {experts} experts",
            fix=f"use 1 to {experts}",
        )
    elif groups < 1 or experts % groups:
        legal = divisors(experts)
        yield problem_of(
            loaded,
            "model.overrides.num_groups",
            groups,
            rule=f"does not divide the {experts} experts",
            fix=f"use {any_of(legal)}",
        )
    elif not 1 <= top_groups <= groups:
        yield problem_of(
            loaded,
            "model.overrides.top_groups",
            top_groups,
            rule=f"is not between 1 and the {groups} groups",
            fix=f"use 1 to {groups}",
        )
    elif top_k > top_groups * (experts // groups):
        available = top_groups * (experts // groups)
        yield problem_of(
            loaded,
            option,
            top_k,
            rule=f"exceeds the {available} experts of {top_groups} groups",
            fix=f"use at most {available}, or more groups",
        )
    elif groups > 1 and not 1 <= group_top_k <= experts // groups:
        yield problem_of(
            loaded,
            "model.overrides.group_top_k",
            group_top_k,
            rule=f"is not between 1 and the {experts // groups} experts of a group",
            fix=f"use 1 to {experts // groups}",
        )
    score = sizes.get("score_func", "softmax")
    if score not in ("softmax", "sigmoid"):
        yield problem_of(
            loaded,
            "model.overrides.score_func",
            score,
            rule="is not a score function",
            fix='use "softmax" or "sigmoid"',
        )


def problem_of(loaded: Loaded, option: str, value: Any, rule: str, fix: str) -> Problem:
    """Return a problem of a size of the model. The origin is empty if the flavor, not an override,
    sets it.
    """
    return Problem(option, value, rule, fix, loaded.origins.get(option, ""))


def _count(sizes: dict[str, Any], name: str) -> int:
    value = sizes.get(name, 1)
    return value if isinstance(value, int) else 1
