"""The settings of a run that a plan needs, as plain values: mesh and batch sizes, bytes per element, and modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardtrain.config import derived, stages
from shardtrain.config.schema import Config, Parallelism, ReshardPolicy
from shardtrain.config.schema.task_options import Task
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.facts.optimizers import OPTIMIZERS
from shardtrain.facts.quantization import GROUPED, LINEAR, MX


@dataclass(frozen=True)
class PlannedJob:
    """One run on a mesh. Widths are in bytes per element.

    Attributes:
        seq_len: Tokens of a sequence.
        rows: Sequences of a micro-batch.
        num_microbatches: Micro-batches of a step on each data-parallel rank.
        pp, dp_replicate, dp_shard, cp, tp, ep: Degrees of the mesh.
        cp_method: Exchange of context parallelism.
        schedule: Pipeline schedule.
        stages: Layers of each pipeline stage.
        recompute: "none", "full", "op", or "N" to recompute every Nth layer. "core" is only
            attention (other systems).
        reshard: Value of parallelism.fsdp_reshard_after_forward.
        shard_states: Optimizer states are sharded over replicas.
        loss_parallel: The loss uses logits that are split over tp.
        stored_width: Width of weights and gradients.
        compute_width: Width of activations and gathered weights.
        reduce_width: Width of gradients in reductions.
        gradient_width: Width of gradients if it is not ``stored_width``, else 0.
        overlaps: Gradients are reduced during the backward pass.
        states: Optimizer state tensors per weight.
        state_width: Width of optimizer states.
        average_width: Width of averages of the weights, or 0 without averages.
        early_step: The optimizer updates each weight during backward and frees its gradient.
        fsdp: Weights are sharded and gathered.
        copies: FSDP is off and the compute dtype differs from the stored one, so each weight also has
            a copy in the compute dtype.
        fused: The model is compiled, so elementwise operations are fused.
        float8: Linear layers multiply in float8.
        float8_experts: Experts multiply in float8.
        float8_gather: FSDP gathers weights of linear layers in 8 bits.
        offload: Part of weights, gradients and optimizer states in host memory.
        loss: "chunked" is ops/cross_entropy.py. "at head" is ops/linear_cross_entropy.py where it
            saves memory. For other systems, "fused" never has all logits, and "whole" has all of
            them in float32.
        compute_dtype: Name of the compute dtype.
        balanced: Routers send equally many rows to each expert, as debug.moe_force_load_balance does.
        notes: Notes on options whose effect the plan does not include.

    The following fields only differ from their defaults in plans of other systems:
        flash: Attention scores are never stored.
        split_sequence: Norms work on a part of the sequence under tensor parallelism.
        repeats_kv: Attention copies keys and values for each query head.
        reduces_once: Gradients of several micro-batches are reduced together.
        gathers_float8: Tensor parallelism gathers activations after they are cast to float8.
        attention_speed: Speed of attention kernels, relative to PyTorch's.
        heads: Number of times that the head processes each token: once, and once per multi-token prediction layer.
        hides_exchange: The exchange of experts overlaps with the computation of another micro-batch.
    """

    seq_len: int
    rows: int
    num_microbatches: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    cp_method: Literal["allgather", "ring", "ulysses"] = "allgather"
    schedule: str = "1F1B"
    stages: tuple[range, ...] = ()
    recompute: str = "none"
    reshard: ReshardPolicy = "default"
    shard_states: bool = False
    loss_parallel: bool = True
    stored_width: int = 4
    compute_width: int = 2
    reduce_width: int = 4
    gradient_width: int = 0
    overlaps: bool = True
    states: float = 2
    state_width: int = 4
    average_width: int = 0
    early_step: bool = False
    fsdp: bool = True
    copies: bool = False
    fused: bool = False
    float8: bool = False
    float8_experts: bool = False
    float8_gather: bool = False
    offload: Literal["nothing", "optimizer", "all"] = "nothing"
    loss: Literal["chunked", "at head", "fused", "whole"] = "chunked"
    flash: bool = True
    split_sequence: bool = True
    repeats_kv: bool = False
    reduces_once: bool = True
    gathers_float8: bool = False
    attention_speed: float = 1.0
    heads: int = 1
    hides_exchange: bool = False
    balanced: bool = False
    compute_dtype: str = "bfloat16"
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the gradients that the optimizer reads."""
        return self.gradient_width or self.stored_width

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks."""
        tokens_per_data_rank = self.seq_len * self.rows * self.num_microbatches
        return tokens_per_data_rank * self.dp_replicate * self.dp_shard

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before tensor parallelism splits the sequence."""
        return self.rows * self.seq_len // self.cp

    @property
    def recomputes_layers(self) -> bool:
        """True if backward recomputes layers. No schedule can then split off the gradients of weights."""
        return self.recompute not in ("none", "core")

    @property
    def frees_gathered(self) -> bool:
        """True if FSDP frees gathered weights after forward."""
        if self.reshard == "default":
            return self.dp_shard * self.cp > 1 and self.pp == 1
        return self.reshard == "always"

    def stages_of_rank(self, rank: int) -> Sequence[int]:
        """Return the indices of the stages of a pipeline rank, in the order of forward."""
        return stages.stages_of_rank(self.schedule, rank, self.pp, len(self.stages))


def of_config(
    config: Config,
    world_size: int,
    num_layers: int,
    sequences_per_row: int = 1,
    has_experts: bool = False,
) -> PlannedJob:
    """Return the sizes of a configured run on ``world_size`` ranks.

    Args:
        config: The configuration.
        world_size: Number of ranks.
        num_layers: Layers of the model, with those of multi-token prediction.
        sequences_per_row: Sequences that the task makes of one row of data.
        has_experts: The model has experts.
    """
    parallelism = config.parallelism
    training = config.training
    recompute = config.activation_checkpoint
    # Rows of one forward pass. A pipeline divides the local batch.
    accumulation = max(1, derived.accumulation_steps(config, world_size))
    rows = training.local_batch_size
    if parallelism.pipeline_parallel_degree > 1:
        rows = parallelism.pipeline_parallel_microbatch_size
    compute = derived.compute_dtype(config)
    has_work_for_fsdp = world_size > 1 or compute != training.dtype or training.enable_cpu_offload
    recompute_mode = "none"
    if recompute.mode == "full":
        recompute_mode = "full"
    elif recompute.mode == "selective":
        recompute_mode = recompute.selective_ac_option
    schedule, schedule_notes = _schedule(parallelism)
    precision = _LowPrecision.of_config(config)

    # Layers of multi-token prediction are on the last stage.
    num_mtp_layers = int(config.model.overrides.get("num_nextn_predict_layers", 0))
    layers = list(layers_of_stages(parallelism, num_layers - num_mtp_layers))
    layers[-1] = range(layers[-1].start, layers[-1].stop + num_mtp_layers)

    # The loss at the head needs a plain linear head of one of this package's decoders:
    # distributed/loss_at_head.py.
    is_native = config.model.name != "transformers" and not config.model.name.endswith(".py")
    has_full_head = parallelism.tensor_parallel_degree == parallelism.pipeline_parallel_degree == 1
    is_default_task = config.task.name == Task().name
    is_at_head = is_native and precision.has_plain_head and has_full_head and is_default_task

    # Ring attention is the default method.
    cp_method: Literal["allgather", "ring", "ulysses"] = "ring"
    if parallelism.context_parallel_method == "ulysses":
        cp_method = "ulysses"
    elif parallelism.context_parallel_rotate_method == "allgather":
        cp_method = "allgather"
    # An optimizer in a user's file counts as AdamW.
    optimizer = OPTIMIZERS.get(config.optimizer.name, OPTIMIZERS["AdamW"])
    has_replicas = parallelism.data_parallel_replicate_degree > 1
    return PlannedJob(
        seq_len=training.seq_len,
        rows=rows * sequences_per_row,
        num_microbatches=training.local_batch_size * accumulation // rows,
        pp=parallelism.pipeline_parallel_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=derived.shard_degree(config, world_size),
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        cp_method=cp_method,
        schedule=schedule,
        stages=tuple(layers),
        heads=1 + num_mtp_layers,
        recompute=recompute_mode,
        reshard=parallelism.fsdp_reshard_after_forward,
        shard_states=parallelism.shard_optimizer_states and has_replicas,
        loss_parallel=not parallelism.disable_loss_parallel,
        stored_width=ITEM_BYTES[training.dtype],
        compute_width=ITEM_BYTES[compute],
        reduce_width=ITEM_BYTES[training.mixed_precision_reduce],
        states=optimizer.state_tensors,
        state_width=derived.state_item_bytes(config),
        average_width=derived.average_bytes(config),
        early_step=config.optimizer.early_step_in_backward,
        fsdp=has_work_for_fsdp and not derived.does_without_fsdp(config, world_size, has_experts),
        copies=derived.computes_with_copies(config, world_size, has_experts),
        fused=bool(config.compile.enable) and "model" in config.compile.components,
        float8=precision.has_float8_linears,
        float8_experts=precision.has_float8_experts,
        float8_gather=precision.has_float8_gather,
        offload="all" if training.enable_cpu_offload else "nothing",
        compute_dtype=compute,
        balanced=config.debug.moe_force_load_balance,
        loss="at head" if is_at_head else "chunked",
        notes=(
            *derived.notes_on_rows(config),
            *_uncounted(config),
            *schedule_notes,
            *precision.notes,
        ),
    )


def _uncounted(config: Config) -> list[str]:
    """Return notes on options whose effect the plan does not include."""
    recompute = config.activation_checkpoint
    notes = []
    if recompute.mode == "memory_budget":
        notes.append(
            "the compiler decides what activation_checkpoint.memory_budget recomputes; planned without recomputation"
        )
    if config.optimizer.name.endswith(".py"):
        notes.append("the optimizer is a file: its state is counted as AdamW's")
    if config.optimizer.qk_clip_threshold:
        notes.append(
            "optimizer.qk_clip_threshold multiplies queries and keys a second time in float32, which is not counted"
        )
    if config.task.name in ("distillation", "preference", "kto"):
        notes.append(
            f"the frozen model that task.name={config.task.name} may hold is not counted; a dry run counts it"
        )
    if recompute.cpu_offload:
        notes.append(
            "activation_checkpoint.cpu_offload: offloaded activations are counted as device memory"
        )
    return notes


def _schedule(parallelism: Parallelism) -> tuple[str, list[str]]:
    """Return the pipeline schedule of the plan, and notes if it differs from the configured schedule."""
    name = parallelism.pipeline_parallel_schedule
    name = stages.schedule_name(name) or name
    if name not in stages.FROM_CSV or parallelism.pipeline_parallel_degree < 2:
        return name, []
    name = "1F1B" if name in stages.SINGLE else "Interleaved1F1B"
    return name, [f"plan does not read pipeline_parallel_schedule_csv; planned as {name}"]


@dataclass(frozen=True)
class _LowPrecision:
    """Products in float8 or MX, which counts as float8.

    Attributes:
        has_float8_linears: Linear layers run in float8. False if it is emulated.
        has_float8_experts: Experts run in float8. False if it is emulated.
        has_float8_gather: FSDP gathers weights in float8.
        has_plain_head: The head is not converted.
        notes: Notes on emulation and devices.
    """

    has_float8_linears: bool
    has_float8_experts: bool
    has_float8_gather: bool
    has_plain_head: bool
    notes: tuple[str, ...]

    @classmethod
    def of_config(cls, config: Config) -> _LowPrecision:
        """Read the converters of a configuration."""
        converters = config.model.converters
        linear = config.quantize.linear
        notes = []
        # For each converted part of the model: True if its products really run in 8 bits, False if
        # emulated.
        runs_in_8_bits = {}
        if LINEAR in converters:
            runs_in_8_bits["linear"] = not linear.float8.emulate
        if GROUPED in converters:
            runs_in_8_bits["experts"] = not config.quantize.grouped_mm.float8.emulate
        has_mx = MX in converters
        if has_mx:
            runs_in_8_bits["linear"] = linear.mx.recipe_name != "mxfp8_emulated"
            if runs_in_8_bits["linear"]:
                notes.append(
                    "MX is counted as float8; its products need CUDA compute capability 10.0 and above",
                )
        if not all(runs_in_8_bits.values()):
            name = "MX" if has_mx else "float8"
            notes.append(
                f"{name} is emulated, which is slower than the planned products in the compute type"
            )

        # A converter converts all linears, including the head, except those of its filter.
        filters = linear.mx.filter_fqns if has_mx else linear.float8.filter_fqns
        is_head_excluded = "head" in filters or "output" in filters
        gathers_in_float8 = linear.float8.enable_fsdp_float8_all_gather
        return cls(
            has_float8_linears=runs_in_8_bits.get("linear", False),
            has_float8_experts=runs_in_8_bits.get("experts", False),
            has_float8_gather=LINEAR in converters and gathers_in_float8,
            has_plain_head="linear" not in runs_in_8_bits or is_head_excluded,
            notes=tuple(notes),
        )


def layers_of_stages(parallelism: Parallelism, num_layers: int) -> tuple[range, ...]:
    """Return the layers of each pipeline stage. Without a pipeline, one stage has all layers."""
    if parallelism.pipeline_parallel_degree < 2:
        return (range(num_layers),)
    if parallelism.module_fqns_per_model_part is None:
        return tuple(stages.layers_per_stage(parallelism, num_layers))
    layers = []
    start = 0
    for part in parallelism.module_fqns_per_model_part:
        count = sum(name.startswith("layers.") for name in part)
        layers.append(range(start, start + count))
        start += count
    return tuple(layers)
