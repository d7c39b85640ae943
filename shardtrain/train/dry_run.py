"""What ``train`` does with ``comm.mode="fake_backend"``: build one rank of any world on one CPU process, train nothing.

The mesh, the cut into stages, tensor parallelism and FSDP are the real ones, on a process group that sends nothing and
on tensors without memory. The answer is a report: mesh, batch, and the bytes that the rank would need.
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
from shardtrain.distributed import fake_backend, fsdp, pipeline_parallel, process_group
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
    """A model beside the one that learns: the bytes of its weights on this rank, and its forward pass."""

    name: str
    dtype: str
    weight_bytes: int
    traced: fake_backend.Traced


@dataclass(frozen=True)
class DryRun:
    """What one rank of a run would hold, in bytes, and what was traced to know it.

    ``sizes`` and ``place`` are the ranks along each axis of the mesh, and this rank's among them; ``batch`` describes
    model and batch in words; ``stages`` are the modules of each pipeline stage that the rank holds;
    ``low_bits_bytes`` is what lora.base_dtype holds of frozen weights.
    """

    sizes: Mapping[str, int]
    place: Mapping[str, int]
    batch: tuple[str, ...]
    num_params: int
    flops_per_token: float
    stages: tuple[str, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    traced: fake_backend.Traced
    frozen: tuple[FrozenModel, ...] = ()
    low_bits_bytes: int = 0
    accumulates: bool = False
    """Whether ``gradient_bytes`` are those of micro-batches that are added up before they are reduced."""

    @property
    def total_bytes(self) -> int:
        """Sum of all: an upper bound, because not all of them are largest at once."""
        states = self.parameter_bytes + self.low_bits_bytes + self.gradient_bytes + self.optimizer_bytes
        states += sum(one.weight_bytes for one in self.frozen)
        passes = (self.traced, *(one.traced for one in self.frozen))
        return states + sum(one.activations_bytes + one.gathered_bytes for one in passes)


def main(loaded: Loaded, rank: int, size: int, notices: Sequence[str] = ()) -> Iterator[str]:
    """Lines of the report on rank ``rank`` of ``size``; the first one comes before the work."""
    started = time.perf_counter()
    yield (
        f'{versions()}: comm.mode="fake_backend" builds rank {rank} of {size} in this process; '
        "nothing is trained, read or written"
    )
    for notice in (*notices, *_left_out(loaded.config)):
        yield f"note: {notice}"
    with fake_backend.join(rank, size) as world:
        yield from report(build(loaded.config, world), loaded.config)
    yield f"checked in {format_seconds(time.perf_counter() - started)}; nothing was trained"


def build(config: Config, world: process_group.World) -> DryRun:
    """Build this rank's share of the model, and trace one micro-batch on it; the process group exists.

    Raises ConfigError where a run would.
    """
    if config.task.name.endswith(".py"):
        rule = "makes batches that are known when it reads its rows, and a dry run reads none"
        raise ConfigError(Problem("task.name", config.task.name, rule, "start the run on one machine instead"))
    task = tasks.open_task(config)
    config = _without_compiler(config)
    # the model, cut and sharded as a run does it: train/model.py, without its draws
    mesh = distributed.build(config, world)
    module, shape = models.configured(config.model)
    model = task.adapt(models.build(module, shape), module.LAYOUT)
    layout = module.LAYOUT
    _, added = spec.adapt(model, module, shape, config.lora, bool(task.num_labels))
    num_params, flops = count_model(model, layout, shape)
    names = [name for name, _ in model.named_parameters()]
    own = [name for name in names if name not in added]
    quantize.take_out(model, layout, config.lora.base_dtype)
    init_weights.plan(own, module.initial(shape), layout, len(getattr(model, layout.layers)))
    hidden = pipeline_parallel._hidden_size(model, layout) if mesh.size("pp") > 1 else 0
    runner = distributed.parallelize(model, layout, mesh, config, task.num_outputs(shape))
    held = tuple(_modules_of(part, layout) for part in runner.parts)
    with fake_backend.materialized(runner):
        # not runner.parameters(): a rank with two stages holds what they share twice
        low_bits = sum(quantize.count(part, config) for part in runner.parts)
        parameters = [parameter for part in runner.parts for parameter in part.parameters()]
        optimizer = optim.build(runner.optimizer_parameters().items(), config.optimizer, names)
        states = optim.state_tensors(optimizer, runner.optimizer_parameters().items())
        bytes_of_parameters = _local_bytes(parameters)
        bytes_of_states = _local_bytes(states.values())
        accumulated = _accumulated_bytes(runner.parts, mesh, config)
        bytes_of_gradients = max(_gradient_bytes(runner.parts, layout, mesh, config), accumulated)
        del optimizer, states
        traced = fake_backend.trace(runner, layout, mesh, config, _micro_batch(config, task.sequences_per_row), hidden)
    frozen = tuple(
        _frozen(name, one, mesh, _micro_batch(config, task.sequences_per_row))
        for name, one in reference_models.frozen_configs(task, config).items()
    )
    place = {axis: mesh.rank(axis) for axis in mesh.sizes}
    batch = tuple(describe_model(config, mesh, num_params))
    states_bytes = (bytes_of_parameters, bytes_of_gradients, bytes_of_states)
    return DryRun(
        mesh.sizes,
        place,
        batch,
        num_params,
        flops(config.training.seq_len),
        held,
        *states_bytes,
        traced,
        frozen,
        low_bits,
        bool(accumulated),
    )


def _frozen(name: str, config: Config, mesh: distributed.Mesh, batch: data.Batch) -> FrozenModel:
    task = tasks.open_task(config)
    module, shape = models.configured(config.model)
    model = task.adapt(models.build(module, shape), module.LAYOUT)
    runner = distributed.parallelize(model, module.LAYOUT, mesh, config, task.num_outputs(shape))
    with fake_backend.materialized(runner):
        weight_bytes = _local_bytes(runner.parameters().values())
        (part,) = runner.parts
        part.eval().requires_grad_(False)
        return FrozenModel(
            name,
            config.training.dtype,
            weight_bytes,
            fake_backend.trace_frozen(part, module.LAYOUT, mesh, config, batch),
        )


def report(run: DryRun, config: Config) -> list[str]:
    """The lines that tell what was built."""
    size = math.prod(run.sizes.values())
    tokens = derived.global_batch_size(config, size) * config.training.seq_len
    epochs = config.training.epochs
    steps = config.training.steps
    length = f"{steps} steps, {format_count(steps * tokens)} tokens"
    if epochs is not None:
        length = f"{epochs} epochs; how many steps they are depends on the data, which are not read"
    lines = [
        *run.batch,
        f"length: {length}",
        f"compute: {run.flops_per_token * tokens:.3g} FLOPs per step, "
        f"{run.flops_per_token * tokens / size:.3g} per rank (6 N + 12 L H head_dim T per token)",
        describe_precision(config),
        "",
        f"  {'mesh axis':<13}{'ranks':>6}{'this rank':>11}",
        *(f"  {axis:<13}{ranks:>6}{run.place[axis]:>11}" for axis, ranks in run.sizes.items()),
        "",
        *_stage_lines(run, config),
        *_memory_table(run, config),
    ]
    return lines


def _stage_lines(run: DryRun, config: Config) -> list[str]:
    if run.sizes["pp"] == 1:
        return []
    p = config.parallelism
    rows = config.training.local_batch_size * derived.accumulation_steps(config, math.prod(run.sizes.values()))
    name = stages.schedule_name(p.pipeline_parallel_schedule)
    schedule = (
        f"pipeline: {name}, {rows // p.pipeline_parallel_microbatch_size} micro-batches of "
        f"{p.pipeline_parallel_microbatch_size}, at most {run.traced.most_in_flight} in flight here; nothing was sent"
    )
    return [schedule, *(f"  stage of this rank: {stage}" for stage in run.stages), ""]


def _memory_table(run: DryRun, config: Config) -> list[str]:
    traced = run.traced
    stored = config.training.dtype
    rows = [
        ("parameters", run.parameter_bytes, f"{stored}; counted over the rank's shards"),
        ("gradients", run.gradient_bytes, _of_gradients(run, config)),
        ("optimizer state", run.optimizer_bytes, f"{config.optimizer.name}; counted over the rank's shards"),
    ]
    if run.low_bits_bytes:
        rows.insert(1, ("in low bits", run.low_bits_bytes, f"{config.lora.base_dtype}; frozen, its layers whole"))
    if traced.not_traced:
        end = [f"  activations: not traced ({traced.not_traced}); the sum is without them"]
    else:
        how = f"all {traced.layers} layers traced, with the kernels of the CPU"
        if traced.layers_traced != traced.layers:
            how = (
                f"{traced.layers_traced} of {traced.layers} layers traced, with the kernels of the CPU; "
                "the others counted as equal to the last traced of their kind"
            )
        rows += [
            ("activations", traced.activations_bytes, f"most at once; {how}"),
            ("FSDP buffers", traced.gathered_bytes, "most at once; parameters gathered, gradients on their way"),
        ]
        end = []
    for one in run.frozen:
        rows.append((one.name, one.weight_bytes, f"{one.dtype}, frozen; counted over the rank's shards"))
        if one.traced.not_traced:
            end.append(f"  pass of the {one.name}: not traced ({one.traced.not_traced}); the sum is without it")
        else:
            size = one.traced.activations_bytes + one.traced.gathered_bytes
            rows.append(("its pass", size, "most at once; forward alone, with its logits and FSDP buffers"))
    rows.append(("sum", run.total_bytes, "upper bound; the allocator and the update need some more"))
    table = [f"  {name:<16}{format_bytes(size):>11}  {remark}" for name, size, remark in rows]
    return ["  memory of this rank", *table, *end]


def _of_gradients(run: DryRun, config: Config) -> str:
    if run.accumulates:
        return f"{config.training.mixed_precision_reduce}; whole until the last micro-batch's backward reduces them"
    if config.optimizer.early_step_in_backward:
        return f"{config.training.dtype}; most at once, the update in backward frees them"
    return f"{config.training.dtype}; counted over the rank's shards"


def _modules_of(part: nn.Module, layout: Any) -> str:
    layers = list(getattr(part, layout.layers))
    names = [name for name in layout.first if not isinstance(getattr(part, name), nn.Identity)]
    if layers:
        names.append(
            f"{layout.layers}.{layers[0]} to {layers[-1]}" if len(layers) > 1 else f"{layout.layers}.{layers[0]}"
        )
    return ", ".join(names + [name for name in layout.last if not isinstance(getattr(part, name), nn.Identity)])


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


def _accumulated_bytes(parts: Sequence[nn.Module], mesh: distributed.Mesh, config: Config) -> int:
    """Bytes of unsharded gradients, in which FSDP accumulates several micro-batches in the dtype of the reduction."""
    p = config.parallelism
    training = config.training
    rows = training.local_batch_size * derived.accumulation_steps(config, mesh.device_mesh.size())
    # The gradients of a single micro-batch are reduced at once, so nothing accumulates
    at_once = p.pipeline_parallel_microbatch_size if mesh.size("pp") > 1 else training.local_batch_size
    if rows <= at_once or not fsdp.is_needed(parts, mesh, config):
        return 0
    numel = 0
    # Not the runner's parameters: a rank with two stages stores shared parameters twice, so count them in both
    for parameter in (one for part in parts for one in part.parameters() if one.requires_grad):
        split = 1
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            for name, size, placement in zip(names, parameter.device_mesh.shape, parameter.placements, strict=True):
                split *= size if name in ("tp", "ep") and placement.is_shard() else 1
        numel += parameter.numel() // split
    return numel * getattr(torch, training.mixed_precision_reduce).itemsize


def _gradient_bytes(parts: Sequence[nn.Module], layout: Any, mesh: distributed.Mesh, config: Config) -> int:
    """What gradients take at once: those of all parameters, or what is there before an update in backward frees it."""
    trained = [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]
    if not config.optimizer.early_step_in_backward:
        return _local_bytes(trained)
    if not fsdp.is_needed(parts, mesh, config):
        return max(_local_bytes([parameter]) for parameter in trained)
    # an update in backward frees the gradients of a unit of FSDP before those of the next are there
    units = [
        nn.ModuleList(getattr(part, name) for name in names) for part in parts for names in (layout.first, layout.last)
    ]
    units += [layer for part in parts for layer in getattr(part, layout.layers).values()]
    return max(_local_bytes(p for p in unit.parameters() if p.requires_grad) for unit in units)


def _micro_batch(config: Config, sequences_per_row: int = 1) -> data.Batch:
    """One forward and backward pass of this rank, before it is cut over context-parallel ranks; shapes alone count."""
    p = config.parallelism
    training = config.training
    rows = p.pipeline_parallel_microbatch_size if p.pipeline_parallel_degree > 1 else training.local_batch_size
    rows *= sequences_per_row
    column = torch.zeros(rows, training.seq_len, dtype=torch.int64)
    return data.Batch(column, column, column, column[:, 0])


def _without_compiler(config: Config) -> Config:
    """The configuration that can run on tensors without memory; ``_left_out`` says what is missing in it."""
    recompute = config.activation_checkpoint
    if recompute.mode == "memory_budget":
        recompute = replace(recompute, mode="none")
    return replace(
        config,
        compile=replace(config.compile, enable=False),
        parallelism=replace(config.parallelism, enable_async_tensor_parallel=False),
        activation_checkpoint=recompute,
    )


def _left_out(config: Config) -> list[str]:
    recompute = config.activation_checkpoint
    notes = {
        "compile.enable=true: nothing is compiled here; activations are those of the uncompiled model": (
            config.compile.enable
        ),
        "parallelism.enable_async_tensor_parallel=true: nothing is overlapped here": (
            config.parallelism.enable_async_tensor_parallel
        ),
        'activation_checkpoint.mode="memory_budget": the compiler would decide; here nothing is recomputed': (
            recompute.mode == "memory_budget"
        ),
        "activation_checkpoint.cpu_offload=true: offloaded activations are counted as device memory": (
            recompute.cpu_offload
        ),
        "training.enable_cpu_offload=true: parameters, gradients and optimizer state are in host memory": (
            config.training.enable_cpu_offload
        ),
    }
    return [*derived.notes_on_rows(config), *(note for note, applies in notes.items() if applies)]
