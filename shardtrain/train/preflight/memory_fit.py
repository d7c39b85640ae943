"""Whether weights, gradients and optimizer state can fit: a lower bound of what a rank holds, by shapes and layout.

Activations, buffers of FSDP and the allocator's own need come on top: a run that passes here may still be too large. A
dry run (``comm.mode="fake_backend"``) counts these too.
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

_ID_BYTES = 16
"""Of a token in a batch: its id and its target."""
_SMALL = 0.5
"""Share of the memory below which a generous guess of the size needs no exact count."""
_TASKS_OF_RULES = ("language_model",)
_BACKENDS = ("inductor", "eager", "aot_eager")
"""Of torch.compile, that every PyTorch has."""


@dataclass(frozen=True)
class ParameterMemory:
    """A parameter of the whole model.

    tensor: whether tensor parallelism splits it; expert: whether it is of experts; trained: whether it learns.
    """

    num_elements: int
    tensor: bool
    expert: bool
    trained: bool


def only_building_tells(loaded: Loaded) -> bool:
    """True if building the model can find problems that the torch-free rules miss."""
    c = loaded.config
    return (
        c.lora.enable
        or bool(c.model.overrides)
        or bool(c.model.converters)
        or c.model.name.endswith(".py")
        or c.task.name not in _TASKS_OF_RULES
        or bool(c.optimizer.no_weight_decay)
        or c.optimizer.name not in PYTORCH_ADAMS
        or (bool(c.compile.enable) and c.compile.backend not in _BACKENDS)
    )


def _state_tensors(optimizer: str) -> int:
    """Return how many tensors as large as a parameter an optimizer keeps for it, at least. Unknown for a file: 0."""
    return OPTIMIZERS[optimizer].state_tensors if optimizer in OPTIMIZERS else 0


def surely_fits(loaded: Loaded, machine: Machine) -> bool:
    """Whether a generous guess of the number of weights, from sizes alone, is far below what there is."""
    if not machine.memory_bytes:
        return True
    sizes = model_shape(loaded)
    guess = generous_guess(sizes) if sizes is not None else None
    if guess is None:
        return False
    # ranks on CPUs share the memory of their host
    ranks = machine.local_ranks if machine.device == "cpu" else 1
    held = state_bytes(
        loaded.config, machine.world_size or machine.local_ranks, [ParameterMemory(guess, True, False, True)]
    )
    return held * ranks < _SMALL * machine.memory_bytes


def generous_guess(sizes: dict[str, Any]) -> int | None:
    """More weights than a model of these sizes has; None where a size that decides is not known."""

    def size(name: str, default: int = 0) -> int:
        value = sizes.get(name)
        return value if isinstance(value, int) and value > 0 else default

    dim = size("dim")
    layers = size("num_layers")
    vocab = size("vocab_size")
    if not dim or not layers or not vocab:
        return None
    # the widest that any option could mean, so that the true number is never larger
    width = max((value for key, value in sizes.items() if "ffn" in key and isinstance(value, int)), default=0)
    width = max(width, 4 * dim)
    heads = size("num_heads", 1) * max(size("head_dim"), size("v_head_dim"), dim // size("num_heads", 1))
    experts = 1 + size("num_experts") + size("num_shared_experts")
    return 2 * vocab * dim + layers * (8 * dim * max(dim, heads) + 4 * dim * width * experts)


def state_bytes(config: Config, world_size: int, parameters: list[ParameterMemory]) -> int:
    """Bytes of weights, gradients and optimizer state of the rank that holds most, at least."""
    p = config.parallelism
    width = ITEM_BYTES[config.training.dtype]
    states = _state_tensors(config.optimizer.name)
    state_width = derived.state_item_bytes(config)
    # FSDP shards over context-parallel ranks as well; a split over tp comes on top
    pieces = max(1, derived.shard_degree(config, world_size)) * max(1, p.context_parallel_degree)
    replicas = p.data_parallel_replicate_degree if p.shard_optimizer_states else 1
    total = 0.0
    for one in parameters:
        shares = pieces * (p.tensor_parallel_degree if one.tensor or one.expert else 1)
        size = float(width)
        if one.trained:  # gradients that backward frees are not all there at once
            size += (0 if config.optimizer.early_step_in_backward else width) + state_width * states / max(1, replicas)
        total += one.num_elements * size / shares
    return int(total / max(1, p.pipeline_parallel_degree))  # stages differ: the largest holds no less than the mean


def checkpoint_bytes(config: Config, parameters: list[ParameterMemory]) -> int:
    """Bytes of a checkpoint: weights and the optimizer's state of those that learn; beside adapters nothing else."""
    if config.lora.enable:
        parameters = [one for one in parameters if one.trained]
    width = ITEM_BYTES[config.training.dtype]
    states = _state_tensors(config.optimizer.name)
    states_bytes = states * derived.state_item_bytes(config)
    return int(sum(one.num_elements * (width + states_bytes * one.trained) for one in parameters))


def batch_problem(loaded: Loaded, machine: Machine) -> Problem | None:
    """The problem of batches that alone are more than the machine has: their ids, and what enters the first layer."""
    config = loaded.config
    t = config.training
    p = config.parallelism
    dim = (model_shape(loaded) or {}).get("dim")
    if not machine.world_size or not machine.memory_bytes:
        return None
    tokens = t.local_batch_size * t.seq_len
    activations = 0
    if isinstance(dim, int) and p.pipeline_parallel_degree == 1:
        shares = max(1, p.context_parallel_degree) * max(1, p.tensor_parallel_degree)
        activations = tokens * dim * ITEM_BYTES[derived.compute_dtype(config)] // shares
    passes = max(1, derived.accumulation_steps(config, machine.world_size))
    needed = activations + (_ID_BYTES * tokens * passes if machine.device == "cpu" else 0)
    if machine.device == "cpu":
        needed *= machine.local_ranks
    if needed <= machine.memory_bytes:
        return None
    # which of the two options decides: many micro-batches, or large ones
    by_passes = activations * 2 < needed and passes > 1
    option = "training.global_batch_size" if by_passes else "training.local_batch_size"
    rows = t.local_batch_size * (passes if by_passes else 1)
    rule = (
        f"makes {rows} sequences of seq_len={t.seq_len} on a rank: their ids and the input of the first layer take "
        f"{format_bytes(needed)} or more on {machine.name}, which has {format_bytes(machine.memory_bytes)}"
    )
    return Problem(option, loaded.value(option), rule, "lower it, or training.seq_len", loaded.where(option))


def problems(loaded: Loaded, machine: Machine, parameters: list[ParameterMemory]) -> Iterator[Problem]:
    """The problem of a model whose states alone are more than the machine has; none where that is not known."""
    config = loaded.config
    if not machine.world_size or not machine.memory_bytes:
        return
    if config.lora.enable and config.lora.base_dtype != "training":
        return  # frozen weights in few bits: how few is known to what makes them
    needed = state_bytes(config, machine.world_size, parameters)
    on_host = machine.device == "cpu" or config.training.enable_cpu_offload
    if on_host and machine.device != "cpu":
        return  # what a host beside its GPUs has is not asked
    if on_host:
        needed *= machine.local_ranks
    if needed <= machine.memory_bytes:
        return
    count = sum(one.num_elements for one in parameters)
    whose = f"the {machine.local_ranks} ranks of a host" if on_host and machine.local_ranks > 1 else "a rank"
    rule = (
        f"has {count / 1e9:.3g} billion weights: with gradients and {config.optimizer.name}'s state {whose} would hold "
        f"{format_bytes(needed)} or more, and {machine.name} has {format_bytes(machine.memory_bytes)}"
    )
    more = "" if on_host else "more ranks to shard over (parallelism.data_parallel_shard_degree), "
    smaller = 'training.dtype="bfloat16", ' if config.training.dtype == "float32" else ""
    fix = f"use {more}{smaller}a smaller model, or adapters (lora.enable)"
    yield Problem("model.flavor", config.model.flavor, rule, fix, loaded.where("model.flavor"))
