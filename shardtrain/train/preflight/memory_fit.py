"""Estimate from shapes and layout whether weights, gradients and optimizer state fit into memory.

This file does not import torch. The estimate is a lower bound: it does not count activations, FSDP buffers
and the allocator's overhead, so a run that passes may still be too large. A dry run
(``comm.mode="fake_backend"``) counts activations and buffers too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardtrain.config import Loaded, derived
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.schema import Config
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.facts.optimizers import OPTIMIZERS, PYTORCH_ADAMS
from shardtrain.train.preflight.machine import Machine
from shardtrain.utils.errors import Problem
from shardtrain.utils.units import format_bytes

_BYTES_PER_TOKEN = 16
"""Bytes of a token in a batch: its id and its target, int64 each."""
_SAFE_SHARE = 0.5
"""If an upper bound of the size is below this fraction of the memory, skip the exact computation."""
_TASKS_WITH_RULES = ("language_model",)
"""Tasks whose models can be checked completely without importing torch."""
_BUILTIN_BACKENDS = ("inductor", "eager", "aot_eager")
"""Backends of torch.compile that every PyTorch has."""


@dataclass(frozen=True)
class ParameterMemory:
    """A parameter of the unsharded model."""

    num_elements: int
    tensor: bool
    """True if tensor parallelism splits it."""
    expert: bool
    """True if it belongs to experts."""
    trained: bool


def needs_model_build(loaded: Loaded) -> bool:
    """True if only building the model can find some of its problems. The rules without torch cannot."""
    config = loaded.config
    model = config.model
    if model.overrides or model.converters or model.name.endswith(".py"):
        return True
    # Patterns of parameter names, and a user's optimizer, need the model's parameters.
    optimizer = config.optimizer
    if optimizer.no_weight_decay or optimizer.name not in PYTORCH_ADAMS:
        return True
    if config.compile.enable and config.compile.backend not in _BUILTIN_BACKENDS:
        return True
    return config.lora.enable or config.task.name not in _TASKS_WITH_RULES


def _optimizer_bytes(config: Config) -> float:
    """Return a lower bound of the bytes of optimizer state per trained element.

    It is 0 for a user's own optimizer, which may have no state.
    """
    name = config.optimizer.name
    num_states = OPTIMIZERS[name].state_tensors if name in OPTIMIZERS else 0
    return num_states * derived.state_item_bytes(config)


def certainly_fits(loaded: Loaded, machine: Machine) -> bool:
    """True if even an upper bound of the number of weights needs far less memory than is available."""
    if not machine.memory_bytes:
        return True
    sizes = model_shape(loaded)
    upper_bound = max_num_elements(sizes) if sizes is not None else None
    if upper_bound is None:
        return False
    parameter = ParameterMemory(upper_bound, tensor=True, expert=False, trained=True)
    bytes_per_rank = state_bytes(
        loaded.config, machine.world_size or machine.local_ranks, [parameter]
    )
    # On CPUs, all ranks of a host share its memory.
    ranks = machine.local_ranks if machine.device == "cpu" else 1
    return bytes_per_rank * ranks < _SAFE_SHARE * machine.memory_bytes


def max_num_elements(sizes: dict[str, Any]) -> int | None:
    """Return an upper bound of the number of weights. None if a required size is not known."""

    def size(name: str, default: int = 0) -> int:
        value = sizes.get(name)
        return value if isinstance(value, int) and value > 0 else default

    dim = size("dim")
    num_layers = size("num_layers")
    vocab_size = size("vocab_size")
    if not dim or not num_layers or not vocab_size:
        return None
    # Use the widest feed-forward layer that any option could mean.
    ffn_width = 4 * dim
    for key, value in sizes.items():
        if "ffn" in key and isinstance(value, int):
            ffn_width = max(ffn_width, value)
    num_heads = size("num_heads", 1)
    attention_width = num_heads * max(size("head_dim"), size("v_head_dim"), dim // num_heads)
    # A dense layer counts as one expert. Attention and feed-forward are rounded up generously.
    num_experts = 1 + size("num_experts") + size("num_shared_experts")
    attention = 8 * dim * max(dim, attention_width)
    feed_forward = 4 * dim * ffn_width * num_experts
    embedding_and_head = 2 * vocab_size * dim
    return embedding_and_head + num_layers * (attention + feed_forward)


def state_bytes(config: Config, world_size: int, parameters: list[ParameterMemory]) -> int:
    """Return a lower bound of the bytes of weights, gradients and optimizer state on the fullest rank."""
    p = config.parallelism
    weight_bytes = ITEM_BYTES[config.training.dtype]
    # With an update in backward, gradients do not all exist at the same time, so count none of them.
    gradient_bytes = 0 if config.optimizer.early_step_in_backward else weight_bytes
    optimizer_bytes = _optimizer_bytes(config)
    # FSDP also shards over context-parallel ranks. Tensor parallelism splits some parameters further.
    fsdp_shards = max(1, derived.shard_degree(config, world_size)) * max(
        1, p.context_parallel_degree
    )
    replicas = p.data_parallel_replicate_degree if p.shard_optimizer_states else 1
    total = 0.0
    for parameter in parameters:
        is_split = parameter.tensor or parameter.expert
        shards = fsdp_shards
        if is_split:
            shards *= p.tensor_parallel_degree
        element_bytes = float(weight_bytes)
        if parameter.trained:
            element_bytes += gradient_bytes + optimizer_bytes / max(1, replicas)
            element_bytes += derived.average_bytes(config)
        total += parameter.num_elements * element_bytes / shards
    # Pipeline stages differ in size. The largest stage has at least the mean size.
    return int(total / max(1, p.pipeline_parallel_degree))


def checkpoint_bytes(config: Config, parameters: list[ParameterMemory]) -> int:
    """Return the bytes of a checkpoint: weights and optimizer state. A LoRA run saves only what it trains."""
    if config.lora.enable:
        parameters = [parameter for parameter in parameters if parameter.trained]
    weight_bytes = ITEM_BYTES[config.training.dtype]
    optimizer_bytes = _optimizer_bytes(config)
    total = 0.0
    for parameter in parameters:
        trained_bytes = optimizer_bytes + derived.average_bytes(config)
        total += parameter.num_elements * (weight_bytes + trained_bytes * parameter.trained)
    return int(total)


def batch_problem(loaded: Loaded, machine: Machine) -> Problem | None:
    """Return a problem if even the batches' token ids and the first layer's input exceed the memory."""
    config = loaded.config
    t = config.training
    p = config.parallelism
    if not machine.world_size or not machine.memory_bytes:
        return None
    # Each rank needs memory for the input of the first layer, and on a CPU also for the ids of all
    # micro-batches.
    tokens = t.local_batch_size * t.seq_len
    dim = (model_shape(loaded) or {}).get("dim")
    activation_bytes = 0
    if isinstance(dim, int) and p.pipeline_parallel_degree == 1:
        shards = max(1, p.context_parallel_degree) * max(1, p.tensor_parallel_degree)
        activation_bytes = tokens * dim * ITEM_BYTES[derived.compute_dtype(config)] // shards
    accumulation = max(1, derived.accumulation_steps(config, machine.world_size))
    needed_bytes = activation_bytes
    if machine.device == "cpu":
        needed_bytes += _BYTES_PER_TOKEN * tokens * accumulation
        needed_bytes *= machine.local_ranks
    if needed_bytes <= machine.memory_bytes:
        return None
    # Blame the option with the larger effect: there are too many micro-batches, or they are too large.
    has_many_micro_batches = activation_bytes * 2 < needed_bytes and accumulation > 1
    option = "training.local_batch_size"
    rows = t.local_batch_size
    # A large global batch on few ranks accumulates over many micro-batches.
    if has_many_micro_batches:
        option = "training.global_batch_size"
        rows *= accumulation
    rule = (
        f"means {rows} sequences of seq_len={t.seq_len} on a rank: "
        f"their ids and the input of the first layer take {format_bytes(needed_bytes)} or more on "
        f"{machine.name}, which has {format_bytes(machine.memory_bytes)}"
    )
    return Problem(
        option,
        loaded.value(option),
        rule=rule,
        fix="lower it, or training.seq_len",
        where=loaded.where(option),
    )


def problems(
    loaded: Loaded, machine: Machine, parameters: list[ParameterMemory]
) -> Iterator[Problem]:
    """Yield a problem if weights, gradients and optimizer states exceed the memory.

    Yield nothing if the sizes are not known.
    """
    config = loaded.config
    if not machine.world_size or not machine.memory_bytes:
        return
    # Skip quantized weights, whose size this file does not know.
    if config.lora.enable and config.lora.base_dtype != "training":
        return
    # With CPU offload, the states are in host memory, whose size is not known here.
    if config.training.enable_cpu_offload and machine.device != "cpu":
        return
    is_on_cpu = machine.device == "cpu"
    needed_bytes = state_bytes(config, machine.world_size, parameters)
    if is_on_cpu:
        needed_bytes *= machine.local_ranks
    if needed_bytes <= machine.memory_bytes:
        return
    billions = sum(parameter.num_elements for parameter in parameters) / 1e9
    holder = "a rank needs"
    if is_on_cpu and machine.local_ranks > 1:
        holder = f"the {machine.local_ranks} ranks of a host need"
    rule = (
        f"has {billions:.3g} billion weights: with gradients and {config.optimizer.name}'s state {holder} "
        f"{format_bytes(needed_bytes)} or more, and {machine.name} has "
        f"{format_bytes(machine.memory_bytes)}"
    )
    # List the usual ways to need less memory.
    fixes = []
    if not is_on_cpu:
        fixes.append("more ranks to shard over (parallelism.data_parallel_shard_degree)")
    if config.training.dtype == "float32":
        fixes.append('training.dtype="bfloat16"')
    fixes += ["a smaller model", "or adapters (lora.enable)"]
    yield Problem(
        "model.flavor",
        config.model.flavor,
        rule=rule,
        fix=f"use {', '.join(fixes)}",
        where=loaded.where("model.flavor"),
    )
