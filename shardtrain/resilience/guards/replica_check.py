"""Ranks that hold the same numbers compare them: hardware that computes wrongly in silence is found and named."""

from __future__ import annotations

from torch import Tensor

from shardtrain.checkpoint import holders, replica_comparison
from shardtrain.checkpoint.collectives import all_gather_json
from shardtrain.checkpoint.holders import Held
from shardtrain.checkpoint.save import Saver
from shardtrain.distributed.grad_clip import NORMS_AGREE
from shardtrain.resilience.watched_run import WatchedRun
from shardtrain.utils.errors import NumericalError, fix_first
from shardtrain.utils.log import logger


class Replicas:
    """Parameters, buffers and the optimizer's state of which several ranks hold the same part: compared at intervals.

    Asked by all ranks together; idle with ``training.replica_check_interval = 0``. Saves compare for themselves.
    """

    def __init__(self, run: WatchedRun, checkpoints: Saver) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._interval = run.config.training.replica_check_interval
        self._held: dict[str, Held] | None = None

    def check(self, step: int) -> None:
        """Compare after every interval.

        Raises:
            NumericalError: on all ranks, when two differ; names the first tensor, the odd ranks, and the checkpoint
                to continue from.
        """
        if not self._interval or step % self._interval or self._run.mesh.device_mesh.size() == 1:
            return
        tensors = {**self._run.model_state_dict(), **self._run.optimizer_state_dict()}
        # who holds which part stays the same for the whole run
        if self._held is None:
            self._held = holders.find_holders(tensors)
            if not holders.num_replicated(self._held):
                logger.warning(
                    "training.replica_check_interval: no two ranks hold the same weights; counters are compared"
                )
        if odd := replica_comparison.find_odd(tensors, self._held, self._run.state.to_dict()):
            self._checkpoints.refuse(step, odd)


def refuse_norms(run: WatchedRun, norm: Tensor) -> None:
    """Stop before an update whose gradient norm is not the same on all ranks, as ``grad_clip.Agreement`` suspects.

    Raises:
        NumericalError: on all ranks the same; names the odd ranks.
    """
    step = run.state.step + 1
    norms = all_gather_json(float(norm))
    # the median is right as long as fewer than half of the ranks are wrong
    middle = sorted(norms)[len(norms) // 2]
    odd = [rank for rank, value in enumerate(norms) if abs(value - middle) > NORMS_AGREE * middle]
    if not odd:  # of many ranks, rounding in the sums that agree found
        return
    if 2 * len(odd) < len(norms):
        others = f"{middle:.6g} on the other {len(norms) - len(odd)}"
        who = f"{', '.join(f'{norms[rank]:.6g} on rank {rank}' for rank in odd[:8])} and {others}"
    else:
        who = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in enumerate(norms[:8]))
    raise NumericalError(
        fix_first(
            f"step {step}: the gradient norm is {who}, where all ranks must have the same",
            "at the first step correct the model's LAYOUT (shardtrain verify names what differs), later continue from "
            "the last checkpoint without the device that computes wrongly",
            f"the weights are still those of step {step - 1}",
        )
    )
