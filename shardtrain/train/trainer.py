"""The trainer: build, loop, step. Read this file first.

One process per device runs ``main``. A step is: read this rank's batches, count target tokens over all
ranks, forward and backward with the loss divided once by that count, norm, finite check, clip, update. The
watchdog, signals and guards on loss and norm are behind ``run.resilience``; saving, and ending before the
last step, are in ``shutdown``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch.distributed import Store

from shardtrain import config as configs
from shardtrain import data, optim
from shardtrain.checkpoint.collectives import first_rank
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config import Loaded
from shardtrain.data.data_budget import check_has_targets
from shardtrain.data.file_hashes import Contents
from shardtrain.distributed import BATCH_AXES, compile, config_consistency, grad_clip, process_group
from shardtrain.distributed.process_group import World
from shardtrain.metrics import Metrics, profiling
from shardtrain.metrics.flight_recorder import flight_recorder_environment
from shardtrain.ops import accelerator, device_kernels
from shardtrain.ops.seeding import seed_step
from shardtrain.optim.lr_scheduler import learning_rate
from shardtrain.resilience.guards.loss_spikes import RollbackRequested
from shardtrain.resilience.resilience import Resilience
from shardtrain.train import (
    compatibility,
    document_isolation,
    model_check,
    run_folder,
    shutdown,
    split_sequences,
)
from shardtrain.train.build import build, set_numerics
from shardtrain.train.resume import resume
from shardtrain.train.rollback import roll_back
from shardtrain.train.run import Outcome, ReduceOverMesh, Run, run_facts
from shardtrain.train.samples import Samples
from shardtrain.train.step_sums import StepSums
from shardtrain.train.validation import Validator
from shardtrain.utils import activity
from shardtrain.utils.garbage_collection import GarbageCollection
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.log import logger

__all__ = ["Outcome", "Run", "build", "joined", "main", "opened", "run_to_end", "step", "train"]


def main(loaded: Loaded) -> TrainState:
    """Train as one rank of the job that the environment describes; raises ShardtrainError for errors a user
    can fix."""
    resilience = Resilience()
    with joined(loaded, resilience) as world:
        return train(loaded, world, resilience)


@contextmanager
def joined(loaded: Loaded, resilience: Resilience) -> Iterator[World]:
    """Join the process group, compare the configuration of all ranks, start the watchdog, and open
    the log.
    """
    config = loaded.config
    # PyTorch reads these variables when the process group starts
    os.environ.update(flight_recorder_environment(config, Path(config.job.dump_folder)))
    # kept until the log opens, after the ranks have joined
    model_check_lines: list[str] = []

    def check_ranks(store: Store, rank: int, size: int) -> None:
        config_consistency.check(config, store, rank, size)
        if config.model.name.endswith(".py"):
            model_check_lines.extend(model_check.check(config, store, rank, size))

    with (
        # Compare configurations over the store, before the first collective: with different configurations a
        # collective could deadlock.
        process_group.join(config.comm, config.training.device, check_ranks) as world,
        resilience.watchdog(config, world),
    ):
        # check the rules about devices again: only now are the ranks' devices known
        num_devices = world.size if accelerator.is_accelerator(world.device) else None
        notices = configs.require(loaded, world.size, world.device.type, num_devices)
        if world.device.type == "cpu":
            notices = (*notices, *configs.without_effect_on_a_cpu(config))
        run_folder.open_log(loaded, world, notices, model_check_lines)
        with device_kernels.prefer_attention(world.device, config.training.flash_attention):
            yield world


def train(loaded: Loaded, world: World, resilience: Resilience | None = None) -> TrainState:
    """Build the run, resume it from its newest checkpoint if there is one, and step to its end."""
    loaded = compatibility.keep_batch_size(loaded, world)
    with opened(loaded, world, resilience or Resilience()) as (run, checkpoints):
        if loaded.config.checkpoint.create_seed_checkpoint:
            shutdown.save_seed(run, checkpoints)
            return run.state
        return run_to_end(loaded, world, run, checkpoints)


@contextmanager
def opened(
    loaded: Loaded, world: World, resilience: Resilience
) -> Iterator[tuple[Run, Checkpoints]]:
    """Build the run and resume it from its newest checkpoint; release the lease of the folder however the
    run ends."""
    config = loaded.config
    folder = Path(loaded.config.job.dump_folder)
    checkpoints = Checkpoints(config)
    contents = Contents()
    try:
        checkpoints.take_run_folder()
        # before the model is built: parallelize() replaces layers by the kernels chosen here
        set_numerics(config, world.device)
        with _heartbeat("building the model and opening its data", world):
            run = build(config, world)
        run.resilience = resilience
        if world.rank == 0:
            contents = run.contents = Contents(getattr(run.dataloader, "whole_files", ()), folder)
        # data files that differ from their recorded hashes stop the run before a checkpoint is loaded
        first_rank(contents.look)
        with _heartbeat("loading the checkpoint", world):
            resume(run, checkpoints)
        contents.start(run.state.step)  # large files are hashed in a thread while training runs
        if world.rank == 0:
            certificate = run_folder.certificate_line(loaded, run)
            # generate, evaluate and export read it
            run_folder.write_resolved_config(loaded, folder, world.size, certificate)
        split_sequences.check_run(run)
        if run.dataloader.masks_documents:
            document_isolation.check_run(run)
        # after resume(): the goodput ledger continues from the step of the checkpoint
        resilience.open_ledger(folder, run.state.step, world)
        shutdown.prepare(run, checkpoints)
        yield run, checkpoints
    finally:
        contents.close()
        checkpoints.close()  # releases the lease, also after an error, so another run can use the folder


def _heartbeat(activity: str, world: World) -> AbstractContextManager[None]:
    """Log a line on rank 0 every few seconds while the block runs."""
    # 0 seconds: the other ranks log nothing.
    seconds = None if world.rank == 0 else 0
    return heartbeat(activity, seconds, logger.info)


def run_to_end(loaded: Loaded, world: World, run: Run, checkpoints: Checkpoints) -> TrainState:
    """Step to the end of the run. Roll back to a checkpoint when the loss spike policy requires it."""
    config = loaded.config
    folder = Path(loaded.config.job.dump_folder)
    rows = run.dataloader.num_samples
    rows_per_epoch = run.dataloader.places_per_epoch
    for line in run_folder.describe(
        loaded, run.mesh, run.num_params, run.total_steps, rows, rows_per_epoch
    ):
        logger.info(line)
    validator = None
    if config.validation.enable:
        average = run.moving_average if config.validation.use_ema else None
        validator = Validator(
            config, run.runner, run.mesh, run.resilience.stop, rows_per_epoch, average
        )
    folder_of_samples = folder if world.rank == 0 else None
    samples = Samples(config, run.runner, run.mesh, folder_of_samples, run.state.step)
    started_at = run.state.step

    def phase() -> str:
        return run.resilience.phases.name

    # one pass, and one more after each rollback
    with run.resilience.ledger:
        while True:
            try:
                # new after a rollback, which also rolls back the counts and files of the metrics
                with Metrics(
                    config,
                    folder,
                    run_facts(run, world),
                    ReduceOverMesh(run.mesh),
                    run.state.tokens_seen,
                    phase=phase,
                ) as metrics:
                    _steps(run, world, checkpoints, validator, samples, metrics)
                    # after the last step and save, ignore requests to stop
                    run.resilience.stop.close()
                if world.rank == 0:
                    shutdown.log_best_step(run, checkpoints)
                return run.state
            except RollbackRequested as rollback:
                roll_back(run, checkpoints, rollback, started_at)
                shutdown.prepare(run, checkpoints, may_end_early=True)


def _steps(
    run: Run,
    world: World,
    checkpoints: Checkpoints,
    validator: Validator | None,
    samples: Samples,
    metrics: Metrics,
) -> None:
    """Step to the end of the run; log, validate, sample and save when due."""
    config = run.config
    state = run.state
    resilience = run.resilience
    started_at = state.step
    collector = GarbageCollection(config.training.gc_freq, config.training.gc_debug)
    profiler = profiling.profiler(
        config, Path(config.job.dump_folder), world.rank, world.device.type, state.step
    )
    resilience.warm_up()
    with collector, profiler as trace:
        if run.owes_validation:
            _finish_step(run, checkpoints, validator, samples, metrics)
        while state.step < run.total_steps and not run.owes_validation:
            # set by the thread that hashes the data files, which cannot stop the run itself
            if run.contents.problem:
                raise run.contents.problem

            if run.runner.token_metrics:
                run.runner.token_metrics.is_on = metrics.is_log_step(state.step + 1)
            try:
                with resilience.watch_step(state):
                    outcome = step(run)
            except Exception as error:
                raise shutdown.explain(error, run) from error
            # the data have ended, or a rank has a request to stop
            if outcome is None:
                break
            if run.config.compile.enable and state.step == started_at + 1:
                not_compiled = compile.left_out(run.config)
                if not_compiled:
                    logger.warning(not_compiled)
            if not state.tokens_seen:
                check_has_targets(config, state.step, run.total_steps)

            # metrics: collectives on log steps, which are the same steps on all ranks
            extra = run.measures() if metrics.is_log_step(state.step) else {}
            metrics.update(
                state.step,
                loss_sum=outcome.loss_sum,
                local_tokens=outcome.local_tokens,
                global_tokens=outcome.global_tokens,
                grad_norm=outcome.grad_norm,
                lr=outcome.lr,
                data_seconds=outcome.data_seconds,
                extra=extra,
                order_hash=state.order_hash,
                computed_tokens=outcome.computed_tokens,
                source_sums=outcome.source_sums,
            )

            # before saving: weights that differ between replicas must not reach a checkpoint
            resilience.compare_replicas(run, checkpoints)
            _finish_step(run, checkpoints, validator, samples, metrics)
            collector.step(state.step)
            if trace:
                # a trace of a large model takes minutes to write
                with activity.slow():
                    trace.step()
            resilience.end_step(config)

    resilience.phases.begin("end")
    data_have_ended = started_at < state.step < run.total_steps and not (
        resilience.stop_flag or run.owes_validation
    )
    if validator and data_have_ended and validator.is_due(state.step, state.step):
        # this is the last step, on which validation is due; patience may end the run here
        _validate(run, validator, metrics, checkpoints)
    if resilience.stop_flag or run.owes_validation:
        shutdown.leave(run, checkpoints)  # saves and raises
    if state.step < run.total_steps:
        shutdown.data_ended(run, checkpoints)


def _finish_step(
    run: Run,
    checkpoints: Checkpoints,
    validator: Validator | None,
    samples: Samples,
    metrics: Metrics,
) -> None:
    """Validate, sample and save after a step, each if it is due.

    A request to stop that cancels the validation skips the rest: the run then ends, and the resumed run
    calls this first. So the result is part of the same checkpoint as without the request.
    """
    step = run.state.step
    if validator and (run.owes_validation or validator.is_due(step, run.total_steps)):
        _validate(run, validator, metrics, checkpoints)
        if run.owes_validation:
            return
    if samples.every_steps and step % samples.every_steps == 0:
        with metrics.pause(), run.resilience.phase("validation"):
            samples.run(step)

    # save after the validation, whose result is part of the checkpoint
    if checkpoints.saving.writing is not None:  # a background save may have finished
        checkpoints.poll()
    if checkpoints.is_due(step, run.total_steps):
        shutdown.save_after_step(run, checkpoints, metrics.pause)


def _validate(run: Run, validator: Validator, metrics: Metrics, checkpoints: Checkpoints) -> None:
    """Evaluate on the held-out data, and log and keep the result; set ``run.owes_validation`` if it was
    cancelled."""
    with metrics.pause(), run.resilience.phase("validation"):
        evaluation = validator.run(run.state.step)
    run.owes_validation = evaluation is None
    if evaluation is None:
        step = run.state.step
        logger.warning(
            f"validation after step {step} was cancelled by a request to stop: the resumed run repeats it"
        )
        return
    metrics.validation(run.state.step, evaluation.values)
    shutdown.note_validation(run, checkpoints, evaluation.values)


def step(run: Run) -> Outcome | None:
    """Run one optimizer step (a collective).

    None, on every rank, if the data have ended or a rank has a request to stop.
    """
    config = run.config
    mesh = run.mesh
    state = run.state

    # data: this rank's micro-batches, and the sums over the batches of all ranks
    with run.resilience.phase("data"):
        data_of_step = _read_step(run)
    if data_of_step is None:
        return None
    host_batches, sums, data_seconds = data_of_step
    if run.runner.counts_filler:
        host_batches = data.mark_filler(host_batches)
    batches = [batch.to(mesh.device, non_blocking=True) for batch in host_batches]
    # Dropout differs between data ranks. It depends on the step, so a resumed run draws the same masks.
    seed_step(
        config.debug.seed,
        state.step,
        mesh.rank("pp"),
        mesh.rank(*BATCH_AXES),
        mesh.rank("cp", "tp"),
    )

    # Forward and backward. Gradients are sums over tokens: the loss is divided once, here, by the target
    # tokens of all ranks, so no later reduction takes a mean.
    scale = run.scaler.scale if run.scaler else 1.0
    weight = torch.full(
        (), scale / max(sums.num_targets, 1), dtype=torch.float32, device=mesh.device
    )
    noise = run.runner.embedding_noise
    if noise is not None:
        noise.begin_step(state.step, host_batches)
    source_losses = run.runner.source_losses
    if source_losses is not None:
        source_losses.begin_step(data.sources_of_rows(host_batches))
    lr = learning_rate(
        config.optimizer, config.lr_scheduler, run.total_steps, state.updates, run.schedule
    )
    # before backward, in which the optimizer may step already
    optim.set_learning_rate(run.optimizer, lr)
    loss = run.runner.forward_backward(batches, weight)
    if noise is not None:
        noise.end_step()
    if source_losses is not None:
        source_losses.end_step()

    # agree on one loss and norm: ranks that took different branches below would deadlock
    norm = run.runner.gradient_norm() / scale
    agreement = grad_clip.Agreement(loss / scale, norm, mesh)

    # Update. If possible, the device decides whether the update applies, so the update is queued before the
    # host has read loss and norm. Otherwise the host decides.
    max_norm = config.training.max_norm
    decision = agreement.on_device(max_norm) if run.decides_on_device else None
    if decision:
        _update(run, torch.where(decision.applies, decision.factor / scale, 1.0), decision.applies)
    agreed = agreement.read(decision)  # the only host-device synchronization of a step
    # raises if the run must stop or roll back
    verdict = run.resilience.judge(run, loss, norm, agreed, host_batches)
    if verdict.apply and not agreed.applied:
        _update(run, min(1.0, max_norm / (agreed.norm + 1e-6)) / scale)
    run.runner.zero_grad()

    state.advance(
        run.dataloader.samples_consumed,
        sums.num_targets,
        sums.checksum,
        verdict.apply,
        verdict.finite,
    )
    local_tokens = run.runner.local_targets(host_batches)
    outcome_loss = loss / weight
    return Outcome(
        outcome_loss,
        local_tokens,
        sums.num_targets,
        sums.num_tokens,
        agreed.norm,
        norm,
        lr,
        data_seconds,
        None if source_losses is None else source_losses.sums_2S,
    )


def _update(run: Run, factor: float | torch.Tensor, applies: torch.Tensor | None = None) -> None:
    """Scale the gradients and step the optimizer.

    No-op on the device if ``applies``, a bool tensor, is false.
    """
    grad_clip.scale_gradients(run.runner.parameters().values(), factor)
    if applies is None:
        run.runner.update(run.optimizer)
    else:
        run.runner.update(run.optimizer, applies)
    if run.moving_average is not None:
        run.moving_average.update(applies)


def _read_step(run: Run) -> tuple[list[data.Batch], StepSums, float] | None:
    """Return this rank's batches of a step, the sums over all ranks, and the seconds spent reading (a
    collective).

    None, on all ranks, if the data have ended or a rank has a request to stop. A streamed dataset does not
    know its length, and its readers finish at different times. So a step in which no rank has a row is
    skipped, and the data have ended when every reader has returned an empty row, its mark of the end.
    """
    loader = run.dataloader
    resilience = run.resilience
    empty_rows = 0
    data_seconds = 0.0
    while True:
        # read this rank's rows of the step; may block on workers or storage
        started = time.perf_counter()
        first_row = loader.samples_consumed
        try:
            batches = resilience.stop.read(
                lambda: [next(loader) for _ in range(loader.accumulation)]
            )
        except StopIteration:
            return None
        if batches is None and loader.has_ended:
            return None
        data_seconds += time.perf_counter() - started
        # None if a request to stop ended the wait; the flags in the sums tell the other ranks
        batches = batches or []

        # the first collective of a step: every rank enters it, whatever it has read
        local_sums = StepSums(flags=resilience.pack_flags())
        # pp, cp and tp peers read the same rows, so only the first of them counts them
        if run.mesh.rank("pp", "cp", "tp") == 0:
            local_sums.num_targets = sum(batch.num_targets for batch in batches)
            local_sums.num_tokens = sum(batch.num_tokens for batch in batches)
            local_sums.num_rows = sum(batch.num_rows for batch in batches)
            local_sums.checksum = loader.step_hash
        sums = local_sums.all_reduce(run.mesh)
        if resilience.unpack_flags(sums.flags):
            return None

        # skip rows that a rollback excludes, and steps without rows at the end of a stream
        is_excluded = resilience.leaves_out(first_row, first_row + loader.global_batch)
        has_rows = sums.num_rows > 0 or not loader.ends_without_notice
        if has_rows and not is_excluded:
            return batches, sums, data_seconds
        run.state.samples_consumed = loader.samples_consumed
        if is_excluded:
            continue
        empty_rows += loader.global_batch
        if empty_rows >= loader.num_readers:
            return None
