"""What happens to a step whose loss or gradient is no finite number: the update is skipped, or the run stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardtrain import data
from shardtrain.errors import NumericalError
from shardtrain.log import logger
from shardtrain.parallel import world

if TYPE_CHECKING:
    from shardtrain.run import Run


def stop_or_skip(run: Run, loss: Tensor, local: list[data.Batch]) -> None:
    """Say which rank's numbers went wrong, and stop the run unless it may skip; the same on all ranks."""
    own = [] if bool(torch.isfinite(loss)) else [run.mesh.device_mesh.get_rank()]
    ranks = world.gather_flags(bool(own), run.mesh.device)
    if own:
        ids = [int(i) for batch in local for i in batch.sample_ids_B]
        logger.error(f"step {run.state.step + 1}: the loss of this rank is not finite; sample ids {ids}")
    culprits = f"the loss of rank {', '.join(map(str, ranks))}" if ranks else "a gradient"
    policy, skips = run.config.training.nonfinite_policy, run.state.nonfinite_skips
    if run.scaler and run.scaler.can_shrink:
        logger.warning(f"step {run.state.step + 1}: {culprits} overflowed float16 at loss scale {run.scaler.scale:g}")
    elif policy == "skip" and skips < run.config.training.nonfinite_max_skips:
        logger.warning(
            f"step {run.state.step + 1}: {culprits} is not finite; the update is skipped ({skips + 1} in a row)"
        )
    else:
        raise NumericalError(
            f"step {run.state.step + 1}: {culprits} is not finite; the weights are still those of step "
            f"{run.state.step}; lower optimizer.lr, look at the samples named in the rank's log, or set "
            "training.nonfinite_policy=skip"
        )
