"""One rank of a world that does not exist: a process group that sends nothing, and tensors that have no memory.

The model is cut and sharded by the real ``parallelize``; forward and backward of one micro-batch then run with shapes
alone. Layers that are alike need not all run: two of each kind do, and the others count as the second of their kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from shardtrain.layout import Draw, Layout
from shardtrain.parallel import context, pipeline
from shardtrain.parallel.context import Batch
from shardtrain.parallel.live_memory import LiveMemory
from shardtrain.parallel.mesh import Mesh
from shardtrain.parallel.runner import Runner
from shardtrain.parallel.world import World

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


@dataclass
class _Recorder:
    """Bytes that each traced layer left behind, by kind of layer; the last one traced of a kind speaks for it."""

    memory: LiveMemory
    left: dict[Any, tuple[int, int]] = field(default_factory=dict)
    kept: int = 0

    def watch(self, layer: nn.Module, kind: Any) -> None:
        before: list[tuple[int, int]] = []

        def enter(*_: Any) -> None:
            before.append((self.memory.activations, self.memory.gathered))

        def leave(*_: Any) -> None:
            activations, gathered = before.pop()
            self.left[kind] = (self.memory.activations - activations, max(0, self.memory.gathered - gathered))

        layer.register_forward_pre_hook(enter, prepend=True)  # before FSDP's own hook, which gathers
        layer.register_forward_hook(leave)


@contextmanager
def join(rank: int, size: int) -> Iterator[World]:
    """Be one rank of ``size`` in a process group whose collectives do nothing; leave it at the end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield World(rank, size, 0, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@contextmanager
def materialized(runner: Runner) -> Iterator[None]:
    """Give the runner's parameters shapes on the CPU without memory; all work on them belongs inside."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        runner.materialize({name: Draw("zeros") for name in runner.parameters()}, seed=0)
        yield


def trace(runner: Runner, layout: Layout, mesh: Mesh, config: Config, batch: Batch, hidden: int) -> Traced:
    """Run forward and backward of one micro-batch with shapes alone, inside ``materialized``; can be called once.

    ``batch`` is a whole one, before it is cut over context-parallel ranks; ``hidden`` the features of the residual
    stream. No stage sends to another: each gets an input of the right shape. Where the shapes of a model depend on its
    data, as with experts, nothing can be traced, and the answer says so.
    """
    try:
        if isinstance(runner, pipeline.PipelineRunner):
            return _trace_stages(runner, layout, mesh, config, batch, hidden)
        with _watched(runner.parts[0], layout) as (memory, done):
            runner.forward_backward([batch], torch.ones(()))
        del memory
        return Traced(done.most, done.gathered, done.layers_traced, done.layers)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
        return Traced(not_traced=f"shapes depend on data, in {getattr(error, 'func', error)}")


def _trace_stages(
    runner: pipeline.PipelineRunner, layout: Layout, mesh: Mesh, config: Config, batch: Batch, hidden: int
) -> Traced:
    passes: dict[int, _Pass] = {}
    tokens_Bt, targets_Bt, positions_Bt = context.cut(batch, mesh, config)
    for part, index in zip(runner.parts, runner._indices, strict=True):
        template = pipeline._input(index, hidden, mesh, config)
        inputs = tokens_Bt if index == 0 else torch.empty_like(template, device=mesh.device, requires_grad=True)
        with _watched(part, layout) as (memory, done):
            output = part(inputs, **{runner._positions_name: positions_Bt})
            if index == runner._last:
                output = runner._loss(output, targets_Bt)
            done.kept = memory.activations
            output.backward(torch.empty_like(output))
            del output
        passes[index] = done
    order = _actions(runner._schedule, mesh.rank(pipeline.AXIS))
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
    kinds = {name: _kind(layer) for name, layer in layers.items()}
    done = _Pass(layers=len(layers))
    dropped = []
    for name, kind in list(kinds.items()):
        earlier = [other for other in layers if kinds[other] == kind]
        if earlier.index(name) >= LAYERS_OF_A_KIND:
            dropped.append(kind)
            del layers[name]
    done.layers_traced = len(layers)
    memory = LiveMemory(part.parameters())
    recorder = _Recorder(memory)
    for name, layer in layers.items():
        recorder.watch(layer, kinds[name])
    with memory:
        yield memory, done
    activations = sum(recorder.left[kind][0] for kind in dropped)
    done.kept += activations
    done.most = memory.most_activations + activations
    done.gathered = memory.most_gathered + sum(recorder.left[kind][1] for kind in dropped)


def _kind(layer: nn.Module) -> Any:
    """What makes layers alike: their class, the shapes of their weights, and whether they are recomputed."""
    recomputed = "forward" in vars(layer)
    modules = tuple(type(module).__name__ for module in layer.modules())
    return recomputed, modules, tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


def _actions(schedule: Any, rank: int) -> list[Any]:
    """Computations of a pipeline rank in the order of a step, as PyTorch's schedules list them."""
    order = getattr(schedule, "pipeline_order", None) or getattr(schedule, "pipeline_order_with_comms", None) or {}
    return [part for action in order.get(rank, []) if action for part in (action.sub_actions or (action,))]


def _most_kept(kept_by_stage: dict[int, int], actions: Sequence[Any]) -> tuple[int, int]:
    """Bytes and micro-batches kept between forward and backward when most bytes are; weights' backward frees them."""
    now = most = flying = most_flying = 0
    split = {a.stage_index for a in actions if a.computation_type.value == "W"}
    for action in actions:
        word, stage = action.computation_type.value, action.stage_index
        frees = word == "W" or (word == "B" and stage not in split) or (word == "B" and stage in split)
        change = (word == "F") - frees
        now, flying = now + change * kept_by_stage.get(stage, 0), flying + change
        most, most_flying = max(most, now), max(most_flying, flying)
    return (most, most_flying) if actions else (sum(kept_by_stage.values()), 1)


def local_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes that this rank holds of tensors, distributed or not."""
    return sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in tensors)
