"""Dry run (``comm.mode="fake_backend"``): build one rank of a run of any size in a single CPU process.

It runs the real code for the mesh, pipeline stages, tensor parallelism and FSDP, but the process group does
not communicate, and tensors have no memory. The result is a report about the mesh, the batch, and the memory
that the rank would need. Nothing is trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardtrain import data, distributed, models, optim, tasks
from shardtrain.config import Loaded, derived, stages
from shardtrain.config.schema import Config
from shardtrain.distributed import fake_backend, fsdp, process_group
from shardtrain.distributed.task_runner import TaskRunner
from shardtrain.lora import quantize, spec
from shardtrain.metrics.flops import count_model
from shardtrain.ops import init_weights
from shardtrain.ops.dtensor import local_tensor
from shardtrain.train import reference_models
from shardtrain.train.run_folder import describe_model, describe_precision, versions
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True)
class FrozenModel:
    """A frozen model, such as a teacher: bytes of its weights on this rank, and its traced forward pass."""

    name: str
    dtype: str
    weight_bytes: int
    traced: fake_backend.Traced


@dataclass(frozen=True)
class DryRun:
    """Memory that one rank of a run would need, and the traces it was computed from."""

    sizes: Mapping[str, int]
    """Number of ranks along each mesh axis."""
    place: Mapping[str, int]
    """This rank's coordinate along each mesh axis."""
    batch: tuple[str, ...]
    """Lines of the report that describe the model and the batch."""
    num_params: int
    flops_per_token: float
    stages: tuple[str, ...]
    """Modules of each pipeline stage on this rank."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    traced: fake_backend.Traced
    frozen: tuple[FrozenModel, ...] = ()
    low_bits_bytes: int = 0
    """Bytes of the frozen weights that ``lora.base_dtype`` quantizes."""
    average_bytes: int = 0
    """Bytes of the averaged weights that ``training.ema_decay`` keeps."""
    accumulates: bool = False
    """True if ``gradient_bytes`` counts unsharded gradients, which accumulate over several micro-batches."""

    @property
    def total_bytes(self) -> int:
        """Sum of all parts. This is an upper bound, because their peaks are at different times."""
        states = (
            self.parameter_bytes + self.low_bits_bytes + self.gradient_bytes + self.optimizer_bytes
        )
        states += self.average_bytes
        states += sum(model.weight_bytes for model in self.frozen)
        passes = self.traced.activations_bytes + self.traced.gathered_bytes
        for model in self.frozen:
            passes += model.traced.activations_bytes + model.traced.gathered_bytes
        return states + passes


def main(loaded: Loaded, rank: int, size: int, notices: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of the report on rank ``rank`` of ``size``. The first line comes before the work starts."""
    started = time.perf_counter()
    yield (
        f'{versions()}: comm.mode="fake_backend" builds rank {rank} of {size} in this process; '
        "nothing is trained, read or written"
    )
    for notice in (*notices, *_notes(loaded.config)):
        yield f"note: {notice}"
    for note in tasks.open_task(loaded.config).plan_notes():
        yield f"note: {note}"
    with fake_backend.join(rank, size) as world:
        yield from report(build(loaded.config, world), loaded.config)
    yield f"checked in {format_seconds(time.perf_counter() - started)}; nothing was trained"


def build(config: Config, world: process_group.World) -> DryRun:
    """Build this rank's shards of the model, and trace one micro-batch. The fake process group must exist.

    Raises:
        ConfigError: a run would raise it too. Or the task is a user's file, whose batches depend on its data.
    """
    if config.task.name.endswith(".py"):
        rule = "builds its batches from the rows of its data, and a dry run reads no data"
        fix = "start the run on one machine instead"
        raise ConfigError(Problem("task.name", config.task.name, rule, fix))
    task = tasks.open_task(config)
    config = _without_compiler(config)

    # Shard the model as train/task_model.py does, but without drawing initial values.
    mesh = distributed.build(config, world)
    module, shape = models.configured(config.model)
    layout = module.LAYOUT
    model = task.adapt(models.build(module, shape), layout)
    _, added = spec.adapt(model, module, shape, config.lora, bool(task.num_labels))
    num_params, flops = count_model(model, layout, shape)
    seq_len = config.training.seq_len
    flops_per_token = flops(seq_len) + task.planned_flops_per_row(model) / seq_len
    names = [name for name, _ in model.named_parameters()]
    base_names = [name for name in names if name not in added]
    quantize.remove_quantized_weights(model, layout, config.lora.base_dtype)
    num_layers = len(getattr(model, layout.layers))
    init_weights.plan(base_names, module.initial(shape), layout, num_layers)
    runner = distributed.parallelize(model, layout, mesh, config, task.num_outputs(shape))
    stage_modules = tuple(_modules_of(part, layout) for part in runner.parts)

    planned_batch = task.planned_batch(_num_rows(config))
    if planned_batch is not None:
        assert isinstance(task, tasks.RowTask)
        runner = TaskRunner(runner, task)

    # Count the bytes of weights, gradients and optimizer state, and trace forward and backward.
    with fake_backend.materialized(runner):
        low_bits_bytes = sum(quantize.count(part, config) for part in runner.parts)
        # Do not use runner.parameters(): a rank with two stages stores shared parameters twice.
        parameters: list[nn.Parameter] = []
        for part in runner.parts:
            parameters += part.parameters()
        parameter_bytes = _local_bytes(parameters)
        optimizer = optim.build(runner.optimizer_parameters().items(), config.optimizer, names)
        states = optim.state_tensors(optimizer, runner.optimizer_parameters().items())
        optimizer_bytes = _local_bytes(states.values())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        trained_numel = sum(local_tensor(parameter).numel() for parameter in trained)
        # Accumulated gradients are unsharded, so they may exceed the sharded ones.
        accumulated_bytes = _accumulated_bytes(runner.parts, mesh, config)
        gradient_bytes = max(_gradient_bytes(runner.parts, layout, mesh, config), accumulated_bytes)
        del optimizer, states
        # Create the batch inside this block, as fake tensors. Real tensors would count as activations.
        batch: Any = planned_batch
        if planned_batch is None:
            batch = _micro_batch(config, task.sequences_per_row)
        traced = fake_backend.trace(runner, layout, mesh, config, batch)
    batch = _micro_batch(config, task.sequences_per_row)
    frozen = []
    for name, frozen_config in reference_models.frozen_configs(task, config).items():
        frozen.append(_build_frozen(name, frozen_config, mesh, batch))

    return DryRun(
        sizes=mesh.sizes,
        place={axis: mesh.rank(axis) for axis in mesh.sizes},
        batch=tuple(describe_model(config, mesh, num_params)),
        num_params=num_params,
        flops_per_token=flops_per_token,
        stages=stage_modules,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        traced=traced,
        frozen=tuple(frozen),
        low_bits_bytes=low_bits_bytes,
        average_bytes=trained_numel * derived.average_bytes(config),
        accumulates=bool(accumulated_bytes),
    )


def _build_frozen(
    name: str, config: Config, mesh: distributed.Mesh, batch: data.Batch
) -> FrozenModel:
    """Shard a frozen model like the trained one, and trace its forward pass."""
    task = tasks.open_task(config)
    module, shape = models.configured(config.model)
    model = task.adapt(models.build(module, shape), module.LAYOUT)
    spec.adapt(model, module, shape, config.lora, bool(task.num_labels))
    quantize.remove_quantized_weights(model, module.LAYOUT, config.lora.base_dtype)
    runner = distributed.parallelize(model, module.LAYOUT, mesh, config, task.num_outputs(shape))
    with fake_backend.materialized(runner):
        (part,) = runner.parts
        weight_bytes = _local_bytes(runner.parameters().values()) + quantize.count(part, config)
        part.eval().requires_grad_(False)
        traced = fake_backend.trace_frozen(part, module.LAYOUT, mesh, config, batch)
    return FrozenModel(name, config.training.dtype, weight_bytes, traced)


def report(run: DryRun, config: Config) -> list[str]:
    """Return the lines of the report."""
    world_size = math.prod(run.sizes.values())
    tokens_per_step = derived.global_batch_size(config, world_size) * config.training.seq_len
    steps = config.training.steps
    num_tokens = derived.step_sizes(config, world_size).after(0, steps) * config.training.seq_len
    length = f"{steps} steps, {format_count(num_tokens)} tokens"
    if config.training.epochs is not None:
        length = f"{config.training.epochs} epochs; the number of steps depends on the data, which are not read"
    flops_per_step = run.flops_per_token * tokens_per_step
    axes = []
    for axis, ranks in run.sizes.items():
        axes.append(f"  {axis:<13}{ranks:>6}{run.place[axis]:>11}")
    return [
        *run.batch,
        f"length: {length}",
        f"compute: {flops_per_step:.3g} FLOPs per step, {flops_per_step / world_size:.3g} per rank "
        "(6 N + 12 L H head_dim T per token)",
        describe_precision(config),
        "",
        f"  {'mesh axis':<13}{'ranks':>6}{'this rank':>11}",
        *axes,
        "",
        *_stage_lines(run, config),
        *_memory_table(run, config),
    ]


def _stage_lines(run: DryRun, config: Config) -> list[str]:
    if run.sizes["pp"] == 1:
        return []
    p = config.parallelism
    rows = config.training.local_batch_size * derived.accumulation_steps(
        config, math.prod(run.sizes.values())
    )
    name = stages.schedule_name(p.pipeline_parallel_schedule)
    schedule = (
        f"pipeline: {name}, {rows // p.pipeline_parallel_microbatch_size} micro-batches of "
        f"{p.pipeline_parallel_microbatch_size}, at most {run.traced.most_in_flight} in flight on this rank; "
        "nothing was sent"
    )
    return [schedule, *(f"  stage of this rank: {stage}" for stage in run.stages), ""]


def _memory_table(run: DryRun, config: Config) -> list[str]:
    """Return a table of the memory for each purpose, and notes on passes that could not be traced."""
    stored_dtype = config.training.dtype
    rows = [("parameters", run.parameter_bytes, f"{stored_dtype}; this rank's shards")]
    if run.low_bits_bytes:
        rows.append(
            ("quantized", run.low_bits_bytes, f"{config.lora.base_dtype}; frozen, unsharded")
        )
    rows.append(("gradients", run.gradient_bytes, _gradient_remark(run, config)))
    rows.append(
        ("optimizer state", run.optimizer_bytes, f"{config.optimizer.name}; this rank's shards")
    )
    if run.average_bytes:
        rows.append(("averages", run.average_bytes, "float32; training.ema_decay"))

    # Rows for the trained model's forward and backward.
    traced = run.traced
    notes = []
    if traced.not_traced:
        notes.append(
            f"  activations: not traced ({traced.not_traced}); the sum does not include them"
        )
    else:
        layers = f"{traced.layers_traced} of {traced.layers} layers traced"
        if traced.layers_traced != traced.layers:
            layers += ", the others counted like the last traced layer of their kind"
        rows.append(("activations", traced.activations_bytes, f"peak; {layers}; CPU kernels"))
        rows.append(
            (
                "FSDP buffers",
                traced.gathered_bytes,
                "peak; gathered parameters and unreduced gradients",
            )
        )

    # Rows for the frozen models.
    for frozen in run.frozen:
        rows.append(
            (frozen.name, frozen.weight_bytes, f"{frozen.dtype}, frozen; this rank's shards")
        )
        if frozen.traced.not_traced:
            notes.append(
                f"  forward of the {frozen.name}: not traced ({frozen.traced.not_traced}); the sum does not include it"
            )
        else:
            forward_bytes = frozen.traced.activations_bytes + frozen.traced.gathered_bytes
            rows.append(
                (
                    "its forward",
                    forward_bytes,
                    "peak; forward only, with its logits and FSDP buffers",
                )
            )

    rows.append(
        (
            "sum",
            run.total_bytes,
            "upper bound, without allocator overhead and temporaries of the update",
        )
    )
    table = []
    for name, size, remark in rows:
        table.append(f"  {name:<16}{format_bytes(size):>11}  {remark}")
    return ["  memory of this rank", *table, *notes]


def _gradient_remark(run: DryRun, config: Config) -> str:
    if run.accumulates:
        dtype = config.training.mixed_precision_reduce
        return f"{dtype}; unsharded until the backward of the last micro-batch reduces them"
    if config.optimizer.early_step_in_backward:
        return f"{config.training.dtype}; peak, because the update in backward frees them"
    return f"{config.training.dtype}; this rank's shards"


def _modules_of(part: nn.Module, layout: Any) -> str:
    """Describe the modules of a pipeline stage, such as "layers.8 to 15, norm, head"."""

    def present(names: Iterable[str]) -> list[str]:
        return [name for name in names if not isinstance(getattr(part, name), nn.Identity)]

    # The layout of a transformers network does not name the modules outside the layers, so take their paths
    # from the pipeline stage.
    if hasattr(part, "stage_paths"):
        return _in_ranges(part.stage_paths, set(getattr(part, layout.layers)))  # type: ignore[arg-type]
    names = present(layout.first)
    layers = list(getattr(part, layout.layers))
    if len(layers) > 1:
        names.append(f"{layout.layers}.{layers[0]} to {layers[-1]}")
    elif layers:
        names.append(f"{layout.layers}.{layers[0]}")
    return ", ".join(names + present(layout.last))


def _in_ranges(paths: Sequence[str], layers: set[str]) -> str:
    """Describe the modules of a stage, such as "embed, layers.0 to 7"."""
    names = [path for path in paths if path not in layers]
    own_layers = [path for path in paths if path in layers]
    text = own_layers[0]
    if len(own_layers) > 1:
        text += f" to {own_layers[-1].rpartition('.')[2]}"
    names.insert(paths.index(own_layers[0]), text)
    return ", ".join(names)


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


def _accumulated_bytes(parts: Sequence[nn.Module], mesh: distributed.Mesh, config: Config) -> int:
    """Return the bytes of the unsharded gradients in which FSDP accumulates several micro-batches.

    They have the dtype of the reduction. 0 if nothing is accumulated.
    """
    p = config.parallelism
    training = config.training
    rows = training.local_batch_size * derived.accumulation_steps(config, mesh.device_mesh.size())
    # With a single micro-batch, backward reduces each gradient immediately, so nothing accumulates.
    micro_batch_rows = training.local_batch_size
    if mesh.size("pp") > 1:
        micro_batch_rows = p.pipeline_parallel_microbatch_size
    if rows <= micro_batch_rows or not fsdp.is_needed(parts, mesh, config):
        return 0
    # Do not use runner.parameters(): a rank with two stages stores shared parameters twice, so count both.
    num_elements = 0
    for part in parts:
        for parameter in part.parameters():
            if parameter.requires_grad:
                num_elements += parameter.numel() // _ranks_that_split(parameter)
    return num_elements * getattr(torch, training.mixed_precision_reduce).itemsize


def _ranks_that_split(parameter: Tensor) -> int:
    """Return the number of tensor-parallel and expert-parallel ranks over which a parameter is split."""
    if not isinstance(parameter, DTensor):
        return 1
    ranks = 1
    axes = parameter.device_mesh.mesh_dim_names or ()
    for axis, size, placement in zip(
        axes, parameter.device_mesh.shape, parameter.placements, strict=True
    ):
        if axis in ("tp", "ep") and placement.is_shard():
            ranks *= size
    return ranks


def _gradient_bytes(
    parts: Sequence[nn.Module], layout: Any, mesh: distributed.Mesh, config: Config
) -> int:
    """Return the peak bytes of gradients.

    If the optimizer updates during backward, each gradient is freed after its update. Then only gradients
    that exist at the same time count.
    """
    trained = []
    for part in parts:
        trained += [parameter for parameter in part.parameters() if parameter.requires_grad]
    if not config.optimizer.early_step_in_backward:
        return _local_bytes(trained)
    # Without FSDP, backward updates one parameter at a time.
    if not fsdp.is_needed(parts, mesh, config):
        return max(_local_bytes([parameter]) for parameter in trained)
    # The gradients of one FSDP unit are freed before the gradients of the next unit exist, so count the
    # largest unit.
    units: list[nn.Module] = []
    for part in parts:
        for names in (layout.first, layout.last):
            units.append(nn.ModuleList(getattr(part, name) for name in names))
        units += getattr(part, layout.layers).values()
    largest = 0
    for unit in units:
        trained_in_unit = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        largest = max(largest, _local_bytes(trained_in_unit))
    return largest


def _num_rows(config: Config) -> int:
    """Return the number of rows of one forward pass. A pipeline divides the local batch."""
    if config.parallelism.pipeline_parallel_degree > 1:
        return config.parallelism.pipeline_parallel_microbatch_size
    return config.training.local_batch_size


def _micro_batch(config: Config, sequences_per_row: int = 1) -> data.Batch:
    """Return a batch of zeros in the shape of one forward pass, before context parallelism splits it."""
    training = config.training
    rows = _num_rows(config) * sequences_per_row
    zeros_BT = torch.zeros(rows, training.seq_len, dtype=torch.int64)
    return data.Batch(zeros_BT, zeros_BT, zeros_BT, zeros_BT[:, 0])


def _without_compiler(config: Config) -> Config:
    """Return the configuration without options that do not support fake tensors; see ``_notes``."""
    recompute = config.activation_checkpoint
    if recompute.mode == "memory_budget":
        recompute = replace(recompute, mode="none")
    return replace(
        config,
        compile=replace(config.compile, enable=False),
        parallelism=replace(config.parallelism, enable_async_tensor_parallel=False),
        activation_checkpoint=recompute,
    )


def _notes(config: Config) -> list[str]:
    """Return notes on options that a dry run ignores or counts differently."""
    recompute = config.activation_checkpoint
    notes = derived.notes_on_rows(config)
    if config.compile.enable:
        notes.append(
            "compile.enable=true: a dry run does not compile; activations are those of the uncompiled model"
        )
    if config.parallelism.enable_async_tensor_parallel:
        notes.append("parallelism.enable_async_tensor_parallel=true: a dry run ignores this option")
    if recompute.mode == "memory_budget":
        notes.append(
            'activation_checkpoint.mode="memory_budget": in a run, the compiler decides what is recomputed; '
            "a dry run recomputes nothing"
        )
    if recompute.cpu_offload:
        notes.append(
            "activation_checkpoint.cpu_offload=true: offloaded activations are counted as device memory"
        )
    if config.training.enable_cpu_offload:
        notes.append(
            "training.enable_cpu_offload=true: in a run, parameters, gradients and optimizer state are in host "
            "memory"
        )
    return notes
