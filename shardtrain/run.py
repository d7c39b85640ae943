"""What a run is made of, and how it is put together for its first step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardtrain import data, init, models, optim, parallel, stopping
from shardtrain.checkpoint.background import Saving
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.errors import ConfigError, Problem
from shardtrain.goodput.ledger import Ledger
from shardtrain.guard import Guard
from shardtrain.metrics.flops import count_model
from shardtrain.parallel import BATCH_AXES, Mesh, Runner, world
from shardtrain.parallel.world import World
from shardtrain.phases import Phases
from shardtrain.state import TrainState


@dataclass
class Run:
    """Everything that a step touches."""

    config: Config
    mesh: Mesh
    runner: Runner
    optimizer: torch.optim.Optimizer
    scaler: optim.LossScaler | None
    stream: data.Stream
    state: TrainState
    total_steps: int
    num_params: int
    flops_per_token: float
    stop: stopping.Stop = field(default_factory=stopping.current)
    phases: Phases = field(default_factory=Phases)
    saving: Saving = field(default_factory=Saving)
    ledger: Ledger = field(default_factory=Ledger)
    guard: Guard = field(default_factory=Guard)
    names: tuple[str, ...] = ()
    """Of all parameters of the whole model, in its order."""
    stop_word: float = 0.0
    """Not 0, on all ranks, when one of them was asked to stop before the step that was to come."""
    accepted_changes: list[dict[str, Any]] = field(default_factory=list)
    """Options that the user changed on the way, as the checkpoints record them; see ``continuing.py``."""

    def measures(self) -> dict[str, float]:
        """Counts since the start of the run, for the metrics."""
        skipped = self.state.step - self.state.updates
        return {"skipped_updates": skipped, "spikes": self.guard.spikes, "rewinds": len(self.guard.rewinds)}


@dataclass(frozen=True)
class Outcome:
    """What a step reports: sums of this rank, and what all ranks agree on."""

    loss_sum: Tensor
    local_tokens: int
    global_tokens: int
    grad_norm: float
    lr: float
    data_seconds: float


def build(config: Config, here: World) -> Run:
    """Everything for the first step: mesh, model on it with its initial weights, optimizer, data."""
    mesh = parallel.build(config, here)
    module = models.find(config.model.name)
    shape = models.shape_of(module, config.model.flavor, config.model.overrides, config.model.norm_type)
    model = models.build(module, shape)
    num_params, flops = count_model(model, module.LAYOUT, shape, config.training.seq_len)
    names = [name for name, _ in model.named_parameters()]
    draws = init.plan(names, module.initial(shape), module.LAYOUT, len(getattr(model, module.LAYOUT.layers)))
    runner = parallel.parallelize(model, module.LAYOUT, mesh, config, shape.vocab_size)
    runner.materialize(draws, config.debug.seed)
    optimizer = optim.build(runner.optimizer_parameters().items(), config.optimizer, names)
    training = config.training
    scaler = None
    if derived.compute_dtype(config) == "float16":
        scaler = optim.LossScaler(training.initial_loss_scale, training.loss_scale_growth_interval)
    stream = data.open_stream(
        config,
        batch_rank=mesh.rank(*BATCH_AXES),
        num_batch_ranks=mesh.size(*BATCH_AXES),
        accumulation=derived.accumulation_steps(config, here.size),
    )
    if stream.vocab > shape.vocab_size:
        rule = f"names a tokenizer with {stream.vocab} ids, and the model has rows for {shape.vocab_size}"
        fix = "use the model's own tokenizer, or set model.overrides.vocab_size"
        raise ConfigError(Problem("model.hf_assets_path", config.model.hf_assets_path, rule, fix))
    if stream.masks_documents:
        models.check_documents(module, config.model.name)
    world.check_agreement(stream.fingerprint, "the training data differ between ranks", mesh.device)
    total_steps = training.steps
    if training.epochs is not None and stream.steps_left is not None:
        total_steps = stream.steps_left
    run = Run(config, mesh, runner, optimizer, scaler, stream, TrainState(), total_steps, num_params, flops)
    run.names = tuple(names)
    return run
