"""Roll back after a loss spike: load an older checkpoint, and skip the data before and during the spike.

This is PaLM's method (Chowdhery et al. 2022, section 5.1): restart from a checkpoint about 100 steps before
the spike, and skip the data seen shortly before and during it. ``resilience/guards/loss_spikes.py`` detects
spikes.
"""

from __future__ import annotations

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.distributed import process_group
from shardtrain.resilience.guards.loss_spikes import Rewind, RollbackRequested
from shardtrain.train import resume
from shardtrain.train.run import Run
from shardtrain.utils.log import logger


def roll_back(run: Run, checkpoints: Checkpoints, why: RollbackRequested, started_at: int) -> None:
    """Load an older checkpoint in place, and skip the data before and during the spike (a collective).

    If no checkpoint is old enough, the run keeps its current weights, which the spike's step has not changed,
    and skips only the data of this step. ``started_at`` is the step at which this process started.
    """
    training = run.config.training
    guard = run.resilience.guard
    # Loading the checkpoint overwrites the guard's history with an older one. It is restored below.
    rewinds = guard.rewinds
    spikes = guard.spikes
    step = run.state.step + 1
    first_row = run.state.samples_consumed
    end_row = run.dataloader.samples_consumed
    # Raise the timeout, because ranks wait for each other while they read the checkpoint.
    process_group.set_timeout(run.config.comm.init_timeout_seconds)
    run.runner.zero_grad()
    # Load the checkpoint, or keep the weights if there is none. Either way, skip the rows of the spike.
    path = checkpoints.newest_good(step - training.spike_rewind_steps, started_at)
    if path is None:
        logger.warning(
            f"no checkpoint is {training.spike_rewind_steps} steps older than step {step}: "
            "no step is undone, and only the rows of the spike are skipped"
        )
        run.state.samples_consumed = end_row
    else:
        has_averages = resume.load(run, checkpoints, path, frozenset())
        if run.moving_average is not None and not has_averages:
            run.moving_average.restart()
        checkpoints.forget(range(run.state.step + 1, step), started_at)
        if checkpoints.snapshots is not None:
            checkpoints.snapshots.forget()
        rows_before_spike = (training.spike_skip_steps - 1) * run.dataloader.global_batch
        first_row = max(run.state.samples_consumed, first_row - rows_before_spike)
    # Record what was undone and skipped.
    run.resilience.ledger.rollback(run.state.step)
    guard.rewinds = [*rewinds, Rewind(step, run.state.step, first_row, end_row)]
    guard.spikes = spikes
    source = f" from {path}" if path else ""
    logger.warning(
        f"{why}; continuing after step {run.state.step}{source}, skipping rows {first_row} to {end_row - 1} of "
        "the data"
    )
