"""Run the training steps of one rank with the trainer's step function, and write one file for the comparison.

Each rank writes its local parts of tensors with their position in the full tensor. The comparison needs no
communication, and can also compare parts that should be equal on several ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

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
from shardtrain.tools.verify import dropout, loss_watch
from shardtrain.tools.verify.batches import SyntheticStream
from shardtrain.tools.verify.module_watch import ModuleWatch, local_copy
from shardtrain.tools.verify.rounding_noise import RoundingNoise
from shardtrain.tools.verify.shrink import VerifyTask
from shardtrain.utils.errors import ConfigError

MAX_NORM = 0.1
"""Norm to which gradients are clipped in the last step. At unit gain, the norm before clipping is
far above it.
"""


def is_clipped(step: int, steps: int) -> bool:
    """True for the last of several steps. Only this step clips gradients. Steps count from 0."""
    return steps > 1 and step == steps - 1


Trainer: TypeAlias = ModuleType
"""The module ``shardtrain.train.trainer``, whose step function is verified."""


@dataclass(frozen=True)
class RankRecord:
    """Data that one rank recorded.

    Attributes:
        rank: Number of the rank.
        place: Index of the rank along each mesh axis.
        losses: Mean loss per step.
        norms: Gradient norm per step, before clipping.
        parts: Local tensors by key: "initial/NAME", "gradient/STEP/NAME", "weights/STEP/NAME",
            "core/STEP/q", ...
        slices: Position of a part in the full tensor, one slice per dimension, for
            each key of a parameter or buffer.
        facts: "balanced" (True if cp balances the sequence), "calls" and "drops" (see ``ModuleWatch``).
    """

    rank: int
    place: Mapping[str, int]
    losses: list[float]
    norms: list[float]
    parts: Mapping[str, Tensor]
    slices: Mapping[str, tuple[slice, ...]]
    facts: Mapping[str, Any]


def device_of(config: Config, rank: int) -> torch.device:
    """Return the device of a rank: the CPU, unless the configuration names an accelerator."""
    kind = config.training.device
    if kind in ("auto", "cpu"):
        return torch.device("cpu")
    return accelerator.of_rank(kind, rank)


def model_of(config: Config) -> tuple[Any, Any, nn.Module]:
    """Return the model file, the model's sizes, and the model on the meta device. The layout is checked."""
    module, shape = models.configured(config.model)
    return module, shape, models.build(module, shape)


def draws_of(module: Any, shape: Any, model: nn.Module, unit_gain: bool) -> dict[str, Draw]:
    """Return the initial distribution of each parameter by name.

    With ``unit_gain``, the outputs of matrices are about as large as their inputs, and no parameter is zero.
    """
    num_layers = len(getattr(model, module.LAYOUT.layers))
    parameters = dict(model.named_parameters())
    base_names = [name for name in parameters if not is_adapter(name)]
    draws = init_weights.plan(
        base_names,
        module.initial(shape),
        module.LAYOUT,
        num_layers,
    ) | spec.draws(model)
    if not unit_gain:
        return draws
    unit_gain_draws = {}
    for name, draw in draws.items():
        unit_std = 0.0
        if parameters[name].ndim:
            unit_std = parameters[name].size(-1) ** -0.5
        if name.endswith(".lora_b"):
            # The product of a trained adapter is small compared with the weight.
            draw = Draw("normal", std=0.1 * unit_std)
        elif parameters[name].ndim > 1:
            draw = replace(draw, distribution="normal", std=max(draw.std, unit_std))
        elif draw.distribution == "zeros":
            draw = Draw("normal", std=0.05)
        unit_gain_draws[name] = draw
    return unit_gain_draws


def run_steps(
    rank: int,
    num_ranks: int,
    trainer: Trainer,
    config: Config,
    task: VerifyTask,
    folder: str,
    shaken: bool = False,
    noise: RoundingNoise | None = None,
) -> None:
    """Train ``task.steps`` steps as one rank and write its record to ``folder``. Collective.

    With ``shaken``, move each weight to the next representable number above or below before the first step.
    With ``noise``, perturb weights and activations by as much as rounding to a shorter dtype does.

    Raises:
        ConfigError: the mesh does not support the model.
        Exception: any other error, with a note that locates it in the model.
    """
    # A model file may import a dropout function by name, so disable dropout before importing the file.
    dropout.switch_off()
    watch = ModuleWatch(keep=task.unit_gain)
    try:
        _run_steps(rank, num_ranks, trainer, config, task, folder, watch, shaken, noise)
    except ConfigError:
        raise
    except Exception as error:
        error.add_note(watch.locate(config, str(error)))
        raise


def _run_steps(
    rank: int,
    num_ranks: int,
    trainer: Trainer,
    config: Config,
    task: VerifyTask,
    folder: str,
    watch: ModuleWatch,
    shaken: bool,
    noise: RoundingNoise | None,
) -> None:
    # Parallelize the model like the trainer does. Collect names and initial distributions first, because a
    # pipeline rank has only some of the layers afterwards.
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

    # Draw the weights twice: first like training does, to compare the initialization itself, then at unit
    # gain, because a small model with its usual weights would hide the effect of some of its parts.
    recorder = _Recorder(runner, mesh)
    runner.materialize(draws_of(module, shape, model, unit_gain=False), config.debug.seed)
    recorder.keep("own", runner.parameters())
    if task.unit_gain:
        for name, parameter in runner.parameters().items():
            init_weights.draw_(parameter, name, draws[name], config.debug.seed)
    if task.own_precision is not None and task.own_precision.model.converters:
        make_rows_uneven(runner.parameters())
    if shaken:
        shake(runner.parameters(), config.debug.seed)
    if noise is not None:
        noise.attach(runner)

    # Build the trainer's run with synthetic batches instead of a dataset.
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
    scaler = None
    if config.training.mixed_precision_param == "float16":
        scaler = optim.LossScaler(
            config.training.initial_loss_scale, config.training.loss_scale_growth_interval
        )
    run = trainer.Run(
        config=config,
        mesh=mesh,
        runner=runner,
        optimizer=optimizer,
        scaler=scaler,
        dataloader=stream,
        state=TrainState(),
        total_steps=task.steps,
        num_params=num_params,
        flops_per_token=0.0,
    )
    # The trainer stops if norms differ between ranks. Here, the comparison of all tensors finds the
    # cause instead.
    run.resilience.compares_norms = False

    recorder.keep("initial", runner.parameters())
    recorder.watch_core(module.LAYOUT, first_layer)
    watch.begin(runner.parts)
    # Directly before the update, gradients are clipped and not yet zeroed.
    optimizer.register_step_pre_hook(lambda *_: recorder.keep_gradients())
    for _ in range(task.steps):
        recorder.begin_step()
        if is_clipped(recorder.step, task.steps):
            run.config = replace(config, training=replace(config.training, max_norm=MAX_NORM))
        # Losses are compared with float64 only in the run's own precision.
        has_losses = task.own_precision is not None and noise is None and task.unit_gain
        with ExitStack() as first_step:
            if recorder.step == 0 and has_losses:
                first_step.enter_context(loss_watch.recorded(watch.tensors))
            outcome = trainer.step(run)
        watch.end()
        if noise is not None:
            noise.store(runner)
        # Compute the mean loss over all target tokens of the step. Each rank of a tp group has the same
        # sum. Do not add them: errors of the ranks of a group may cancel.
        own_sum = outcome.loss_sum.detach().double().to(mesh.device).clone()
        total = mesh.sum(own_sum, over=tuple(axis for axis in AXES if axis != "tp"))
        recorder.losses.append(float(total) / max(1, outcome.global_tokens))
        recorder.norms.append(float(outcome.own_grad_norm))
        recorder.keep(f"weights/{recorder.step}", runner.parameters())
        recorder.keep(f"buffers/{recorder.step}", runner.buffers())
    recorder.write(Path(folder) / f"rank-{rank}.safetensors", rank, config, watch)


@torch.no_grad()
def make_rows_uneven(parameters: Mapping[str, Tensor]) -> None:
    """Multiply the first eighth of the rows of each matrix by 4, so that shards have different float8 scales."""
    for parameter in parameters.values():
        if parameter.ndim < 2:
            continue
        rows = local_slices(parameter)[0]
        num_large = max(0, min(rows.stop, parameter.size(0) // 8) - rows.start)
        local_tensor(parameter)[:num_large].mul_(4.0)


@torch.no_grad()
def shake(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Move each element randomly to the next representable number above or below. No rounding error
    is smaller.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        local = local_tensor(parameter)
        is_up = torch.rand(local.shape, generator=generator) < 0.5
        target = torch.where(is_up, math.inf, -math.inf).to(local)
        local.copy_(torch.nextafter(local, target))


class _Recorder:
    """Collect the record of one rank and write it to a file."""

    def __init__(self, runner: Runner, mesh: Mesh) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.step = -1
        self._runner = runner
        self._mesh = mesh
        self._parts: dict[str, Tensor] = {}
        self._slices: dict[str, list[tuple[int, int]]] = {}
        self._has_core = False

    def begin_step(self) -> None:
        self.step += 1
        self._has_core = False

    def keep(self, kind: str, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of tensors, under the key "KIND/NAME"."""
        for name, tensor in tensors.items():
            self._parts[f"{kind}/{name}"] = local_copy(tensor)
            self._slices[f"{kind}/{name}"] = [(s.start, s.stop) for s in local_slices(tensor)]

    def keep_gradients(self) -> None:
        gradients = {
            name: p.grad for name, p in self._runner.parameters().items() if p.grad is not None
        }
        self.keep(f"gradient/{self.step}", gradients)

    def watch_core(self, rules: Layout, first_layer: str) -> None:
        """Keep inputs and output of the first attention core, in the first micro-batch of each step."""
        if not rules.context:
            return
        for part in self._runner.parts:
            for path, module in part.named_modules():
                if path.startswith(f"{rules.layers}.{first_layer}.") and layout.matches(
                    path, rules.context
                ):
                    module.register_forward_hook(self._keep_core)
                    return

    def _keep_core(self, _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [*inputs[:3], output]
        if self._has_core or not all(isinstance(tensor, Tensor) for tensor in tensors):
            return
        self._has_core = True
        for name, tensor in zip(("q", "k", "v", "out"), tensors, strict=False):
            self._parts[f"core/{self.step}/{name}"] = local_copy(tensor)

    def write(self, path: Path, rank: int, config: Config, watch: ModuleWatch) -> None:
        facts = {
            "balanced": context_parallel.is_balanced(config),
            "calls": watch.calls,
            "drops": watch.drops,
        }
        record = {
            "rank": rank,
            "place": {axis: self._mesh.rank(axis) for axis in AXES},
            "losses": self.losses,
            "norms": self.norms,
            "slices": self._slices,
            "facts": facts,
        }
        save_file({**self._parts, **watch.tensors}, path, metadata={"record": json.dumps(record)})


def read_record(folder: Path, rank: int) -> RankRecord:
    """Read the record that a rank wrote to ``folder``."""
    with safe_open(folder / f"rank-{rank}.safetensors", framework="pt") as file:
        record = json.loads(file.metadata()["record"])
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    slices = {}
    for key, pairs in record["slices"].items():
        slices[key] = tuple(slice(*pair) for pair in pairs)
    return RankRecord(
        record["rank"],
        record["place"],
        record["losses"],
        record["norms"],
        parts,
        slices,
        record["facts"],
    )


def plain_model(config: Config, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build the unsharded model on the CPU with the given weights, without mesh and runner."""
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
    """Return the number of micro-batches per step on each data rank, and the rows of each."""
    data_ranks = derived.data_parallel_degree(config, num_ranks)
    rows_per_rank = config.training.global_batch_size // data_ranks
    size = config.training.local_batch_size
    if config.parallelism.pipeline_parallel_degree > 1:
        size = config.parallelism.pipeline_parallel_microbatch_size
    return math.ceil(rows_per_rank / size), size
