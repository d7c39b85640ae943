"""What happens to a step whose loss or gradient is not a finite number: the update is skipped, or the run stops."""

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
    """Say which rank's numbers went wrong, and stop the run unless it may skip; the same on all ranks.

    Raises:
        NumericalError: unless the update may be skipped; names ranks and the first bad tensor.
    """
    own = [] if bool(torch.isfinite(loss)) else [run.mesh.device_mesh.get_rank()]
    # a collective: every rank is here, as all know the same loss and norm
    ranks = process_group.gather_flags(bool(own), run.mesh.device)
    step = run.state.step + 1
    if own:
        ids = [int(i) for batch in local for i in batch.sample_ids_B]
        logger.error(f"step {step}: the loss of this rank is not finite; sample ids {ids}")
    culprits = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "a gradient"
    # float16 alone: an overflow at this scale is expected now and then
    if run.scaler and run.scaler.can_shrink:
        logger.warning(f"step {step}: {culprits} overflowed float16 at loss scale {run.scaler.scale:g}")
        return
    # a second forward pass, by all ranks: which tensor was the first
    first, advice = nonfinite_tensor.find(run, local, in_loss=bool(ranks))
    training = run.config.training
    skips = run.state.nonfinite_skips
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
    raise NumericalError(
        fix_first(
            f"step {step}: {culprits} is not finite",
            f"{advice}{'' if bound else ', or set training.nonfinite_policy=skip'}",
            f"the weights are still those of step {step - 1}",
            f"{first}{bound}",
        )
    )
