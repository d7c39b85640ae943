"""The trainer: build, loop, step. Read this file first.

One process per device runs ``main``. A step reads this rank's batches, counts the target tokens of all
ranks, and runs forward and backward with the loss divided once by that count. Then it computes the gradient
norm, checks that loss and norm are finite, clips, and updates. ``run.resilience`` contains the watchdog, the
handling of signals, and the guards on loss and norm. ``shutdown`` saves, and ends a run before its last step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch.distributed import Store

from shardtrain import config as configs
from shardtrain import data, optim
from shardtrain.checkpoint.collectives import first_rank
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.snapshots import Snapshots
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config import Loaded
from shardtrain.data.data_budget import check_has_targets
from shardtrain.data.file_hashes import Contents
from shardtrain.distributed import BATCH_AXES, compile, config_consistency, grad_clip, process_group
from shardtrain.distributed.process_group import World
from shardtrain.distributed.rendezvous import gloo_sockets
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
from shardtrain.train.resume import resume, take_snapshot
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
    """Train as one rank of the job that the environment variables describe.

    Raises:
        ShardtrainError: an error that the user can fix.
    """
    resilience = Resilience()
    with joined(loaded, resilience) as world:
        return train(loaded, world, resilience)


@contextmanager
def joined(loaded: Loaded, resilience: Resilience) -> Iterator[World]:
    """Context manager: join the process group, compare the configurations of all ranks, start the watchdog,
    and open the log.
    """
    config = loaded.config
    # PyTorch reads these variables when the process group starts
    os.environ.update(flight_recorder_environment(config, Path(config.job.dump_folder)))
    # These lines are logged later, when the log is open.
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
        # Check the rules about devices again, because the ranks' devices are known only now.
        num_devices = world.size if accelerator.is_accelerator(world.device) else None
        notices = configs.require(loaded, world.size, world.device.type, num_devices)
        if world.device.type == "cpu":
            notices = (*notices, *configs.without_effect_on_a_cpu(config))
        run_folder.open_log(loaded, world, notices, model_check_lines)
        with device_kernels.prefer_attention(world.device, config.training.flash_attention):
            yield world


def train(loaded: Loaded, world: World, resilience: Resilience | None = None) -> TrainState:
    """Build the run, resume it from its newest checkpoint if it has one, and train to its end."""
    # Do this first, because everything below depends on the batch size.
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
    """Context manager: build the run, and resume it from its newest checkpoint.

    At the end, the lease of the folder is released, also after an error.
    """
    config = loaded.config
    folder = Path(loaded.config.job.dump_folder)
    checkpoints = Checkpoints(config)
    contents = Contents()
    try:
        checkpoints.take_run_folder()
        if config.checkpoint.snapshot_interval:
            checkpoints.snapshots = Snapshots(config, gloo_sockets.private)
        # Do this before the model is built, because parallelize() uses the kernels that are chosen here.
        set_numerics(config, world.device)
        with _heartbeat("building the model and opening its data", world):
            run = build(config, world)
        run.resilience = resilience
        run.snapshots = checkpoints.snapshots
        if world.rank == 0:
            contents = run.contents = Contents(getattr(run.dataloader, "files_to_hash", ()), folder)
        # If data files differ from their recorded hashes, stop the run before a checkpoint is loaded.
        first_rank(contents.check_now)
        with _heartbeat("loading the checkpoint", world):
            resume(run, checkpoints)
        # Start a thread that hashes large data files while training runs.
        contents.start(run.state.step)
        if world.rank == 0:
            certificate = run_folder.certificate_line(loaded, run)
            # The commands generate, evaluate and export read this file.
            run_folder.write_resolved_config(loaded, folder, world.size, certificate)
        split_sequences.check_run(run)
        if run.dataloader.masks_documents:
            document_isolation.check_run(run)
        # Do this after resume(), because the goodput ledger continues from the step of the checkpoint.
        resilience.open_ledger(folder, run.state.step, world)
        shutdown.prepare(run, checkpoints)
        yield run, checkpoints
    finally:
        contents.close()
        # Release the lease for other runs of the folder.
        checkpoints.close()


def _heartbeat(activity: str, world: World) -> AbstractContextManager[None]:
    """Context manager that logs a line on rank 0 every few seconds."""
    # An interval of 0 disables the lines on the other ranks.
    seconds = None if world.rank == 0 else 0
    return heartbeat(activity, seconds, logger.info)


def run_to_end(loaded: Loaded, world: World, run: Run, checkpoints: Checkpoints) -> TrainState:
    """Train to the end of the run. Roll back to a checkpoint when the loss spike policy requires it."""
    config = loaded.config
    folder = Path(loaded.config.job.dump_folder)
    rows = run.dataloader.num_samples
    rows_per_epoch = run.dataloader.places_per_epoch

    # Log a description of the run.
    for line in run_folder.describe(
        loaded, run.mesh, run.num_params, run.total_steps, rows, rows_per_epoch
    ):
        logger.info(line)

    # Prepare validation and samples. Only rank 0 writes the file of samples.
    validator = None
    if config.validation.enable:
        weights: Callable[[], AbstractContextManager[object]] = run.evaluation_weights
        if config.validation.use_ema:
            assert run.moving_average is not None
            weights = run.moving_average.in_model
        validator = Validator(
            config, run.runner, run.mesh, run.resilience.stop, rows_per_epoch, weights
        )
    folder_of_samples = folder if world.rank == 0 else None
    samples = Samples(config, run.runner, run.mesh, folder_of_samples, run.state.step)
    started_at = run.state.step

    def phase() -> str:
        return run.resilience.phases.name

    # Train to the end. After each rollback, start this loop again.
    with run.resilience.ledger:
        while True:
            try:
                # Create the metrics again after a rollback, because their counts and files roll back too.
                with Metrics(
                    config,
                    folder,
                    run_facts(run, world),
                    ReduceOverMesh(run.mesh),
                    run.state.tokens_seen,
                    phase=phase,
                ) as metrics:
                    _steps(run, world, checkpoints, validator, samples, metrics)
                    # The last step is saved, so ignore requests to stop from now on.
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
    """Run steps to the end of the run. Log, validate, sample and save when it is due."""
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
        # The previous process of this run stopped before it had validated its last step. Catch up first.
        if run.owes_validation:
            _finish_step(run, checkpoints, validator, samples, metrics)
        while state.step < run.total_steps and not run.owes_validation:
            # The thread that hashes the data files cannot stop the run itself, so it leaves its error here.
            if run.contents.problem:
                raise run.contents.problem

            if run.runner.token_metrics:
                run.runner.token_metrics.is_on = metrics.is_log_step(state.step + 1)
            try:
                with resilience.watch_step(state):
                    outcome = step(run)
            except Exception as error:
                raise shutdown.explain(error, run) from error
            # The data have ended, or a rank has received a request to stop.
            if outcome is None:
                break
            # The first step has compiled the layers, so graph breaks are known now.
            if run.config.compile.enable and state.step == started_at + 1:
                not_compiled = compile.graph_break_warning(run.config)
                if not_compiled:
                    logger.warning(not_compiled)
            # Steps without any target token train nothing. This raises after several of them.
            if not state.tokens_seen:
                check_has_targets(config, state.step, run.total_steps)

            update_metrics(run, metrics, outcome)

            # Do this before saving, because weights that differ between replicas must not be saved.
            resilience.compare_replicas(run, checkpoints)
            _finish_step(run, checkpoints, validator, samples, metrics)
            collector.step(state.step)
            if trace:
                # Writing the trace of a large model takes minutes, which is not a hang.
                with activity.slow():
                    trace.step()
            resilience.end_step(config)

    resilience.phases.begin("end")
    data_have_ended = started_at < state.step < run.total_steps and not (
        resilience.stop_flag or run.owes_validation
    )
    if validator and data_have_ended and validator.is_due(state.step, state.step):
        # Validation is always due after the last step. Only now is it known that this step was the last.
        # Early stopping may also end the run here.
        _validate(run, validator, metrics, checkpoints)
    if resilience.stop_flag or run.owes_validation:
        # Save, and leave the run with an exception.
        shutdown.leave(run, checkpoints)
    if state.step < run.total_steps:
        shutdown.data_ended(run, checkpoints)


def update_metrics(run: Run, metrics: Metrics, outcome: Outcome) -> None:
    """Add the results of the last step to the metrics (a collective on log steps, which are the same on all ranks)."""
    state = run.state
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
        flops_per_token=outcome.flops_per_token,
        source_sums=outcome.source_sums,
    )


def _finish_step(
    run: Run,
    checkpoints: Checkpoints,
    validator: Validator | None,
    samples: Samples,
    metrics: Metrics,
) -> None:
    """Validate, sample and save after a step, each if it is due.

    If a request to stop cancels the validation, this function returns early and the run ends. The resumed run
    calls it again before its first step. The checkpoint of this step then contains the validation's result,
    as it would without the request.
    """
    step = run.state.step
    if validator and (run.owes_validation or validator.is_due(step, run.total_steps)):
        _validate(run, validator, metrics, checkpoints)
        if run.owes_validation:
            return
    if samples.every_steps and step % samples.every_steps == 0:
        with metrics.pause(), run.resilience.phase("validation"), run.evaluation_weights():
            samples.run(step)

    # Save after the validation, because the checkpoint contains its result.
    if checkpoints.saving.writing is not None:
        # a background save may have finished
        checkpoints.poll()
    if checkpoints.is_due(step, run.total_steps):
        shutdown.save_after_step(run, checkpoints, metrics.pause)
    # A step that was just saved needs no snapshot.
    if run.snapshots is not None and run.snapshots.is_due(step) and checkpoints.saved_step < step:
        with run.resilience.phase("checkpoint"):
            take_snapshot(run, checkpoints)


def _validate(run: Run, validator: Validator, metrics: Metrics, checkpoints: Checkpoints) -> None:
    """Evaluate on the validation data, and log and store the result.

    If a request to stop cancelled it, set ``run.owes_validation``.
    """
    with metrics.pause(), run.resilience.phase("validation"):
        evaluation = validator.run(run.state.step)
    run.owes_validation = evaluation is None
    if evaluation is None:
        step = run.state.step
        logger.warning(
            f"validation after step {step} was cancelled by a request to stop; it is repeated when the run resumes"
        )
        return
    metrics.validation(run.state.step, evaluation.values)
    shutdown.note_validation(run, checkpoints, evaluation.values)


def step(run: Run) -> Outcome | None:
    """Run one optimizer step (a collective).

    Returns None on every rank if the data have ended, or a rank has received a request to stop.
    """
    config = run.config
    mesh = run.mesh
    state = run.state

    # Read this rank's micro-batches, and sum the counts of tokens over all ranks.
    with run.resilience.phase("data"):
        data_of_step = _read_step(run)
    if data_of_step is None:
        return None
    host_batches, sums, data_seconds = data_of_step
    if run.runner.counts_filler:
        host_batches = data.mark_filler(host_batches)
    batches = [batch.to(mesh.device, non_blocking=True) for batch in host_batches]
    # Seed dropout. Masks differ between ranks.
    # The seed includes the step, so a resumed run draws the same masks.
    seed_step(
        config.debug.seed,
        state.step,
        mesh.rank("pp"),
        mesh.rank(*BATCH_AXES),
        mesh.rank("cp", "tp"),
    )

    # Run forward and backward. The loss is divided only here, by the number of target tokens on all ranks. So
    # gradients are summed over micro-batches and ranks, and no later reduction takes a mean.
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
    # Set the learning rate before backward, because the optimizer may update during backward.
    optim.set_learning_rate(run.optimizer, lr)
    loss = run.runner.forward_backward(batches, weight)
    if noise is not None:
        noise.end_step()
    if source_losses is not None:
        source_losses.end_step()

    # Once a rank has completed this step, the snapshot before it must be complete on all ranks. So every rank
    # waits for its part before the next collective.
    if run.snapshots is not None:
        run.snapshots.wait()

    # All ranks must agree on loss and norm. If they took different branches below, they would deadlock.
    norm = run.runner.gradient_norm() / scale
    agreement = grad_clip.Agreement(loss / scale, norm, mesh)

    # Update. If possible, the device decides whether to apply the update. Then the host can queue it before
    # it has read loss and norm. Otherwise the host decides after it has read them.
    max_norm = config.training.max_norm
    decision = agreement.on_device(max_norm) if run.decides_on_device else None
    if decision:
        _update(run, torch.where(decision.applies, decision.factor / scale, 1.0), decision.applies)
    # This is the only point of a step where the host waits for the device.
    agreed = agreement.read(decision)
    # This raises if the run must stop or roll back.
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
        _flops_per_token(run, host_batches),
        None if source_losses is None else source_losses.sums_2S,
    )


def _flops_per_token(run: Run, batches: list[data.Batch]) -> float:
    """Return the FLOPs per token of a step, which a sequence ramp changes."""
    if not run.flops_of_lengths:
        return run.flops_per_token
    return run.flops_of_lengths[batches[0].tokens_BT.size(1)]


def _update(run: Run, factor: float | torch.Tensor, applies: torch.Tensor | None = None) -> None:
    """Scale the gradients and step the optimizer.

    If ``applies`` is given, it is a boolean tensor, and the update changes nothing if it is False.
    """
    grad_clip.scale_gradients(run.runner.parameters().values(), factor)
    if applies is None:
        run.runner.update(run.optimizer)
    else:
        run.runner.update(run.optimizer, applies)
    if run.moving_average is not None:
        run.moving_average.update(applies)


def _read_step(run: Run) -> tuple[list[data.Batch], StepSums, float] | None:
    """Return this rank's batches of a step, the sums over all ranks, and the seconds spent reading.

    A collective. Returns None on all ranks if the data have ended, or a rank has received a request to stop.

    The length of a streamed dataset is not known in advance, and its readers finish at different times. A
    reader that has finished returns empty rows. If no rank has a row, the step is skipped. The data have
    ended once every reader has returned an empty row in such steps.
    """
    loader = run.dataloader
    resilience = run.resilience
    empty_rows = 0
    data_seconds = 0.0
    while True:
        # Read this rank's rows. This may wait for workers or storage.
        started = time.perf_counter()
        first_row = loader.samples_consumed
        num_rows = loader.global_batch
        try:
            batches = resilience.stop.read(
                lambda: [next(loader) for _ in range(loader.accumulation)]
            )
        except StopIteration:
            return None
        if batches is None and loader.has_ended:
            return None
        data_seconds += time.perf_counter() - started
        # If a request to stop ended the wait, there are no batches. The flags below notify the other ranks.
        batches = batches or []
        # Take part in the first collective of the step, whatever this rank has read.
        local_sums = StepSums(flags=resilience.pack_flags())
        # All pp, cp and tp ranks of a data-parallel group read the same rows. Only the first one counts them.
        if run.mesh.rank("pp", "cp", "tp") == 0:
            local_sums.num_targets = sum(batch.num_targets for batch in batches)
            local_sums.num_tokens = sum(batch.num_tokens for batch in batches)
            local_sums.num_rows = sum(batch.num_rows for batch in batches)
            local_sums.checksum = loader.step_hash
        sums = local_sums.all_reduce(run.mesh)
        if resilience.unpack_flags(sums.flags):
            return None

        # Every rank computes the same values from here on, because they depend only on the sums. Skip rows
        # that a rollback excludes, and steps in which no rank has a row.
        is_excluded = resilience.excludes(first_row, first_row + num_rows)
        has_rows = sums.num_rows > 0 or not loader.has_unknown_end
        if has_rows and not is_excluded:
            return batches, sums, data_seconds
        run.state.samples_consumed = loader.samples_consumed
        if is_excluded:
            continue
        empty_rows += num_rows
        if empty_rows >= loader.num_readers:
            return None
