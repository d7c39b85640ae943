"""One rank's steps, through the trainer's own step function, and what it leaves for the comparison: one file per rank.

Each rank writes the parts of tensors that it holds and where they lie in the whole, so that nothing is communicated
for the comparison, and copies that should be equal can be compared too.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardtrain import distributed, layout, models, optim
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config import Config, derived
from shardtrain.distributed import BATCH_AXES, Mesh, Runner
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.mesh import AXES
from shardtrain.distributed.process_group import World
from shardtrain.layout import Draw, Layout
from shardtrain.lora import spec
from shardtrain.lora.linear import is_adapter
from shardtrain.ops import accelerator, init_weights
from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.ops.tied import to_empty
from shardtrain.tools.verify import dropout
from shardtrain.tools.verify.batches import SyntheticStream
from shardtrain.tools.verify.shrink import VerifyTask
from shardtrain.utils.errors import ConfigError

MAX_NORM = 0.1
"""Norm to which gradients are clipped in the last of several steps, far below that of a model at unit gain."""


def is_clipped(step: int, steps: int) -> bool:
    """Whether gradients are clipped in a step, counted from 0: in the last one, where there are others without."""
    return steps > 1 and step == steps - 1


Trainer: TypeAlias = ModuleType
"""``shardtrain.train.trainer``: the step that is verified is the trainer's own."""


@dataclass(frozen=True)
class RankRecord:
    """What a rank saw: a loss and a norm per step, its place, and its parts of tensors by kind and name.

    ``parts`` is keyed "initial/NAME", "gradient/STEP/NAME", "weights/STEP/NAME", "core/STEP/q" and so on; ``slices``
    has for each key with a name where the part lies: one (start, stop) per dimension.
    """

    rank: int
    place: Mapping[str, int]
    losses: list[float]
    norms: list[float]
    parts: Mapping[str, Tensor]
    slices: Mapping[str, tuple[slice, ...]]
    facts: Mapping[str, Any]


def device_of(config: Config, rank: int) -> torch.device:
    """CPU, unless the configuration names an accelerator."""
    kind = config.training.device
    return torch.device("cpu") if kind in ("auto", "cpu") else accelerator.of_rank(kind, rank)


def model_of(config: Config) -> tuple[Any, Any, nn.Module]:
    """The model's file, its shape, and the model on the meta device, its layout proved."""
    module, shape = models.configured(config.model)
    return module, shape, models.build(module, shape)


def draws_of(module: Any, shape: Any, model: nn.Module, unit_gain: bool) -> dict[str, Draw]:
    """How each parameter starts; with ``unit_gain`` matrices keep the size of what they map, and nothing is zero."""
    layers = len(getattr(model, module.LAYOUT.layers))
    parameters = dict(model.named_parameters())
    own = [name for name in parameters if not is_adapter(name)]
    draws = init_weights.plan(own, module.initial(shape), module.LAYOUT, layers) | spec.draws(model)
    if not unit_gain:
        return draws
    strong = {}
    for name, draw in draws.items():
        if name.endswith(".lora_b"):  # small beside the weight, as what is trained is
            draw = Draw("normal", std=0.1 * parameters[name].size(-1) ** -0.5)
        elif parameters[name].ndim > 1:
            draw = replace(draw, distribution="normal", std=max(draw.std, parameters[name].size(-1) ** -0.5))
        elif draw.distribution == "zeros":
            draw = Draw("normal", std=0.05)
        strong[name] = draw
    return strong


def run_steps(
    rank: int, num_ranks: int, trainer: Trainer, config: Config, task: VerifyTask, folder: str, shaken: bool = False
) -> None:
    """Train ``task.steps`` steps as one rank and leave its record in ``folder``; an error says where.

    ``shaken`` moves each weight to one of its two neighbours in its type before the first step.
    """
    # before the model file is imported, which may take a function of dropout by name
    dropout.switch_off()
    watch = _Watch(keep=task.unit_gain)
    try:
        _run_steps(rank, num_ranks, trainer, config, task, folder, watch, shaken)
    except ConfigError:
        raise
    except Exception as error:
        error.add_note(watch.where(config, str(error)))
        raise


def _run_steps(
    rank: int,
    num_ranks: int,
    trainer: Trainer,
    config: Config,
    task: VerifyTask,
    folder: str,
    watch: _Watch,
    shaken: bool,
) -> None:
    # The model, parallelized as the trainer does it. What is asked of the whole model is asked before: pipelining
    # leaves a rank with some of its layers.
    device = device_of(config, rank)
    world = World(rank, num_ranks, rank, device)
    mesh = distributed.build(config, world)
    module, shape, model = model_of(config)
    watch.layout = module.LAYOUT
    spec.adapt(model, module, shape, config.lora)
    names = [name for name, _ in model.named_parameters()]
    draws = draws_of(module, shape, model, task.unit_gain)
    first_layer = next(iter(getattr(model, module.LAYOUT.layers)))
    runner = distributed.parallelize(model, module.LAYOUT, mesh, config, shape.vocab_size)

    # Weights are drawn twice: as training would draw them, to compare that, and then at unit gain, since a small model
    # with its usual weights would hide what some of its parts do.
    recorder = _Recorder(runner, mesh)
    runner.materialize(draws_of(module, shape, model, unit_gain=False), config.debug.seed)
    recorder.keep("own", runner.parameters())
    if task.unit_gain:
        for name, parameter in runner.parameters().items():
            init_weights.draw_(parameter, name, draws[name], config.debug.seed)
    if shaken:
        _shake(runner.parameters(), config.debug.seed)

    # The trainer's run, with synthetic batches in place of a dataset.
    optimizer = optim.build(runner.optimizer_parameters().items(), config.optimizer, names)
    stream = SyntheticStream(
        config.debug.seed,
        config.training.seq_len,
        shape.vocab_size,
        config.training.global_batch_size,
        config.training.local_batch_size,
        mesh.rank(*BATCH_AXES),
        mesh.size(*BATCH_AXES),
    )
    num_params = sum(parameter.numel() for parameter in runner.parameters().values())
    run = trainer.Run(
        config=config,
        mesh=mesh,
        runner=runner,
        optimizer=optimizer,
        scaler=None,
        dataloader=stream,
        state=TrainState(),
        total_steps=task.steps,
        num_params=num_params,
        flops_per_token=0.0,
    )
    # Ranks whose norms differ would stop the run here; the comparison of all ranks' tensors names the cause instead.
    run.resilience.compares_norms = False

    recorder.keep("initial", runner.parameters())
    recorder.watch_core(module.LAYOUT, first_layer)
    watch.begin(runner.parts)
    # A hook before the update sees gradients as clipping leaves them; after the step they are gone.
    optimizer.register_step_pre_hook(lambda *_: recorder.keep_gradients())
    for _ in range(task.steps):
        recorder.begin_step()
        if is_clipped(recorder.step, task.steps):
            run.config = replace(config, training=replace(config.training, max_norm=MAX_NORM))
        outcome = trainer.step(run)
        watch.end()
        # The mean loss over all target tokens of the step. All ranks enter this all-reduce. The ranks of a tp group
        # hold the same sum, so it is counted once for each of them.
        total = outcome.loss_sum.detach().double().to(mesh.device).clone()
        dist.all_reduce(total)
        recorder.losses.append(float(total) / mesh.size("tp") / max(1, outcome.global_tokens))
        recorder.norms.append(float(outcome.own_grad_norm))
        recorder.keep(f"weights/{recorder.step}", runner.parameters())
        recorder.keep(f"buffers/{recorder.step}", runner.buffers())
    recorder.write(Path(folder) / f"rank-{rank}.safetensors", rank, config, watch)


@torch.no_grad()
def _shake(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Move each number to the next above or below, as chance has it: no step of rounding is smaller."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        local = local_tensor(parameter)
        up = torch.rand(local.shape, generator=generator) < 0.5
        local.copy_(torch.nextafter(local, torch.where(up, math.inf, -math.inf).to(local)))


class _Watch:
    """Follows the modules of a rank's parts through the first step: where it is, what each first call was given and
    gave, and the gradients of both. What a module has as a partial sum is not kept: no other rank's part says what it
    should be."""

    def __init__(self, keep: bool) -> None:
        self.layout: Layout | None = None
        self.calls: list[str] = []
        self.tensors: dict[str, Tensor] = {}
        self.drops: list[tuple[str, str]] = []
        self._keep = keep
        self._begun = False
        self._stack: list[str] = []
        self._handles: list[Any] = []
        # What a module was given is copied when it is entered: it may be written over before the module is left.
        self._inputs: dict[str, list[Tensor]] = {}
        self._copies: dict[str, list[Tensor | None]] = {}

    def begin(self, parts: Sequence[nn.Module]) -> None:
        """Watch from now on."""
        self._begun = True
        dropout.listeners.append(self._note_drop)
        for part in parts:
            for path, module in part.named_modules():
                before = functools.partial(self._enter, path)
                after = functools.partial(self._leave, path)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after, with_kwargs=True))

    def end(self) -> None:
        """Watch no more: later steps run as they would."""
        dropout.listeners.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def where(self, config: Config, error: str = "") -> str:
        """Where the rank is, and what to do about it, as part of a sentence."""
        if not self._begun:
            return "while the model was split over the mesh"
        if not self._stack or self._stack[0] != "":
            return "outside of the model's forward: in the backward pass, an exchange between ranks, or the update"
        path = self._stack[-1]
        where = f"in module {path}" if path else "in the model's own forward"
        if config.parallelism.tensor_parallel_degree == 1 or self.layout is None:
            return f"{where}; correct its forward for a part of the batch, of the layers or of the sequence"
        # "must match the size of tensor" and "mixed torch.Tensor and DTensor" are how PyTorch words these two errors.
        word = layout.style_of(self.layout, path)
        parents = [path.rsplit(".", count)[0] for count in range(path.count(".") + 1)]
        is_on_residual = all(layout.style_of(self.layout, parent) is None for parent in parents)
        if is_on_residual and "must match the size of tensor" in error:
            return (
                f"{where}, where ranks hold a part of the sequence: what is added there must be one too; let a "
                'gathered module end in a "rowwise" linear, and compute positions in a module of their own with the '
                'word "embed"'
            )
        if word is None:
            return f"{where}, which has no word in LAYOUT.tensor; give it one, or the module in which it is"
        if "mixed torch.Tensor and DTensor" in error:
            return (
                f"{where}: what was gathered is a DTensor, and what a linear gives is a plain tensor; make new tensors "
                "of the latter (q.new_zeros in place of x.new_zeros), and let what was gathered meet it behind a linear"
            )
        fix = "correct the word, or its forward for a part of the heads or of the sequence"
        return f'{where}, which LAYOUT.tensor calls "{word}" ({layout.TENSOR_STYLES[word]}); {fix}'

    def _enter(self, path: str, _: nn.Module, given: Any, named: Any) -> None:
        # Activation checkpointing stops a recomputation as soon as it has what backward needs, with an exception that
        # calls no forward hook. So modules of the last pass may still be on the stack.
        if path == "":
            self._stack.clear()
        self._stack.append(path)
        if self._keep and path not in self._inputs:
            self._inputs[path] = _number_tensors((given, named))
            self._copies[path] = [_local_part(leaf) for leaf in self._inputs[path]]

    def _leave(self, path: str, _: nn.Module, given: Any, named: Any, output: Any) -> None:
        while self._stack and self._stack.pop() != path:
            pass
        if not self._keep or path in self.calls:
            return
        number = len(self.calls)
        self.calls.append(path)
        inputs = self._inputs.pop(path, [])
        outputs = _number_tensors(output)
        self._note(number, "in", inputs, self._copies.pop(path, []))
        self._note(number, "out", outputs, [_local_part(leaf) for leaf in outputs])
        self._inputs[path] = []  # seen: a second call of this module is not kept

    def _note_drop(self, name: str, dropped: Tensor) -> None:
        """What would be dropped, so that ranks can be compared: no two of them may hold the same."""
        self.tensors[f"dropped/{len(self.drops)}"] = _copy(dropped)
        self.drops.append((self._stack[-1] if self._stack else "", name))

    def _note(self, number: int, kind: str, leaves: Sequence[Tensor], copies: Sequence[Tensor | None]) -> None:
        for index, (leaf, copied) in enumerate(zip(leaves, copies, strict=True)):
            key = f"{number}/{kind}/{index}"
            if copied is not None:
                self.tensors[f"trace/{key}"] = copied
            # of a gathered sequence the gradient is a part of a sum, or added up beside autograd
            if leaf.requires_grad and not hasattr(leaf, "for_local_products"):
                leaf.register_hook(functools.partial(self._note_gradient, f"back/{key}"))

    def _note_gradient(self, key: str, gradient: Tensor) -> None:
        if key not in self.tensors and (copied := _local_part(gradient)) is not None:
            self.tensors[key] = copied


def _number_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _local_part(tensor: Tensor) -> Tensor | None:
    """What this rank holds of a tensor; None for a part of a sum."""
    is_sum = isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)
    return None if is_sum else _copy(tensor)


class _Recorder:
    def __init__(self, runner: Runner, mesh: Mesh) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.step = -1
        self._runner = runner
        self._mesh = mesh
        self._parts: dict[str, Tensor] = {}
        self._slices: dict[str, list[tuple[int, int]]] = {}
        self._core_seen = False

    def begin_step(self) -> None:
        self.step += 1
        self._core_seen = False

    def keep(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._parts[f"{kind}/{name}"] = _copy(tensor)
            self._slices[f"{kind}/{name}"] = [(s.start, s.stop) for s in local_slices(tensor)]

    def keep_gradients(self) -> None:
        gradients = {name: p.grad for name, p in self._runner.parameters().items() if p.grad is not None}
        self.keep(f"gradient/{self.step}", gradients)

    def watch_core(self, rules: Layout, first_layer: str) -> None:
        """Keep what the first attention core is given and gives, of the first micro-batch of each step."""
        if not rules.context:
            return
        for part in self._runner.parts:
            for path, module in part.named_modules():
                if path.startswith(f"{rules.layers}.{first_layer}.") and layout.matches(path, rules.context):
                    module.register_forward_hook(self._keep_core)
                    return

    def _keep_core(self, _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [*inputs[:3], output]
        if self._core_seen or not all(isinstance(tensor, Tensor) for tensor in tensors):
            return
        self._core_seen = True
        for name, tensor in zip(("q", "k", "v", "out"), tensors, strict=False):
            self._parts[f"core/{self.step}/{name}"] = _copy(tensor)

    def write(self, path: Path, rank: int, config: Config, watch: _Watch) -> None:
        place = {axis: self._mesh.rank(axis) for axis in AXES}
        facts = {"balanced": context_parallel.is_balanced(config), "calls": watch.calls, "drops": watch.drops}
        self._parts |= watch.tensors
        record = {
            "rank": rank,
            "place": place,
            "losses": self.losses,
            "norms": self.norms,
            "slices": self._slices,
            "facts": facts,
        }
        # a file of its own tensors only: what shares memory would be refused
        save_file({name: part for name, part in self._parts.items()}, path, metadata={"record": json.dumps(record)})


def _copy(tensor: Tensor) -> Tensor:
    return local_tensor(tensor.detach()).detach().cpu().clone(memory_format=torch.contiguous_format)


def read_record(folder: Path, rank: int) -> RankRecord:
    """The record that a rank left."""
    with safe_open(folder / f"rank-{rank}.safetensors", framework="pt") as file:
        record = json.loads(file.metadata()["record"])
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    slices = {key: tuple(slice(*pair) for pair in pairs) for key, pairs in record["slices"].items()}
    return RankRecord(
        record["rank"], record["place"], record["losses"], record["norms"], parts, slices, record["facts"]
    )


def plain_model(config: Config, weights: Mapping[str, Tensor]) -> nn.Module:
    """The whole model on this process's CPU with given weights: no mesh, no runner."""
    module, shape, model = model_of(config)
    spec.adapt(model, module, shape, config.lora)
    to_empty(model)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def micro_batches(config: Config, num_ranks: int) -> tuple[int, int]:
    """Micro-batches of a step on each data rank, and rows of each."""
    ranks = derived.data_parallel_degree(config, num_ranks)
    rows = config.training.global_batch_size // ranks
    size = config.training.local_batch_size
    if config.parallelism.pipeline_parallel_degree > 1:
        size = config.parallelism.pipeline_parallel_microbatch_size
    return math.ceil(rows / size), size
