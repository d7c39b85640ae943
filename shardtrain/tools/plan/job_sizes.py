"""What a plan needs of a configuration: sizes of the mesh, batch, types and modes, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from shardtrain.config import derived, stages
from shardtrain.config.schema import Config, Parallelism
from shardtrain.config.schema.task_options import Task
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.facts.optimizers import OPTIMIZERS
from shardtrain.facts.quantization import GROUPED, LINEAR, MX


@dataclass(frozen=True)
class PlannedJob:
    """One run on a mesh.

    ``rows`` are sequences of a micro-batch and ``num_microbatches`` the micro-batches of a step on each data-parallel
    rank. ``fsdp``: weights are gathered from shards; ``copies``: they are cast without it. ``states``: tensors
    of the optimizer for each weight. ``state_width``: bytes of their elements; ``early_step``: gradients are used and
    freed in backward; ``stored_width``: bytes of elements of weights and gradients; ``compute_width`` those of
    activations and gathered weights, ``reduce_width`` those of gradients on their way, ``gradient_width`` those of
    gradients where they are not as wide as weights. ``recompute`` is "none", "full", "op" or, as digits, every how
    manieth layer is recomputed. ``fused``: the model is compiled, so that elementwise operations are few. ``float8``:
    products of linear layers in float8, ``float8_experts``: those of experts, ``float8_gather``: FSDP sends weights of
    linear layers in 8 bits. ``offload``: what is in host memory, of weights, gradients and optimizer state.

    The rest differs for runs of other systems alone. ``overlaps``: gradients are reduced beside the backward pass.
    ``recompute`` may also be "core", attention alone. ``flash``: scores of attention never reach memory;
    ``attention_speed``: of its kernels, over those that PyTorch has.
    ``split_sequence``: norms work on a part of the sequence under tensor parallelism. ``repeats_kv``: attention gets a
    copy of keys and values for each head of the queries. ``reduces_once``: gradients of several micro-batches are
    reduced together. ``gathers_float8``: tensor parallelism gathers what was cast to float8 before. ``loss``: "chunked"
    is ops/cross_entropy.py and "at head" ops/linear_cross_entropy.py where that saves memory; of other systems "fused"
    never has all logits, and "whole" has them in float32.
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
    reshard: Literal["default", "always", "never"] = "default"
    shard_states: bool = False
    loss_parallel: bool = True
    stored_width: int = 4
    compute_width: int = 2
    reduce_width: int = 4
    gradient_width: int = 0
    overlaps: bool = True
    states: float = 2
    state_width: int = 4
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
    compute_dtype: str = "bfloat16"
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an element of the gradients that the optimizer is given."""
        return self.gradient_width or self.stored_width

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks."""
        return self.seq_len * self.rows * self.num_microbatches * self.dp_replicate * self.dp_shard

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before tensor parallelism splits the sequence."""
        return self.rows * self.seq_len // self.cp

    @property
    def recomputes_layers(self) -> bool:
        """Whether layers are computed again in backward, so that no schedule computes gradients of weights apart."""
        return self.recompute not in ("none", "core")

    @property
    def frees_gathered(self) -> bool:
        """Whether FSDP frees gathered weights after forward."""
        if self.reshard == "default":
            return self.dp_shard * self.cp > 1 and self.pp == 1
        return self.reshard == "always"

    def stages_of_rank(self, rank: int) -> Sequence[int]:
        """Indices of the stages of a pipeline rank, in the order of forward."""
        return stages.stages_of_rank(self.schedule, rank, self.pp, len(self.stages))


def of_config(
    config: Config, world_size: int, num_layers: int, sequences_per_row: int = 1, has_experts: bool = False
) -> PlannedJob:
    """The job of a configuration on so many ranks; ``num_layers`` and ``has_experts`` are the model's."""
    p = config.parallelism
    training = config.training
    recompute = config.activation_checkpoint
    accumulation = max(1, derived.accumulation_steps(config, world_size))
    rows = p.pipeline_parallel_microbatch_size if p.pipeline_parallel_degree > 1 else training.local_batch_size
    compute = derived.compute_dtype(config)
    has_work_for_fsdp = world_size > 1 or compute != training.dtype or training.enable_cpu_offload
    mode = {"selective": recompute.selective_ac_option, "full": "full"}.get(recompute.mode, "none")

    # What the plan does not know of this configuration, as notes in its answer.
    not_known = {
        "the compiler decides what activation_checkpoint.memory_budget recomputes; planned without recomputation": (
            recompute.mode == "memory_budget"
        ),
        "the optimizer is a file: its state is counted as AdamW's": config.optimizer.name.endswith(".py"),
        f"the frozen model that task.name={config.task.name} may hold is not counted; a dry run counts it": (
            config.task.name in ("distillation", "preference")
        ),
        "activation_checkpoint.cpu_offload: offloaded activations are counted as device memory": (
            recompute.cpu_offload
        ),
    }
    notes = [*derived.notes_on_rows(config), *(note for note, applies in not_known.items() if applies)]
    name = stages.schedule_name(p.pipeline_parallel_schedule) or p.pipeline_parallel_schedule
    if name in stages.FROM_CSV and p.pipeline_parallel_degree > 1:
        name = "1F1B" if name in stages.SINGLE else "Interleaved1F1B"
        notes.append(f"pipeline_parallel_schedule_csv is not read here; planned as {name}")

    optimizer = OPTIMIZERS.get(config.optimizer.name, OPTIMIZERS["AdamW"])

    # Converters by the part of the model that they convert, and whether its products really run in float8.
    linear = config.quantize.linear
    in_float8 = {
        name.split(".")[1]: not getattr(config.quantize, name.split(".")[1]).float8.emulate
        for name in (LINEAR, GROUPED)
        if name in config.model.converters
    }
    in_mx = MX in config.model.converters
    if in_mx:  # counted as tensorwise float8, whose peak they have where a device has them
        in_float8["linear"] = linear.mx.recipe_name != "mxfp8_emulated"
        if in_float8["linear"]:
            notes.append("MX is counted as float8; its products need CUDA compute capability 10.0 and above")
    if not all(in_float8.values()):
        notes.append(
            f"{'MX' if in_mx else 'float8'} is emulated, which is slower than the planned products in the compute type"
        )

    # As distributed/loss_at_head.py, where the head is an ordinary linear layer of one of this package's decoders.
    own = config.model.name != "transformers" and not config.model.name.endswith(".py")
    filters = (linear.mx if in_mx else linear.float8).filter_fqns
    plain_head = "linear" not in in_float8 or any(name in ("head", "output") for name in filters)
    whole = p.tensor_parallel_degree == p.pipeline_parallel_degree == 1
    at_head = own and plain_head and whole and config.task.name == Task().name

    cp_method: Literal["allgather", "ring", "ulysses"] = "ring"
    if p.context_parallel_method == "ulysses":
        cp_method = "ulysses"
    elif p.context_parallel_rotate_method == "allgather":
        cp_method = "allgather"
    return PlannedJob(
        seq_len=training.seq_len,
        rows=rows * sequences_per_row,
        num_microbatches=training.local_batch_size * accumulation // rows,
        pp=p.pipeline_parallel_degree,
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=derived.shard_degree(config, world_size),
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        ep=p.expert_parallel_degree,
        cp_method=cp_method,
        schedule=name,
        stages=layers_of_stages(p, num_layers),
        recompute=mode,
        reshard=p.fsdp_reshard_after_forward,
        shard_states=p.shard_optimizer_states and p.data_parallel_replicate_degree > 1,
        loss_parallel=not p.disable_loss_parallel,
        stored_width=ITEM_BYTES[training.dtype],
        compute_width=ITEM_BYTES[compute],
        reduce_width=ITEM_BYTES[training.mixed_precision_reduce],
        states=optimizer.state_tensors,
        state_width=derived.state_item_bytes(config),
        early_step=config.optimizer.early_step_in_backward,
        fsdp=has_work_for_fsdp and not derived.does_without_fsdp(config, world_size, has_experts),
        copies=derived.computes_with_copies(config, world_size, has_experts),
        fused=bool(config.compile.enable) and "model" in config.compile.components,
        float8=in_float8.get("linear", False),
        float8_experts=in_float8.get("grouped_mm", False),
        float8_gather=LINEAR in config.model.converters and linear.float8.enable_fsdp_float8_all_gather,
        offload="all" if training.enable_cpu_offload else "nothing",
        compute_dtype=compute,
        loss="at head" if at_head else "chunked",
        notes=tuple(notes),
    )


def layers_of_stages(p: Parallelism, num_layers: int) -> tuple[range, ...]:
    """Layers of each pipeline stage; one stage with all of them where there is no pipeline."""
    if p.pipeline_parallel_degree < 2:
        return (range(num_layers),)
    if p.module_fqns_per_model_part is None:
        return tuple(stages.layers_per_stage(p, num_layers))
    found = []
    start = 0
    for part in p.module_fqns_per_model_part:
        count = sum(name.startswith("layers.") for name in part)
        found.append(range(start, start + count))
        start += count
    return tuple(found)
