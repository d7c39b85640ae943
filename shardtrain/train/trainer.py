"""The trainer: build, loop, step. Read this file first.

One process per device runs ``main``. A step is: read this rank's batches, count target tokens over all ranks, forward
and backward with the loss divided once by that count, norm, finite check, clip, update. What keeps the run alive and
judges its numbers is behind ``run.resilience``; saves, and ends that come too early, are in ``shutdown``.
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
from shardtrain.config import Loaded
from shardtrain.data.data_budget import check_has_targets
from shardtrain.data.file_hashes import Contents
from shardtrain.distributed import BATCH_AXES, compile, config_consistency, grad_clip, process_group
from shardtrain.distributed.process_group import World
from shardtrain.metrics import Metrics, profiling
from shardtrain.metrics.flight_recorder import flight_recorder_environment
from shardtrain.ops import accelerator, device_kernels
from shardtrain.ops.seeding import seed_step
from shardtrain.optim import lr_scheduler
from shardtrain.resilience.guards.loss_spikes import RollbackRequested
from shardtrain.resilience.resilience import Resilience
from shardtrain.train import document_isolation, model_check, run_folder, shutdown
from shardtrain.train.build import build, set_numerics
from shardtrain.train.resume import resume
from shardtrain.train.rollback import roll_back
from shardtrain.train.run import Outcome, ReduceOverMesh, Run, run_facts
from shardtrain.train.samples import Samples
from shardtrain.train.state import TrainState
from shardtrain.train.step_sums import StepSums
from shardtrain.train.validation import Validator
from shardtrain.utils.garbage_collection import GarbageCollection
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.log import logger

__all__ = ["Outcome", "Run", "build", "joined", "main", "opened", "run_to_end", "step", "train"]


def main(loaded: Loaded) -> TrainState:
    """Train as one rank of the job that the environment describes; raises ShardtrainError for what a user can fix."""
    resilience = Resilience()
    with joined(loaded, resilience) as world:
        return train(loaded, world, resilience)


@contextmanager
def joined(loaded: Loaded, resilience: Resilience) -> Iterator[World]:
    """Join the process group with a watchdog beside it, check the configuration on all ranks, and open the log."""
    config = loaded.config
    folder = Path(loaded.config.job.dump_folder)
    os.environ.update(flight_recorder_environment(config, folder))  # read when the process group starts
    compared: list[str] = []

    def check_ranks(store: Store, rank: int, size: int) -> None:
        config_consistency.check(config, store, rank, size)
        if config.model.name.endswith(".py"):
            compared.extend(model_check.check(config, store, rank, size))

    with (
        # ranks compare their configurations over the store: in a collective, those that differ would wait for each
        # other
        process_group.join(config.comm, config.training.device, check_ranks) as world,
        resilience.watchdog(config, world),
    ):
        # rules about devices are asked once more: only here is it known which ones the ranks have
        num_devices = world.size if accelerator.is_accelerator(world.device) else None
        notices = configs.require(loaded, world.size, world.device.type, num_devices)
        if world.device.type == "cpu":
            notices = (*notices, *configs.without_effect_on_a_cpu(config))
        run_folder.open_log(loaded, world, notices, compared)
        with device_kernels.prefer_attention(world.device, config.training.flash_attention):
            yield world


def train(loaded: Loaded, world: World, resilience: Resilience | None = None) -> TrainState:
    """Build the run, continue it from a checkpoint if there is one, and step to its end."""
    with opened(loaded, world, resilience or Resilience()) as (run, checkpoints):
        if loaded.config.checkpoint.create_seed_checkpoint:
            shutdown.save_seed(run, checkpoints)
            return run.state
        return run_to_end(loaded, world, run, checkpoints)


@contextmanager
def opened(loaded: Loaded, world: World, resilience: Resilience) -> Iterator[tuple[Run, Checkpoints]]:
    """Build the run, continued from its newest checkpoint; however it ends, the lease of the folder is released."""
    config = loaded.config
    folder = Path(loaded.config.job.dump_folder)
    checkpoints = Checkpoints(config)
    contents = Contents()
    try:
        # before the model: its layers take the kernels that are chosen when they are put on the mesh
        set_numerics(config, world.device)
        with _heartbeat("building the model and opening its data", world):
            run = build(config, world)
        run.resilience = resilience
        if world.rank == 0:
            contents = run.contents = Contents(getattr(run.dataloader, "whole_files", ()), folder)
        # files that are not what they were said to be stop the run before a checkpoint is loaded
        first_rank(contents.look)
        with _heartbeat("loading the checkpoint", world):
            resume(run, checkpoints)
        contents.start(run.state.step)  # a thread hashes what is too large to be hashed before the first step
        if world.rank == 0:
            run_folder.write_resolved_config(loaded, folder, world.size)  # generate, evaluate and export read it
        if run.dataloader.masks_documents:
            document_isolation.check_run(run)
        # only now: the accounts continue after the step that the checkpoint says
        resilience.open_ledger(folder, run.state.step, world)
        shutdown.prepare(run, checkpoints)
        yield run, checkpoints
    finally:
        contents.close()
        checkpoints.close()  # another run may write the folder, however this one has ended


def _heartbeat(what: str, world: World) -> AbstractContextManager[None]:
    """A line of the first rank's log every few seconds, while ``what`` has not ended."""
    return heartbeat(what, None if world.rank == 0 else 0, logger.info)


def run_to_end(loaded: Loaded, world: World, run: Run, checkpoints: Checkpoints) -> TrainState:
    """Step to the end of the run, and go back to a checkpoint where a spike policy asks for it."""
    config = loaded.config
    folder = Path(loaded.config.job.dump_folder)
    rows = run.dataloader.num_samples
    rows_per_epoch = run.dataloader.places_per_epoch
    for line in run_folder.describe(loaded, run.mesh, run.num_params, run.total_steps, rows, rows_per_epoch):
        logger.info(line)
    validator = None
    if config.validation.enable:
        validator = Validator(config, run.runner, run.mesh, run.resilience.stop, rows_per_epoch)
    samples = Samples(config, run.runner, run.mesh, None if world.rank else folder, run.state.step)
    started_at = run.state.step

    def phase() -> str:
        return run.resilience.phases.name

    # the loop turns again only where a spike sends the run back to a checkpoint
    with run.resilience.ledger:
        while True:
            try:
                # made again after going back: its counts and files go back too
                facts = run_facts(run, world)
                reduce = ReduceOverMesh(run.mesh)
                with Metrics(config, folder, facts, reduce, run.state.tokens_seen, phase=phase) as metrics:
                    _steps(run, world, checkpoints, validator, samples, metrics)
                    run.resilience.finish()
                return run.state
            except RollbackRequested as why:
                roll_back(run, checkpoints, why, started_at)
                shutdown.prepare(run, checkpoints, may_end_early=True)


def _steps(
    run: Run,
    world: World,
    checkpoints: Checkpoints,
    validator: Validator | None,
    samples: Samples,
    metrics: Metrics,
) -> None:
    """Step to the end of the run, and save, validate, sample and report when it is time."""
    config = run.config
    state = run.state
    resilience = run.resilience
    started_at = state.step
    collector = GarbageCollection(config.training.gc_freq, config.training.gc_debug)
    profiler = profiling.profiler(config, Path(config.job.dump_folder), world.rank, world.device.type, state.step)
    resilience.warm_up()
    with collector, profiler as trace:
        while state.step < run.total_steps:
            # the thread that hashes the files of the data cannot stop the run itself
            if run.contents.problem:
                raise run.contents.problem

            try:
                with resilience.watch_step(state):
                    outcome = step(run)
            except Exception as error:
                raise shutdown.explain(error, run) from error
            if outcome is None:  # the data have ended, or a rank was asked to stop
                break
            if config.compile.enable and state.step == started_at + 1:
                left_out = compile.left_out(config)
                if left_out:
                    logger.warning(left_out)
            if not state.tokens_seen:
                check_has_targets(config, state.step, run.total_steps)

            # metrics: a collective on log steps, for which all ranks have the same numbers
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
            )

            # before anything is saved: weights that differ between replicas must not reach a checkpoint
            resilience.compare_replicas(run, checkpoints)
            if validator and validator.is_due(state.step, run.total_steps):
                _validate(run, validator, metrics, checkpoints)
            if samples.every_steps and state.step % samples.every_steps == 0:
                with metrics.pause(), resilience.phase("validation"):
                    samples.run(state.step)

            # after the validation, whose result is part of the checkpoint
            if checkpoints.saving.writing is not None:  # what is written in the background may be on disk by now
                checkpoints.poll()
            if checkpoints.is_due(state.step, run.total_steps):
                shutdown.save_after_step(run, checkpoints, metrics.pause)

            collector.step(state.step)
            if trace:
                trace.step()
            resilience.end_step(config)

    resilience.phases.begin("end")
    if resilience.stop_flag:
        shutdown.leave(run, checkpoints)  # saves and raises
    if validator and started_at < state.step < run.total_steps and validator.is_due(state.step, state.step):
        _validate(run, validator, metrics, checkpoints)  # the data have ended; patience may make this the last step
    if state.step < run.total_steps:
        shutdown.data_ended(run, checkpoints)


def _validate(run: Run, validator: Validator, metrics: Metrics, checkpoints: Checkpoints) -> None:
    with metrics.pause(), run.resilience.phase("validation"):
        evaluation = validator.run(run.state.step)
    if evaluation is None:
        logger.warning(f"validation after step {run.state.step} was cancelled: the run was asked to stop")
        return
    metrics.validation(run.state.step, evaluation.values)
    shutdown.note_validation(run, checkpoints, evaluation.values)


def step(run: Run) -> Outcome | None:
    """One optimizer step on all ranks together; None, on all, where the data have ended or one was asked to stop."""
    config = run.config
    mesh = run.mesh
    state = run.state

    # data: this rank's micro-batches, and what all ranks read together
    with run.resilience.phase("data"):
        read = _read(run)
    if read is None:
        return None
    local, sums, data_seconds = read
    if run.runner.counts_filler:
        local = data.mark_filler(local)
    batches = [batch.to(mesh.device, non_blocking=True) for batch in local]
    # dropout differs between data ranks, and is a function of the step, so that a resumed run draws the same
    seed_step(config.debug.seed, state.step, mesh.rank("pp"), mesh.rank(*BATCH_AXES), mesh.rank("cp", "tp"))

    # forward and backward: gradients are sums over tokens, divided once, here, by the targets of the whole step
    scale = run.scaler.scale if run.scaler else 1.0
    weight = torch.full((), scale / max(sums.num_targets, 1), dtype=torch.float32, device=mesh.device)
    lr = lr_scheduler.learning_rate(config.optimizer, config.lr_scheduler, run.total_steps, state.updates)
    optim.set_learning_rate(run.optimizer, lr)  # before backward, which may update already
    loss = run.runner.forward_backward(batches, weight)

    # all ranks take the same loss and norm from here: those that decided differently would wait for each other for ever
    norm = run.runner.gradient_norm() / scale
    agreement = grad_clip.Agreement(loss / scale, norm, mesh)

    # update: decided by the device itself where it can, so that it need not wait for the host
    max_norm = config.training.max_norm
    decided = agreement.on_device(max_norm) if run.decides_on_device else None
    if decided:
        _update(run, torch.where(decided.applies, decided.factor / scale, 1.0), decided.applies)
    agreed = agreement.read(decided)  # the one time that the host waits for an accelerator
    verdict = run.resilience.judge(run, loss, norm, agreed, local)  # raises where the run must stop or go back
    if verdict.apply and not agreed.applied:
        _update(run, min(1.0, max_norm / (agreed.norm + 1e-6)) / scale)
    run.runner.forget_gradients()

    state.advance(run.dataloader.samples_consumed, sums.num_targets, sums.checksum, verdict.apply, verdict.finite)
    local_tokens = run.runner.own_targets(local)
    return Outcome(loss / weight, local_tokens, sums.num_targets, agreed.norm, norm, lr, data_seconds)


def _update(run: Run, factor: float | torch.Tensor, applies: torch.Tensor | None = None) -> None:
    """Clip by a factor and update; ``applies`` of the device may keep the update from changing anything."""
    grad_clip.scale_gradients(run.runner.parameters().values(), factor)
    if applies is None:
        run.runner.update(run.optimizer)
    else:
        run.runner.update(run.optimizer, applies)


def _read(run: Run) -> tuple[list[data.Batch], StepSums, float] | None:
    """This rank's batches of a step, the sums over all ranks, and the seconds that reading took.

    None, on all ranks, where the data have ended or a rank was asked to stop. A streamed dataset ends without notice,
    one reader after another: a step without rows is skipped, and when no reader has any, the data have ended.
    """
    loader = run.dataloader
    resilience = run.resilience
    empty = 0
    data_seconds = 0.0
    while True:
        # this rank's share of the rows of a step
        started = time.perf_counter()
        first_row = loader.samples_consumed
        try:
            read = resilience.read(lambda: [next(loader) for _ in range(loader.accumulation)])
        except StopIteration:
            return None
        if read is None and loader.has_ended:
            return None
        data_seconds += time.perf_counter() - started
        local = read or []  # a request to stop ended the wait: the other ranks learn of it from the sums

        # the first collective of a step, which every rank enters whatever it has read
        own = StepSums(flags=resilience.pack_flags())
        if run.mesh.rank("pp", "cp", "tp") == 0:  # the others hold the same rows, which count once
            own.num_targets = sum(batch.num_targets for batch in local)
            own.num_rows = sum(batch.num_rows for batch in local)
            own.checksum = loader.step_hash
        sums = own.all_reduce(run.mesh)
        if resilience.unpack_flags(sums.flags):
            return None

        # rows that a rollback leaves out are read and dropped; so are those of a stream that is running dry
        left_out = resilience.leaves_out(first_row, first_row + loader.global_batch)
        if not left_out and (not loader.ends_without_notice or sums.num_rows > 0):
            return local, sums, data_seconds
        empty += 0 if left_out else loader.global_batch
        run.state.samples_consumed = loader.samples_consumed
        if empty >= loader.num_readers and not left_out:
            return None
