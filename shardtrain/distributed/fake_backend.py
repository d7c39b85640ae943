"""One rank of a world that does not exist: a process group that sends nothing, and tensors that have no memory.

The model is cut and sharded by the real ``parallelize``; forward and backward of one micro-batch then run with shapes
alone. Layers that are alike need not all run: two of each kind do, and the others count as the second of their kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from shardtrain.distributed.context_parallel.cores import Batch
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.process_group import World
from shardtrain.distributed.runner import Runner
from shardtrain.layout import Draw, Layout
from shardtrain.ops import cross_entropy

LAYERS_OF_A_KIND = 2
"""Layers traced of each kind: the first may cost what all share, the second costs what every further one does."""


@dataclass(frozen=True)
class Traced:
    """What forward and backward of one micro-batch keep alive on this rank, in bytes; see ``trace``.

    ``activations`` is the most at any time, with the micro-batches that a pipeline has in flight; ``gathered`` the most
    that FSDP holds of gathered parameters and of gradients on their way. ``not_traced`` says why there is no number.
    """

    activations_bytes: int = 0
    gathered_bytes: int = 0
    layers_traced: int = 0
    layers: int = 0
    most_in_flight: int = 1
    not_traced: str = ""


@dataclass
class _Pass:
    """One forward and backward: bytes kept from forward to backward, and the most at any time."""

    kept: int = 0
    most: int = 0
    gathered: int = 0
    layers_traced: int = 0
    layers: int = 0


class _Layer:
    """A traced layer of a kind; the second of its kind speaks for the ``absent`` ones that were left out.

    They are alive from the end of its forward to the start of the first one's backward.
    """

    def __init__(
        self,
        memory: LiveMemory,
        part: nn.Module,
        layer: nn.Module,
        is_first: bool,
        is_last: bool,
        standing: _Standing,
    ) -> None:
        self._memory = memory
        self._part = part
        self._is_first = is_first
        self._is_last = is_last
        self._standing = standing
        layer.register_forward_pre_hook(self._enter, prepend=True)  # before FSDP's own hook, which gathers
        layer.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._before = self._memory.activations, self._memory.gathered

    def _leave(self, layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        if self._is_last:
            activations = self._memory.activations - self._before[0]
            # FSDP has gathered the layer in between; copies were made before the pass
            gathered = self._memory.gathered - self._before[1] + compute_copies.held_bytes(self._part, layer)
            self._standing.activations = self._standing.layers * max(0, activations)
            self._standing.gathered = self._standing.layers * max(0, gathered)
            self._add(1)
        if self._is_first and output.requires_grad:
            output.register_hook(lambda _: self._add(-1))

    def _add(self, sign: int) -> None:
        self._memory.absent_activations += sign * self._standing.activations
        self._memory.absent_gathered += sign * self._standing.gathered


@dataclass
class _Standing:
    """Layers of a kind that were left out, and the bytes that they would keep together."""

    layers: int = 0
    activations: int = 0
    gathered: int = 0


@contextmanager
def join(rank: int, size: int) -> Iterator[World]:
    """Be one rank of ``size`` in a process group whose collectives do nothing; leave it at the end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield World(rank, size, 0, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Make DTensor forget results on meshes that equal the next world's, and whose process groups are gone."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


@contextmanager
def materialized(runner: Runner) -> Iterator[None]:
    """Give the runner's parameters shapes on the CPU without memory; all work on them belongs inside."""
    with FakeTensorMode(allow_non_fake_inputs=True), cross_entropy.few_chunks():
        runner.materialize({name: Draw("zeros") for name in runner.parameters()}, seed=0)
        yield


def trace(runner: Runner, layout: Layout, mesh: Mesh, config: Config, batch: Batch, hidden: int) -> Traced:
    """Run forward and backward of one micro-batch with shapes alone, inside ``materialized``; can be called once.

    ``batch`` is a whole one, before it is cut over context-parallel ranks; ``hidden`` the features of the residual
    stream. No stage sends to another: each gets an input of the right shape. Where the shapes of a model depend on its
    data, as with experts, nothing can be traced, and the answer says so.
    """
    try:
        if isinstance(runner, pipeline_parallel.PipelineRunner):
            return _trace_stages(runner, layout, mesh, config, batch, hidden)
        with _watched(runner.parts[0], layout) as (_, done):
            runner.forward_backward([batch], torch.ones(()))
        return Traced(done.most, done.gathered, done.layers_traced, done.layers)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        return Traced(not_traced=f"shapes depend on data, in {getattr(error, 'func', error)}")


def trace_frozen(part: nn.Module, layout: Layout, mesh: Mesh, config: Config, batch: Batch) -> Traced:
    """The forward pass alone of a whole model that learns nothing: as ``trace``, without gradients."""
    try:
        tokens_Bt, _, positions_Bt = context_parallel.cut(batch, mesh, config)
        with _watched(part, layout) as (_, done), torch.no_grad():
            part(tokens_Bt, positions_Bt)
        return Traced(done.most, done.gathered, done.layers_traced, done.layers)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        return Traced(not_traced=f"shapes depend on data, in {getattr(error, 'func', error)}")


def _trace_stages(
    runner: pipeline_parallel.PipelineRunner, layout: Layout, mesh: Mesh, config: Config, batch: Batch, hidden: int
) -> Traced:
    passes: dict[int, _Pass] = {}
    expert_parallel.before_step(runner.parts, torch.ones(()))
    tokens_Bt, targets_Bt, positions_Bt = context_parallel.cut(batch, mesh, config)
    for part, index in zip(runner.parts, runner._indices, strict=True):
        template = pipeline_parallel._input(index, hidden, mesh, config)
        inputs = tokens_Bt if index == 0 else torch.empty_like(template, device=mesh.device, requires_grad=True)
        with _watched(part, layout) as (memory, done):
            output = part(inputs, **{runner._positions_name: positions_Bt})
            if index == runner._last:
                output = runner._loss(output, targets_Bt)
            # what a micro-batch holds between its forward and its backward pass, while others are on their way
            done.kept = memory.activations + memory.absent_activations
            output.backward(torch.empty_like(output))
            del output
        passes[index] = done
    # computations of a pipeline rank in the order of a step, as PyTorch's schedules list them
    rank = mesh.rank(pipeline_parallel.AXIS)
    schedule: Any = runner._schedule
    by_rank = getattr(schedule, "pipeline_order", None) or getattr(schedule, "pipeline_order_with_comms", None) or {}
    order = [part for action in by_rank.get(rank, []) if action for part in (action.sub_actions or (action,))]
    kept, in_flight = _most_kept({index: done.kept for index, done in passes.items()}, order)
    return Traced(
        kept + max(done.most - done.kept for done in passes.values()),
        sum(done.gathered for done in passes.values()),
        sum(done.layers_traced for done in passes.values()),
        sum(done.layers for done in passes.values()),
        in_flight,
    )


@contextmanager
def _watched(part: nn.Module, layout: Layout) -> Iterator[tuple[LiveMemory, _Pass]]:
    """Keep two layers of each kind in ``part``, count memory, and add at the end what the other layers would keep."""
    layers: nn.ModuleDict = getattr(part, layout.layers)
    # layers of one kind keep equal bytes, so two of each are traced, whatever the depth of the model
    by_kind: dict[Any, list[str]] = {}
    for name, layer in layers.items():
        by_kind.setdefault(_kind(layer), []).append(name)
    done = _Pass(layers=len(layers))
    memory = LiveMemory(part.parameters())
    for names in by_kind.values():
        most = LAYERS_OF_A_KIND if isinstance(layers, nn.ModuleDict) else len(names)  # else none can be left out
        traced = names[:most]
        absent = names[most:]
        standing = _Standing(len(absent))
        for name in traced if absent else ():
            _Layer(memory, part, layers[name], name == traced[0], name == traced[-1], standing)
        for name in absent:
            del layers[name]
    done.layers_traced = len(layers)
    for module in part.modules():
        # how many rows travel is a number of the data; without memory there is none to read
        if isinstance(module, expert_parallel.AllToAllDispatch):
            _deal_evenly(module, memory)
    with memory:
        yield memory, done
    done.most = memory.most_activations
    done.gathered = memory.most_gathered


def _deal_evenly(dispatch: expert_parallel.AllToAllDispatch, memory: LiveMemory) -> None:
    """Let every rank send as many tokens to each other one: how many it would be is in data, and there are none."""

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        memory.scalar = inputs[1].size(0) // dispatch._group.size()

    def leave(*_: Any) -> None:
        memory.scalar = None

    dispatch.register_forward_pre_hook(enter)
    dispatch.register_forward_hook(leave)


def _kind(layer: nn.Module) -> Any:
    """What makes layers alike: their class, the shapes of their weights, and whether they are recomputed."""
    recomputed = "forward" in vars(layer)
    modules = tuple(type(module).__name__ for module in layer.modules())
    return recomputed, modules, tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


def _most_kept(kept_by_stage: dict[int, int], actions: Sequence[Any]) -> tuple[int, int]:
    """Bytes and micro-batches kept between forward and backward when most bytes are; weights' backward frees them."""
    now = most = flying = most_flying = 0
    for action in actions:
        word = action.computation_type.value
        stage = action.stage_index
        # a forward pass keeps its activations until its backward pass, or that of its weights, is done
        change = (word == "F") - (word in ("B", "W"))  # "I", the backward of inputs alone, frees nothing
        now += change * kept_by_stage.get(stage, 0)
        flying += change
        most = max(most, now)
        most_flying = max(most_flying, flying)
    return (most, most_flying) if actions else (sum(kept_by_stage.values()), 1)
