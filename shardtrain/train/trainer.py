"""The trainer: build, loop, step. Read this file first.

One process per device runs ``main``. A step is: read this rank's batches, count target tokens over all ranks, forward
and backward with the loss divided once by that count, norm, finite check, clip, update.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch.distributed import Store

from shardtrain import config as configs
from shardtrain import data, models, optim
from shardtrain.checkpoint.collectives import first_rank
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.data.file_hashes import Contents
from shardtrain.distributed import BATCH_AXES, config_consistency, grad_clip, process_group
from shardtrain.distributed.process_group import World
from shardtrain.metrics import Metrics, profiling
from shardtrain.metrics.flight_recorder import flight_recorder_environment
from shardtrain.ops import cpu_kernels
from shardtrain.ops.seeding import seed_step, set_determinism
from shardtrain.optim import lr_scheduler
from shardtrain.resilience import progress, watchdog
from shardtrain.resilience.goodput.ledger import Ledger
from shardtrain.resilience.guards import loss_spikes, nan_guard, replica_check
from shardtrain.resilience.guards.replica_check import Replicas
from shardtrain.resilience.phases import Phases
from shardtrain.train import document_isolation, model_check, shutdown
from shardtrain.train.build import build
from shardtrain.train.resume import resume
from shardtrain.train.run import Outcome, Run
from shardtrain.train.run_facts import ReduceOverMesh, run_facts
from shardtrain.train.run_folder import describe, write_resolved_config
from shardtrain.train.state import TrainState
from shardtrain.train.step_sums import StepSums
from shardtrain.train.validation import Validator
from shardtrain.utils import log
from shardtrain.utils.errors import DataError
from shardtrain.utils.log import logger

__all__ = ["Outcome", "Run", "build", "joined", "main", "opened", "run_to_end", "step", "train"]

_STEPS_WITHOUT_TARGETS = 10
"""A run ends after so many steps if none of them had a token with loss."""


def main(loaded: Loaded) -> TrainState:
    """Train as one rank of the job that the environment describes; raises ShardtrainError for what a user can fix."""
    phases = Phases()
    with joined(loaded, phases) as here:
        return train(loaded, here, phases)


@contextmanager
def joined(loaded: Loaded, phases: Phases) -> Iterator[World]:
    """Join the process group with a watchdog beside it, check the configuration on all ranks, and open the log."""
    config, folder = loaded.config, Path(loaded.config.job.dump_folder)
    os.environ.update(flight_recorder_environment(config, folder))  # read when the process group starts
    compared: list[str] = []

    def check_ranks(store: Store, rank: int, size: int) -> None:
        config_consistency.check(config, store, rank, size)
        compared.extend(model_check.check(config, store, rank, size))

    with (
        process_group.join(config.comm, config.training.device, check_ranks) as here,
        watchdog.beating(config, here, phases),
    ):
        num_devices = here.size if here.device.type == "cuda" else None
        notices = configs.require(loaded, here.size, here.device.type, num_devices)
        console = here.rank in log.console_ranks()
        several = len(log.console_ranks()) > 1
        color = not config.metrics.disable_color_printing
        log.setup(here.rank, here.size, folder, config.metrics.save_log_file, console, color, prefix=several)
        for notice in notices:
            (logger.info if notice in loaded.renames else logger.warning)(notice)
        for line in compared:
            (logger.warning if " NOT " in line else logger.info)(line)
        yield here


def train(loaded: Loaded, here: World, phases: Phases | None = None) -> TrainState:
    """Build the run, continue it from a checkpoint if there is one, and step to its end."""
    with opened(loaded, here, phases or Phases()) as (run, checkpoints):
        if loaded.config.checkpoint.create_seed_checkpoint:
            shutdown.save_seed(run, checkpoints)
            return run.state
        return run_to_end(loaded, here, run, checkpoints)


@contextmanager
def opened(loaded: Loaded, here: World, phases: Phases) -> Iterator[tuple[Run, Checkpoints]]:
    """Build the run, continued from its newest checkpoint; however it ends, the lease of the folder is released."""
    config, folder = loaded.config, Path(loaded.config.job.dump_folder)
    checkpoints, contents = Checkpoints(config), Contents()
    try:
        if config.debug.deterministic:
            set_determinism(config.debug.deterministic_warn_only)
        if here.device.type == "cpu":
            _choose_cpu_kernels(config)
        run = build(config, here)
        run.phases = phases
        if here.rank == 0:
            contents = run.contents = Contents(getattr(run.dataloader, "whole_files", ()), folder)
        first_rank(contents.look)
        resume(run, checkpoints)
        contents.start(run.state.step)
        if here.rank == 0:
            write_resolved_config(loaded, folder, here.size)  # generate, evaluate and export read it
        if run.dataloader.masks_documents:
            document_isolation.check(run.runner.parts[0], models.find(config.model.name), run.mesh)
            teacher = getattr(run.runner, "teacher", None)
            if teacher is not None and hasattr(teacher, "hf"):
                document_isolation.check(teacher, models.find("transformers"), run.mesh)
        run.ledger = Ledger(None if here.rank else folder, phases, run.state.step, here.size)
        shutdown.expect(run, checkpoints)
        yield run, checkpoints
    finally:
        contents.close()
        checkpoints.close()  # another run may write the folder, however this one has ended


def _choose_cpu_kernels(config: Config) -> None:
    """Let all ranks compute with what the first one's machine is fastest with (a collective)."""
    if config.training.cpu_kernels == "pytorch" or config.debug.deterministic:
        cpu_kernels.use(cpu_kernels.PYTORCH)
        return
    found = first_rank(lambda: asdict(cpu_kernels.remembered_or_measured()))
    kernels = cpu_kernels.Kernels(**found)
    cpu_kernels.use(kernels)
    logger.info(cpu_kernels.describe(kernels))


def run_to_end(loaded: Loaded, here: World, run: Run, checkpoints: Checkpoints) -> TrainState:
    """Step to the end of the run, and go back to a checkpoint where a spike policy asks for it."""
    config, folder = loaded.config, Path(loaded.config.job.dump_folder)
    of_epoch = run.dataloader.num_samples, run.dataloader.places_per_epoch
    for line in describe(loaded, run.mesh, run.num_params, run.total_steps, *of_epoch):
        logger.info(line)
    validator = Validator(config, run.runner, run.mesh, run.stop, run.dataloader.places_per_epoch)
    started_at = run.state.step
    with run.ledger:
        while True:
            try:
                facts = run_facts(run, here)
                with Metrics(config, folder, facts, ReduceOverMesh(run.mesh), run.state.tokens_seen) as metrics:
                    _steps(run, here, checkpoints, validator, metrics)
                    run.stop.close()  # the last step is done and saved
                return run.state
            except loss_spikes.RollbackRequested as why:
                loss_spikes.rollback(run, checkpoints, why, started_at)
                shutdown.expect(run, checkpoints, may_end_early=True)


def _steps(run: Run, here: World, checkpoints: Checkpoints, validator: Validator, metrics: Metrics) -> None:
    """Step to the end of the run, and save, validate and report when it is time."""
    config, state = run.config, run.state
    collector = profiling.GarbageCollection(config.training.gc_freq, config.training.gc_debug)
    profiler = profiling.profiler(config, Path(config.job.dump_folder), here.rank, here.device.type, state.step)
    first_step, copies = state.step + 1, Replicas(run, checkpoints)
    run.phases.begin("compile")  # the first step compiles and warms up
    with collector, profiler as trace:
        while state.step < run.total_steps:
            started = time.perf_counter()
            run.contents.check()
            progress.begin_step(state.step + 1, state.to_dict())
            try:
                outcome = step(run)
            except Exception as error:
                raise shutdown.explain(error, run) from error
            if outcome is None:
                if state.step >= first_step and not run.stop_flag and validator.is_due(state.step, state.step):
                    _validate(run, validator, metrics, checkpoints)
                break
            if not state.tokens_seen and state.step >= min(_STEPS_WITHOUT_TARGETS, run.total_steps):
                # such as when prompts fill each row, so that no answer is left of it; the count is of all ranks
                raise DataError(
                    f"the first {state.step} steps had no token with loss (training.seq_len={config.training.seq_len}, "
                    f'data.format="{config.data.format}"); where prompts fill the rows raise training.seq_len; look at '
                    "them with shardtrain data show"
                )
            step_seconds = time.perf_counter() - started
            extra = run.ledger.note(
                state.step,
                metrics.is_log_step(state.step),
                # of experts, of the run's own parts, and of slow ranks; only asked for where a step is logged
                lambda: {**run.runner.measures(), **run.measures(), **progress.now().measures},
            )
            metrics.update(state.step, **outcome.measures(), extra=extra, order_hash=state.order_hash)
            copies.check(state.step)
            if validator.is_due(state.step, run.total_steps):
                _validate(run, validator, metrics, checkpoints)
            shutdown.save_when_due(run, checkpoints, metrics.pause)  # what the validation found is part of it
            collector.step(state.step)
            trace.step()
            if state.step > first_step:
                run.stop.steps.add(step_seconds)
            else:
                process_group.set_timeout(config.comm.train_timeout_seconds)
                run.phases.begin("step")
    run.phases.begin("end")
    if run.stop_flag:
        shutdown.leave(run, checkpoints)
    if state.step < run.total_steps:
        shutdown.data_ended(run, checkpoints)


def _validate(run: Run, validator: Validator, metrics: Metrics, checkpoints: Checkpoints) -> None:
    with metrics.pause(), run.phases.within("validation"):
        found = validator.run(run.state.step)
    if found is None:
        logger.warning(f"validation after step {run.state.step} was cancelled: the run was asked to stop")
        return
    metrics.validation(run.state.step, found.values)
    shutdown.note_validation(run, checkpoints, found.values)


def step(run: Run) -> Outcome | None:
    """One optimizer step on all ranks together; None, on all, where the data have ended or one was asked to stop."""
    config, mesh, state = run.config, run.mesh, run.state
    with run.phases.within("data"):
        found = _read(run)
    if found is None:
        return None
    local, sums, data_seconds = found
    if run.runner.counts_filler:
        local = data.mark_filler(local)
    batches = [batch.to(mesh.device, non_blocking=True) for batch in local]
    seed_step(config.debug.seed, state.step, mesh.rank("pp"), mesh.rank(*BATCH_AXES), mesh.rank("cp", "tp"))

    scale = run.scaler.scale if run.scaler else 1.0
    # gradients are sums over tokens; they are divided once, here, by the number of targets in the whole step
    weight = torch.tensor(scale / max(sums.num_targets, 1), dtype=torch.float32, device=mesh.device)
    loss = run.runner.forward_backward(batches, weight)
    norm = grad_clip.gradient_norm(run.runner.counted_parameters().values(), mesh) / scale
    agreed = grad_clip.agree(loss / scale, norm, mesh)
    global_loss, grad_norm = agreed.loss, agreed.norm

    lr = lr_scheduler.learning_rate(config.optimizer, config.lr_scheduler, run.total_steps, state.updates)
    finite = math.isfinite(grad_norm) and math.isfinite(global_loss)
    if not finite:
        nan_guard.stop_or_skip(run, loss, local)
    elif not agreed.same_norm:
        replica_check.refuse_norms(run, norm)
    apply = run.scaler.update(finite) if run.scaler else finite
    apply = apply and loss_spikes.may_apply(run, global_loss, grad_norm)
    if apply:
        max_norm = config.training.max_norm
        grad_clip.scale_gradients(run.runner.parameters().values(), min(1.0, max_norm / (grad_norm + 1e-6)) / scale)
        optim.set_learning_rate(run.optimizer, lr)
        run.runner.update(run.optimizer)
    run.runner.forget_gradients()
    state.advance(run.dataloader.samples_consumed, sums.num_targets, sums.checksum, apply, finite)
    local_tokens = run.runner.own_targets(local)
    return Outcome(loss / weight, local_tokens, sums.num_targets, grad_norm, norm, lr, data_seconds)


def _read(run: Run) -> tuple[list[data.Batch], StepSums, float] | None:
    """This rank's batches of a step, the sums over all ranks, and the seconds that reading took.

    None, on all ranks, where the data have ended or a rank was asked to stop. A streamed dataset ends without notice,
    one reader after another: a step without rows is skipped, and when no reader has any, the data have ended.
    """
    empty, data_seconds = 0, 0.0
    while True:
        started, first_row = time.perf_counter(), run.dataloader.samples_consumed
        try:
            read = run.stop.read(lambda: [next(run.dataloader) for _ in range(run.dataloader.accumulation)])
        except StopIteration:
            return None
        if read is None and run.dataloader.has_ended:
            return None
        data_seconds += time.perf_counter() - started
        local = read or []
        own = StepSums(stop_flag=run.stop.flag(), save_flags=run.saving.pack_flags())
        if run.mesh.rank("pp", "cp", "tp") == 0:  # the others hold the same rows, which count once
            own.num_targets = sum(batch.num_targets for batch in local)
            own.num_rows = sum(batch.num_rows for batch in local)
            own.checksum = run.dataloader.step_hash
        sums = own.all_reduce(run.mesh)
        run.stop_flag = sums.stop_flag
        run.saving.unpack_flags(sums.save_flags)
        if run.stop_flag:
            return None
        left_out = run.guard.leaves_out(first_row, first_row + run.dataloader.global_batch)
        if not left_out and (not run.dataloader.ends_without_notice or sums.num_rows > 0):
            return local, sums, data_seconds
        empty += 0 if left_out else run.dataloader.global_batch
        run.state.samples_consumed = run.dataloader.samples_consumed
        if empty >= run.dataloader.num_readers and not left_out:
            return None
