"""Simulate one rank of a distributed run, to count its memory.

The process group sends nothing, and tensors have no memory. The real ``parallelize`` cuts and shards the
model. Forward and backward of one micro-batch then run on fake tensors. To save time, only two layers of
each kind run. All others are assumed to use as much memory as the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from shardtrain.config.schema import Config
from shardtrain.distributed import compute_copies, expert_parallel, pipeline_parallel
from shardtrain.distributed.activation_memory import LiveMemory
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.cores import TokenBatch
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.process_group import World
from shardtrain.distributed.real_indices import RealIndices
from shardtrain.distributed.runner import Runner
from shardtrain.distributed.task_runner import TaskRunner
from shardtrain.distributed.tensor_parallel.hf_styles import OwnPairs
from shardtrain.layout import Draw, Layout
from shardtrain.ops import cross_entropy

LAYERS_OF_A_KIND = 2
"""Number of layers of each kind that run.

The first layer may allocate memory that all layers share. The second layer allocates only its own memory.
"""
_UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


@dataclass(frozen=True)
class Traced:
    """Memory that this rank needs for forward and backward, as counted by ``trace``.

    Attributes:
        activations_bytes: peak bytes of everything except FSDP's buffers. With a pipeline, this includes
            all micro-batches that are in flight at the same time.
        gathered_bytes: peak bytes of FSDP's buffers: gathered parameters, and gradients before their
            reduction.
        layers_traced: number of layers that ran.
        layers: number of layers of this rank.
        most_in_flight: peak number of micro-batches that have run forward but not yet backward.
        not_traced: the reason if the model could not be traced, else empty.
    """

    activations_bytes: int = 0
    gathered_bytes: int = 0
    layers_traced: int = 0
    layers: int = 0
    most_in_flight: int = 1
    not_traced: str = ""


@dataclass
class _Pass:
    """Bytes of one forward and backward pass.

    Attributes:
        kept: bytes that stay allocated between forward and backward.
        most: peak bytes of everything except FSDP's buffers.
        gathered: peak bytes of FSDP's buffers.
        layers_traced: number of layers that ran.
        layers: number of layers.
    """

    kept: int = 0
    most: int = 0
    gathered: int = 0
    layers_traced: int = 0
    layers: int = 0


@dataclass
class _AbsentLayers:
    """Layers of one kind that do not run: their number, and the bytes that they would keep together."""

    count: int = 0
    activations: int = 0
    gathered: int = 0


class _TracedLayer:
    """Hooks on a traced layer that add the memory of the absent layers of its kind, which do not run.

    Each absent layer counts as much as the last traced layer. Their memory is added when the forward of the
    last traced layer ends, and removed when the backward of the first traced layer starts.
    """

    def __init__(
        self,
        memory: LiveMemory,
        part: nn.Module,
        layer: nn.Module,
        is_first: bool,
        is_last: bool,
        absent: _AbsentLayers,
    ) -> None:
        self._memory = memory
        self._part = part
        self._is_first = is_first
        self._is_last = is_last
        self._absent = absent
        # Prepend this hook, because it must run before FSDP's hook gathers the weights.
        layer.register_forward_pre_hook(self._enter, prepend=True)
        layer.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._activations_before = self._memory.activations
        self._gathered_before = self._memory.gathered

    def _leave(self, layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        if self._is_last:
            activations = self._memory.activations - self._activations_before
            # FSDP gathers the layer inside its forward. Copies in the compute dtype were made before the
            # pass.
            gathered = self._memory.gathered - self._gathered_before
            gathered += compute_copies.held_bytes(self._part, layer)
            self._absent.activations = self._absent.count * max(0, activations)
            self._absent.gathered = self._absent.count * max(0, gathered)
            self._add_absent(1)
        if self._is_first and output.requires_grad:
            output.register_hook(self._start_backward)

    def _start_backward(self, _: Tensor) -> None:
        self._add_absent(-1)

    def _add_absent(self, sign: int) -> None:
        self._memory.absent_activations += sign * self._absent.activations
        self._memory.absent_gathered += sign * self._absent.gathered


@contextmanager
def join(rank: int, size: int) -> Iterator[World]:
    """Context manager: make this process rank ``rank`` of ``size``, with collectives that do nothing."""
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield World(rank, size, 0, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        # DTensor caches results by mesh, and compares meshes by equality. An equal mesh of the next
        # simulated run would get results that refer to the process groups destroyed here.
        debug._clear_sharding_prop_cache()


@contextmanager
def materialized(runner: Runner) -> Iterator[None]:
    """Context manager: create the runner's parameters as fake CPU tensors. Use the runner only inside it."""
    with FakeTensorMode(allow_non_fake_inputs=True), cross_entropy.few_chunks():
        runner.materialize({name: Draw("zeros") for name in runner.parameters()}, seed=0)
        yield


def trace(runner: Runner, layout: Layout, mesh: Mesh, config: Config, batch: TokenBatch) -> Traced:
    """Run forward and backward of one micro-batch on fake tensors, inside ``materialized``.

    Call it only once per runner, because it removes layers. Pipeline stages do not communicate. Each stage
    receives an input of the right shape. If the shapes of a model depend on data, it cannot be traced. The
    result then contains the reason.

    Args:
        runner: the runner. Most of its layers are removed.
        batch: a batch of full sequences, before it is cut over context-parallel ranks.
    """
    try:
        if isinstance(runner, pipeline_parallel.PipelineRunner):
            return _trace_stages(runner, layout, mesh, config, batch)
        has_real_batch = isinstance(runner, TaskRunner)
        indices = RealIndices() if has_real_batch else nullcontext()
        with _watched(runner.parts[0], layout) as (_, done), indices:
            runner.forward_backward([batch], torch.ones(()))
        return Traced(done.most, done.gathered, done.layers_traced, done.layers)
    except _UNTRACEABLE as error:
        return _not_traced(error)


def trace_frozen(
    part: nn.Module, layout: Layout, mesh: Mesh, config: Config, batch: TokenBatch
) -> Traced:
    """Like ``trace``, for the forward pass (without gradients) of a frozen model that has no pipeline."""
    try:
        tokens_Bt, _, positions_Bt = context_parallel.cut(batch, mesh, config)
        with _watched(part, layout) as (_, done), torch.no_grad():
            part(tokens_Bt, positions_Bt)
        return Traced(done.most, done.gathered, done.layers_traced, done.layers)
    except _UNTRACEABLE as error:
        return _not_traced(error)


def _not_traced(error: Exception) -> Traced:
    operation = getattr(error, "func", error)
    return Traced(not_traced=f"shapes depend on data, in {operation}")


def _trace_stages(
    runner: pipeline_parallel.PipelineRunner,
    layout: Layout,
    mesh: Mesh,
    config: Config,
    batch: TokenBatch,
) -> Traced:
    """Trace each stage of this rank, then combine their memory according to the pipeline schedule."""
    passes: dict[int, _Pass] = {}
    expert_parallel.before_step(runner.parts, torch.ones(()))
    tokens_Bt, targets_Bt, positions_Bt = context_parallel.cut(batch, mesh, config)
    # Run one micro-batch forward and backward through each stage.
    for part, index in zip(runner.parts, runner._indices, strict=True):
        inputs = tokens_Bt
        if index > 0:
            shape = runner.output_shape(index - 1, *tokens_Bt.shape)
            inputs = torch.empty(
                shape, dtype=runner.activation_dtype, device=mesh.device, requires_grad=True
            )
        with _watched(part, layout) as (memory, done):
            output = part(inputs, **{runner._positions_name: positions_Bt})
            if index == runner._last:
                output = runner._loss(output, targets_Bt)
            # This memory stays allocated between forward and backward, while other micro-batches run.
            done.kept = memory.activations + memory.absent_activations
            output.backward(torch.empty_like(output))
            del output
        passes[index] = done

    # The schedule determines how many micro-batches are in flight at the same time.
    kept_by_stage = {index: done.kept for index, done in passes.items()}
    kept, in_flight = _most_kept(kept_by_stage, _actions_of_step(runner, mesh))
    # Only one pass runs at a time, so add the temporary memory of the largest pass only.
    temporary = max(done.most - done.kept for done in passes.values())
    return Traced(
        activations_bytes=kept + temporary,
        gathered_bytes=sum(done.gathered for done in passes.values()),
        layers_traced=sum(done.layers_traced for done in passes.values()),
        layers=sum(done.layers for done in passes.values()),
        most_in_flight=in_flight,
    )


def _actions_of_step(runner: pipeline_parallel.PipelineRunner, mesh: Mesh) -> list[Any]:
    """Return this rank's computations in the order of a step, as PyTorch's schedule lists them.

    Empty for schedules without such a list.
    """
    # The attribute depends on the class of the schedule.
    schedule: Any = runner._schedule
    by_rank = (
        getattr(schedule, "pipeline_order", None)
        or getattr(schedule, "pipeline_order_with_comms", None)
        or {}
    )
    actions: list[Any] = []
    for action in by_rank.get(mesh.rank(pipeline_parallel.AXIS), []):
        if action:
            actions.extend(action.sub_actions or (action,))
    return actions


@contextmanager
def _watched(part: nn.Module, layout: Layout) -> Iterator[tuple[LiveMemory, _Pass]]:
    """Context manager that counts the memory of passes through ``part``.

    Keeps at most two layers of each kind in ``part``, and removes the others. At its end, it stores the peaks
    in the yielded ``_Pass``. They include the memory of the removed layers.
    """
    layers: nn.ModuleDict = getattr(part, layout.layers)
    # Group the layers: all layers of one kind need the same memory.
    by_kind: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        by_kind.setdefault(_kind(layer), []).append(name)
    done = _Pass(layers=len(layers))
    memory = LiveMemory(part.parameters())
    for names in by_kind.values():
        # Layers can only be removed from a ModuleDict. For other containers, run all layers.
        num_traced = LAYERS_OF_A_KIND if isinstance(layers, nn.ModuleDict) else len(names)
        traced_names = names[:num_traced]
        absent_names = names[num_traced:]
        if absent_names:
            absent = _AbsentLayers(len(absent_names))
            for name in traced_names:
                is_first = name == traced_names[0]
                is_last = name == traced_names[-1]
                _TracedLayer(memory, part, layers[name], is_first, is_last, absent)
        for name in absent_names:
            del layers[name]
    done.layers_traced = len(layers)
    # The number of rows per expert depends on data, which do not exist here.
    for module in part.modules():
        if isinstance(module, expert_parallel.AllToAllDispatch):
            _assume_even_load(module, memory)
        elif isinstance(module, OwnPairs):
            module.assumes_even_load = True
    with memory:
        yield memory, done
    done.most = memory.most_activations
    done.gathered = memory.most_gathered


def _assume_even_load(dispatch: expert_parallel.AllToAllDispatch, memory: LiveMemory) -> None:
    """Assume that every rank sends the same number of rows to every other rank.

    The real numbers depend on the data, and fake tensors contain none.
    """

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        memory.scalar = inputs[1].size(0) // dispatch._group.size()

    def leave(*_: Any) -> None:
        memory.scalar = None

    dispatch.register_forward_pre_hook(enter)
    dispatch.register_forward_hook(leave)


def _kind(layer: nn.Module) -> Any:
    """Return a key that is equal for layers with the same recomputation, module classes and weight shapes."""
    is_recomputed = "forward" in vars(layer)
    classes = tuple(type(module).__name__ for module in layer.modules())
    shapes = []
    for name, parameter in layer.named_parameters():
        shapes.append((name, tuple(parameter.shape)))
    return is_recomputed, classes, tuple(shapes)


def _most_kept(kept_by_stage: dict[int, int], actions: Sequence[Any]) -> tuple[int, int]:
    """Return two peaks during a step: bytes kept for backward, and micro-batches in flight.

    Without a list of actions, assume that each stage has one micro-batch in flight.
    """
    if not actions:
        return sum(kept_by_stage.values()), 1
    bytes_kept = most_bytes = in_flight = most_in_flight = 0
    for action in actions:
        kind = action.computation_type.value
        # A forward pass ("F") keeps its activations until its full backward ("B") or its backward for the
        # weights ("W") has ended. The backward for only the inputs ("I") frees nothing.
        change = 0
        if kind == "F":
            change = 1
        elif kind in ("B", "W"):
            change = -1
        bytes_kept += change * kept_by_stage.get(action.stage_index, 0)
        in_flight += change
        most_bytes = max(most_bytes, bytes_kept)
        most_in_flight = max(most_in_flight, in_flight)
    return most_bytes, most_in_flight
