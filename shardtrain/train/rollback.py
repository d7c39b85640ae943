"""Roll back after a loss spike: load an older checkpoint, and skip the data before and during the spike.

The method is PaLM's (Chowdhery et al. 2022, section 5.1): restart from a checkpoint about 100 steps before
the spike, without the data seen shortly before and during it. ``resilience/guards/loss_spikes.py`` detects
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
    """Load an older checkpoint in place, and skip the data of the steps before and during the spike (a
    collective).

    If no checkpoint is old enough, the run keeps the state before the spike and skips only the data of the
    spike. ``started_at`` is the step at which this process began.
    """
    training = run.config.training
    guard = run.resilience.guard
    # loading the checkpoint replaces these with an older history; they are restored below
    rewinds = guard.rewinds
    spikes = guard.spikes
    step = run.state.step + 1
    first_row = run.state.samples_consumed
    end_row = run.dataloader.samples_consumed
    # Reading a checkpoint takes long, and ranks wait for each other here.
    process_group.set_timeout(run.config.comm.init_timeout_seconds)
    run.runner.zero_grad()
    # Load the checkpoint, or without one keep the weights. In both cases the rows of the spike are skipped.
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
        rows_before_spike = (training.spike_skip_steps - 1) * run.dataloader.global_batch
        first_row = max(run.state.samples_consumed, first_row - rows_before_spike)
    # Record what was undone and skipped.
    run.resilience.ledger.rollback(run.state.step)
    guard.rewinds = [*rewinds, Rewind(step, run.state.step, first_row, end_row)]
    guard.spikes = spikes
    source = f" from {path}" if path else ""
    logger.warning(
        f"{why}; continuing after step {run.state.step}{source}, without rows {first_row} to {end_row - 1} in the "
        "order of the data"
    )
