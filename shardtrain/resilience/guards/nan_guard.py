"""React to a step whose loss or gradient is not finite: skip the update, or stop the run."""

from __future__ import annotations

import torch
from torch import Tensor

from shardtrain import data
from shardtrain.distributed import process_group
from shardtrain.resilience.guards import nonfinite_tensor
from shardtrain.resilience.guards.loss_spikes import RECENT_STEPS, Guard
from shardtrain.resilience.watched_run import WatchedRun
from shardtrain.utils.errors import NumericalError, fix_first
from shardtrain.utils.log import logger


def stop_or_skip(run: WatchedRun, guard: Guard, loss: Tensor, local: list[data.Batch]) -> None:
    """Report the ranks whose numbers are not finite, and stop the run unless the update may be skipped. Collective.

    Raises:
        NumericalError: the update may not be skipped. All ranks raise it, with the ranks and the first
            non-finite tensor.
    """
    is_local = not bool(torch.isfinite(loss))
    # All ranks get here, because all know the same global loss and norm.
    ranks = process_group.gather_flags(is_local, run.mesh.device)
    step = run.state.step + 1
    if is_local:
        ids: list[int] = []
        for batch in local:
            ids += batch.sample_ids_B.tolist()
        logger.error(f"step {step}: the loss of this rank is not finite; sample ids {ids}")
    culprits = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "a gradient"
    # In float16, an occasional overflow at this loss scale is expected.
    if run.scaler and run.scaler.can_shrink:
        logger.warning(
            f"step {step}: {culprits} overflowed float16 at loss scale {run.scaler.scale:g}"
        )
        return
    # All ranks run a second forward pass to find the first non-finite tensor.
    first, advice = nonfinite_tensor.find(run, local, in_loss=bool(ranks))
    training = run.config.training
    skips = run.state.nonfinite_skips
    # Reason why this update may not be skipped although the policy is "skip".
    bound = ""
    if training.nonfinite_policy == "skip":
        if skips >= training.nonfinite_max_skips:
            bound = f"; {skips} updates in a row were skipped (training.nonfinite_max_skips)"
        elif not guard.may_skip(step, training.nonfinite_max_skip_fraction):
            count = sum(skipped > step - RECENT_STEPS for skipped in guard.skipped_steps)
            bound = f"; {count} of {RECENT_STEPS} updates were skipped (training.nonfinite_max_skip_fraction)"
        else:
            skipped = f"the update is skipped ({skips + 1} in a row)"
            logger.warning(f"step {step}: {culprits} is not finite; {first}; {skipped}")
            return
    if not bound:
        advice += ", or set training.nonfinite_policy=skip"
    raise NumericalError(
        fix_first(
            f"step {step}: {culprits} is not finite",
            advice,
            f"the weights are still those of step {step - 1}",
            f"{first}{bound}",
        )
    )
