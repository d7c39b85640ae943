"""What happens to a step whose loss or gradient norm is far above those before, decided before its update.

The rule is OLMo-core's (``guard.py``). Going back is PaLM's way (Chowdhery et al. 2022, section 5.1): from a checkpoint
about 100 steps before the spike, without the data seen before and during it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.distributed import process_group
from shardtrain.resilience.guards.history import Rewind
from shardtrain.train import resume
from shardtrain.utils.errors import NumericalError
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run


class RollbackRequested(Exception):
    """Leaves a step whose update is not to be applied, on all ranks alike; see ``rollback``."""


def may_apply(run: Run, loss: float, grad_norm: float) -> bool:
    """Judge a step by its global loss and gradient norm, which are finite and equal on all ranks.

    Raises:
        RollbackRequested: with ``training.spike_policy = "rewind"``, at a spike.
        NumericalError: when it has gone back from here too often.
    """
    training, guard, step = run.config.training, run.guard, run.state.step + 1
    if training.spike_policy == "off":
        return True
    found = guard.find_spike(loss, grad_norm, training.spike_window, training.spike_sigmas)
    if found:
        guard.spikes += 1
        if training.spike_policy == "rewind":
            near = sum(abs(step - rewind.step) <= training.spike_rewind_steps for rewind in guard.rewinds)
            if near < training.max_rewinds:
                raise RollbackRequested(f"step {step}: {found}")
            raise NumericalError(
                f"step {step}: {found}, and the run went back from here {near} times (training.max_rewinds); the "
                f"weights are still those of step {run.state.step}; lower optimizer.lr, or look at the data"
            )
        skips = training.spike_policy == "skip"
        logger.warning(f"step {step}: spike: {found}{'; the update is skipped' if skips else ''}")
    guard.add(loss, grad_norm, training.spike_window)
    return not (found and training.spike_policy == "skip")


def rollback(run: Run, checkpoints: Checkpoints, why: RollbackRequested, started_at: int) -> None:
    """Take the state of an older checkpoint in place, and leave out the data of the steps before and with the spike.

    Without a checkpoint that is old enough the state stays that before the spike, and its data alone are left out.
    ``started_at`` is the step at which this process began. A collective.
    """
    training, guard = run.config.training, run.guard
    rewinds, spikes, step = guard.rewinds, guard.spikes, run.state.step + 1
    first_row, end_row = run.state.samples_consumed, run.dataloader.samples_consumed
    process_group.set_timeout(run.config.comm.init_timeout_seconds)  # ranks wait for each other's reading
    run.runner.forget_gradients()
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
    run.ledger.rollback(run.state.step)
    guard.rewinds, guard.spikes = [*rewinds, Rewind(step, run.state.step, first_row, end_row)], spikes
    logger.warning(
        f"{why}; going on after step {run.state.step}{f' from {path}' if path else ''}, without rows {first_row} to "
        f"{end_row - 1} of the order of the data"
    )
