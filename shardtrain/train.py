"""The trainer: build, loop, step. Read this file first.

One process per device runs ``main``. A step is: read this rank's batches, count target tokens over all ranks, forward
and backward with the loss divided once by that count, norm, finite check, clip, update.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain import config as configs
from shardtrain import data, init, log, models, optim, parallel, profiling, schedule
from shardtrain.checkpoint import Checkpoints
from shardtrain.config import Loaded, derived
from shardtrain.config.schema import Config
from shardtrain.errors import CheckpointError, DataError, NumericalError, PeerError
from shardtrain.log import logger
from shardtrain.metrics import Metrics, Reduce, RunFacts
from shardtrain.metrics.flight_recorder import flight_recorder_environment
from shardtrain.metrics.flops import count_model
from shardtrain.parallel import BATCH_AXES, LOSS_AXES, Mesh, Runner, clip, world
from shardtrain.parallel.world import World
from shardtrain.run_folder import describe, write_resolved_config
from shardtrain.seeding import seed_step, set_determinism
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


@dataclass(frozen=True)
class Outcome:
    """What a step reports: sums of this rank, and what all ranks agree on."""

    loss_sum: Tensor
    local_tokens: int
    global_tokens: int
    grad_norm: float
    lr: float
    data_seconds: float


def main(loaded: Loaded) -> TrainState:
    """Train as one rank of the job that the environment describes; raises ShardtrainError for what a user can mend."""
    config = loaded.config
    folder = Path(config.job.dump_folder)
    os.environ.update(flight_recorder_environment(config, folder))  # read when the process group starts
    with world.join(config.comm, config.training.device) as here:
        notices = configs.require(
            loaded, here.size, here.device.type, here.size if here.device.type == "cuda" else None
        )
        console = here.rank in log.console_ranks()
        several = len(log.console_ranks()) > 1
        color = not config.metrics.disable_color_printing
        log.setup(here.rank, here.size, folder, config.metrics.save_log_file, console, color, prefix=several)
        for notice in notices:
            logger.warning(notice)
        return train(loaded, here)


def train(loaded: Loaded, here: World) -> TrainState:
    """Build the run, continue it from a checkpoint if there is one, and step to its end."""
    config, folder = loaded.config, Path(loaded.config.job.dump_folder)
    set_determinism(config.debug)
    run = build(config, here)
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    if here.rank == 0:
        write_resolved_config(loaded, folder, here.size)
    for line in describe(loaded, run.mesh, run.num_params, run.total_steps, run.stream.num_samples):
        logger.info(line)
    metrics = Metrics(config, folder, _facts(run, here), _Reduce(run.mesh), run.state.tokens_seen)
    collector = profiling.GarbageCollection(config.training.gc_freq, config.training.gc_debug)
    profiler = profiling.profiler(config, folder, here.rank, here.device.type, run.state.step)
    first_step = run.state.step + 1
    with metrics, collector, profiler as trace:
        while run.state.step < run.total_steps:
            try:
                outcome = step(run)
            except RuntimeError as error:
                raise _name_collective(error, run.state.step + 1) from error
            extra = run.runner.measures() if metrics.is_log_step(run.state.step) else {}
            metrics.update(run.state.step, **vars(outcome), extra=extra)
            if checkpoints.is_due(run.state.step, run.total_steps):
                with metrics.pause():
                    save(run, checkpoints)
            collector.step(run.state.step)
            trace.step()
            if run.state.step == first_step:
                world.set_timeout(config.comm.train_timeout_seconds)
    return run.state


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
    stream = _open_stream(config, mesh, here, samples_consumed=0)
    if stream.vocab > shape.vocab_size:
        raise DataError(f"the tokenizer has {stream.vocab} ids, the model {shape.vocab_size}; use a larger vocab_size")
    world.check_agreement(stream.fingerprint, "the training data differ between ranks", mesh.device)
    total_steps = training.steps
    if training.epochs is not None:
        total_steps = data.steps_for_epochs(stream.num_samples, training.epochs, stream.global_batch)
    return Run(config, mesh, runner, optimizer, scaler, stream, TrainState(), total_steps, num_params, flops)


def step(run: Run) -> Outcome:
    """One optimizer step on all ranks together."""
    config, mesh, state = run.config, run.mesh, run.state
    started = time.perf_counter()
    local = [next(run.stream) for _ in range(derived.accumulation_steps(config, mesh.device_mesh.size()))]
    data_seconds = time.perf_counter() - started
    local_tokens = sum(batch.num_targets for batch in local)
    batches = [batch.to(mesh.device, non_blocking=True) for batch in local]
    seed_step(config.debug.seed, state.step, mesh.rank("pp"), mesh.rank(*BATCH_AXES))

    num_tokens = mesh.sum(torch.tensor(float(local_tokens), dtype=torch.float64, device=mesh.device), over=BATCH_AXES)
    scale = run.scaler.scale if run.scaler else 1.0
    weight = (scale / num_tokens.clamp_min(1.0)).float()
    loss = run.runner.forward_backward(batches, weight)
    norm = clip.gradient_norm(run.runner.parameters().values(), mesh) / scale
    mean_loss = mesh.sum(loss / scale, over=("pp", *LOSS_AXES))
    grad_norm, global_loss, tokens = torch.stack([norm.double(), mean_loss.double(), num_tokens]).tolist()

    lr = schedule.learning_rate(config.optimizer, config.lr_scheduler, run.total_steps, state.updates)
    finite = math.isfinite(grad_norm) and math.isfinite(global_loss)
    if not finite:
        _stop_or_skip(run, loss, local)
    apply = run.scaler.update(finite) if run.scaler else finite
    if apply:
        max_norm = config.training.max_norm
        clip.scale_gradients(run.runner.parameters().values(), min(1.0, max_norm / (grad_norm + 1e-6)) / scale)
        optim.set_learning_rate(run.optimizer, lr)
        run.runner.update(run.optimizer)
    run.runner.forget_gradients()
    state.advance(run.stream.global_batch, int(tokens), applied=apply)
    return Outcome(loss / weight, run.runner.own_targets(local), int(tokens), grad_norm, lr, data_seconds)


def _stop_or_skip(run: Run, loss: Tensor, local: list[data.Batch]) -> None:
    """Say which rank's numbers went wrong, and stop the run unless it may skip; the same on all ranks."""
    own = [] if bool(torch.isfinite(loss)) else [run.mesh.device_mesh.get_rank()]
    ranks = world.gather_flags(bool(own), run.mesh.device)
    if own:
        ids = [int(i) for batch in local for i in batch.sample_ids_B]
        logger.error(f"step {run.state.step + 1}: the loss of this rank is not finite; sample ids {ids}")
    culprits = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "a gradient"
    policy, skips = run.config.training.nonfinite_policy, run.state.nonfinite_skips
    if run.scaler and run.scaler.can_shrink:
        logger.warning(f"step {run.state.step + 1}: {culprits} overflowed float16 at loss scale {run.scaler.scale:g}")
    elif policy == "skip" and skips < run.config.training.nonfinite_max_skips:
        logger.warning(
            f"step {run.state.step + 1}: {culprits} is not finite; the update is skipped ({skips + 1} in a row)"
        )
    else:
        raise NumericalError(
            f"step {run.state.step + 1}: {culprits} is not finite; the weights are still those of step "
            f"{run.state.step}; lower optimizer.lr, look at the samples named in the rank's log, or set "
            "training.nonfinite_policy=skip"
        )


def _name_collective(error: RuntimeError, step: int) -> Exception:
    """An error that names the collective, where gloo names only a "recv"; every other error as it is."""
    calls = [f for f in traceback.extract_tb(error.__traceback__) if "torch/distributed" in f.filename]
    if "gloo/transport" not in str(error) or not calls:
        return error
    return PeerError(
        f"step {step}: {calls[-1].name} did not complete: {str(error).splitlines()[0].rpartition('] ')[2]}; "
        "another rank failed or is late: see the other logs, or raise comm.train_timeout_seconds"
    )


def save(run: Run, checkpoints: Checkpoints) -> None:
    """Write the run's state to its checkpoint folder."""
    facts: dict[str, Any] = {"state": run.state.to_dict(), "data_fingerprint": run.stream.fingerprint}
    if run.scaler:
        facts["scaler"] = run.scaler.state()
    last = run.state.step == run.total_steps
    checkpoints.save(run.state.step, _weights(run), _optimizer_state(run), facts, last)


def resume(run: Run, checkpoints: Checkpoints) -> None:
    """Continue from the run's own checkpoint, or start from ``checkpoint.initial_load_path``, if there is one."""
    options = run.config.checkpoint
    path = checkpoints.to_continue()
    initial = path is None and options.enable and options.initial_load_path is not None
    if initial:
        path = Path(str(options.initial_load_path))
    if path is None:
        return
    excluded = set(options.exclude_from_loading)
    if initial and options.initial_load_model_only:
        excluded |= {"optimizer", "train_state", "dataloader"}
    rest = {} if "optimizer" in excluded else _optimizer_state(run)
    facts = checkpoints.load(path, _weights(run), rest)
    if "train_state" not in excluded:
        run.state.load(facts.get("state", {}))
        if run.scaler:
            run.scaler.load(facts.get("scaler", {}))
    if "lr_scheduler" in excluded:
        run.state.updates = 0  # the schedule begins anew: it is a function of this count alone
    if "dataloader" in excluded:
        run.state.samples_consumed = 0
    elif "train_state" not in excluded and facts.get("data_fingerprint") != run.stream.fingerprint:
        raise CheckpointError(
            f"checkpoint {path} was trained on other data (dataset, tokenizer, seq_len or seed differ); use the same, "
            'or start the data anew with checkpoint.exclude_from_loading=["dataloader"]'
        )
    run.stream.seek(run.state.samples_consumed)
    logger.info(f"continuing from {path} at step {run.state.step}")


def _weights(run: Run) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {**run.runner.parameters(), **run.runner.buffers()}
    return {f"model.{name}": tensor.detach() for name, tensor in tensors.items()}


def _optimizer_state(run: Run) -> dict[str, Tensor]:
    states = optim.state_tensors(run.optimizer, run.runner.optimizer_parameters().items())
    return {f"optimizer.{name}": tensor for name, tensor in states.items()}


def _open_stream(config: Config, mesh: Mesh, here: World, samples_consumed: int) -> data.Stream:
    return data.open_stream(
        config,
        batch_rank=mesh.rank(*BATCH_AXES),
        num_batch_ranks=mesh.size(*BATCH_AXES),
        accumulation=derived.accumulation_steps(config, here.size),
        samples_consumed=samples_consumed,
    )


def _facts(run: Run, here: World) -> RunFacts:
    cuda = here.device.type == "cuda"
    return RunFacts(
        rank=here.rank,
        world_size=here.size,
        is_writer=here.rank == 0,
        start_step=run.state.step,
        total_steps=run.total_steps,
        num_params=run.num_params,
        flops_per_token=run.flops_per_token,
        device_type=here.device.type,
        device_name=torch.cuda.get_device_name(here.device) if cuda else "cpu",
        compute_dtype=derived.compute_dtype(run.config),
        description=run.config.job.description,
        model=f"{run.config.model.name}/{run.config.model.flavor}",
    )


class _Reduce(Reduce):
    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._axes = mesh, ("pp", *LOSS_AXES)

    def sum(self, tensor: Tensor) -> Tensor:
        return self._mesh.sum(tensor, over=self._axes)

    def max(self, tensor: Tensor) -> Tensor:
        return self._mesh.max(tensor, over=self._axes)
