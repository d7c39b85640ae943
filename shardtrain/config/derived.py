"""Values derived from a config and the number of ranks. They are functions and are never stored in fields."""

from __future__ import annotations

from collections.abc import Iterable

from shardtrain.config import ramps
from shardtrain.config.ramps import StepSizes
from shardtrain.config.schema import Config, Data, Model, Parallelism
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.facts.optimizers import OPTIMIZERS, STATE_BLOCK
from shardtrain.utils.units import format_count


def model_label(model: Model, num_params: int | None = None) -> str:
    """Return the name and size of a model: "llama3 8B", or with overrides "qwen2 263.17K".

    With overrides the flavor's name may not match the size. The label then contains the parameter count
    instead, if it is known.
    """
    # Without overrides, the flavor's name is the size that users know.
    if not model.overrides:
        return f"{model.name} {model.flavor}"
    if num_params is None:
        return model.name
    return f"{model.name} {format_count(num_params)}"


def shard_degree(config: Config, world_size: int) -> int:
    """Number of FSDP ranks: data_parallel_shard_degree, or all remaining ranks if that is -1."""
    degree = config.parallelism.data_parallel_shard_degree
    if degree != -1:
        return degree
    return world_size // other_degrees(config)


def other_degrees(config: Config) -> int:
    """Product of all mesh degrees except the shard degree."""
    p = config.parallelism
    return (
        p.pipeline_parallel_degree
        * p.data_parallel_replicate_degree
        * p.context_parallel_degree
        * p.tensor_parallel_degree
    )


def packing_kind(data: Data, formats: Iterable[str]) -> str:
    """Return data.packing. "auto" resolves to "concat" if all sources are text, else to "first_fit"."""
    if data.packing != "auto":
        return data.packing
    # Packing by concatenation may cut a prompt from its answer.
    return "concat" if set(formats) <= {"text"} else "first_fit"


def long_documents(data: Data, form: str) -> str:
    """Return data.long_documents for a row format. "auto" resolves to "split" for text, else to "cut"."""
    if data.long_documents != "auto":
        return data.long_documents
    # Half of a conversation is useless, but half of a text is still a text.
    return "split" if form == "text" else "cut"


def data_parallel_degree(config: Config, world_size: int) -> int:
    """Number of ranks that read different samples: replicate degree times shard degree."""
    return config.parallelism.data_parallel_replicate_degree * shard_degree(config, world_size)


def global_batch_size(config: Config, world_size: int) -> int:
    """Number of sequences per optimizer step, over all ranks. With ``training.batch_ramp``, the last one."""
    sizes = ramps.batch_sizes(config.training)
    if sizes:
        return sizes[-1]
    return config.training.local_batch_size * data_parallel_degree(config, world_size)


def step_sizes(config: Config, world_size: int) -> StepSizes:
    """Number of sequences per step, and of tokens per sequence, during the run."""
    return ramps.step_sizes(config.training, global_batch_size(config, world_size))


def accumulation_steps(config: Config, world_size: int) -> int:
    """Number of forward and backward passes per optimizer step on each data-parallel rank."""
    per_pass = config.training.local_batch_size * data_parallel_degree(config, world_size)
    return global_batch_size(config, world_size) // per_pass


def notes_on_rows(config: Config) -> list[str]:
    """Return notes on the batch and the row length that plans and dry runs assume.

    They read no data, and describe the last step of a ramp. Empty if all steps have the same sizes.
    """
    notes = []
    for line in ramps.describe(config.training):
        notes.append(f"{line}; memory and time are those of the last steps, which are the largest")
    # Rows of these tasks always have seq_len tokens.
    if config.task.name in OF_NEXT_TOKENS:
        return notes
    length = f"training.seq_len={config.training.seq_len}"
    return [
        *notes,
        f'every sequence of task.name="{config.task.name}" is counted as {length} tokens, the maximum; '
        "a run pads each batch only to its longest row, and its reported speed does not count padding",
    ]


def compute_dtype(config: Config) -> str:
    """Name of the dtype of forward and backward."""
    # Parameters in bfloat16 need no cast, so the option has no effect.
    if config.training.dtype == "bfloat16":
        return "bfloat16"
    return config.training.mixed_precision_param


def does_without_fsdp(config: Config, world_size: int, has_experts: bool) -> bool:
    """True if FSDP has no work: one process or only tensor parallelism, so nothing is sharded or reduced.

    FSDP is required for every other mesh axis, including pipelines. It also shards experts over the ranks
    that are not used by expert parallelism. Some options require FSDP even then: resharding after forward,
    CPU offload, gradients reduced in a dtype other than float32, or weights in another dtype.
    """
    p = config.parallelism
    training = config.training
    return (
        world_size == p.tensor_parallel_degree
        and (not has_experts or world_size == p.expert_parallel_degree)
        and training.dtype == training.mixed_precision_reduce == "float32"
        and p.fsdp_reshard_after_forward != "always"
        and not training.enable_cpu_offload
    )


def computes_with_copies(config: Config, world_size: int, has_experts: bool) -> bool:
    """True if parameters are cast to the compute dtype by copying them, without FSDP."""
    return does_without_fsdp(config, world_size, has_experts) and compute_dtype(config) != "float32"


def state_item_bytes(config: Config) -> int:
    """Return the number of bytes per element of optimizer state."""
    # 8-bit states have a fixed size. Others have the dtype of the option.
    facts = OPTIMIZERS.get(config.optimizer.name)
    if facts is not None and facts.state_bytes is not None:
        return facts.state_bytes
    dtype = config.optimizer.state_dtype
    return ITEM_BYTES[config.training.dtype if dtype == "default" else dtype]


def average_bytes(config: Config) -> int:
    """Return the number of bytes per trained element of averages of the weights, which are float32."""
    if config.training.ema_decay is None:
        return 0
    return ITEM_BYTES["float32"]


def state_block(config: Config) -> int:
    """Number of columns whose optimizer state must be on the same rank. 1 if any split is possible."""
    return STATE_BLOCK if state_item_bytes(config) == 1 else 1


def initial_weights(config: Config) -> str | None:
    """Path of the initial weights of a run without a checkpoint. None if they are randomly initialized."""
    options = config.checkpoint
    return options.initial_load_path or (
        config.model.hf_assets_path if options.initial_load_in_hf else None
    )


def is_context_balanced(p: Parallelism) -> bool:
    """True if each context-parallel rank has two chunks: from the head and from the tail of a sequence."""
    return p.context_parallel_method == "ring" and p.context_parallel_load_balancer == "headtail"
