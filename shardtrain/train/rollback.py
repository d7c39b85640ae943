"""Going back from a spike of the loss: the state of an older checkpoint, and the data before the spike left out.

PaLM's way (Chowdhery et al. 2022, section 5.1): from a checkpoint about 100 steps before the spike, without the data
seen before and during it. What counts as a spike is decided in ``resilience/guards/loss_spikes.py``.
"""

from __future__ import annotations

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.distributed import process_group
from shardtrain.resilience.guards.loss_spikes import Rewind, RollbackRequested
from shardtrain.train import resume
from shardtrain.train.run import Run
from shardtrain.utils.log import logger


def roll_back(run: Run, checkpoints: Checkpoints, why: RollbackRequested, started_at: int) -> None:
    """Take the state of an older checkpoint in place, and leave out the data of the steps before and with the spike.

    Without a checkpoint that is old enough the state stays that before the spike, and its data alone are left out.
    ``started_at`` is the step at which this process began. A collective.
    """
    training = run.config.training
    guard = run.resilience.guard
    # the checkpoint holds an older history: what happened since then is put back below
    rewinds = guard.rewinds
    spikes = guard.spikes
    step = run.state.step + 1
    first_row = run.state.samples_consumed
    end_row = run.dataloader.samples_consumed
    process_group.set_timeout(run.config.comm.init_timeout_seconds)  # ranks wait for each other's reading
    run.runner.zero_grad()
    path = checkpoints.newest_good(step - training.spike_rewind_steps, started_at)
    if path is None:
        logger.warning(f"no checkpoint is {training.spike_rewind_steps} steps older than step {step}: none is undone")
        run.state.samples_consumed = end_row
    else:
        resume.load(run, checkpoints, path, frozenset())
        checkpoints.forget(range(run.state.step + 1, step), started_at)
        first_row = max(
            run.state.samples_consumed, first_row - (training.spike_skip_steps - 1) * run.dataloader.global_batch
        )
    run.resilience.ledger.rollback(run.state.step)
    guard.rewinds = [*rewinds, Rewind(step, run.state.step, first_row, end_row)]
    guard.spikes = spikes
    logger.warning(
        f"{why}; continuing after step {run.state.step}{f' from {path}' if path else ''}, without rows {first_row} to "
        f"{end_row - 1} of the order of the data"
    )
