"""Compare the replicas of tensors between ranks, to detect hardware that silently computes wrong results."""

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
    """Periodic comparison of the parameters, buffers and optimizer states that several ranks hold.

    ``training.replica_check_interval = 0`` disables it. Saves have a separate comparison.
    """

    def __init__(self, run: WatchedRun, checkpoints: Saver) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._interval = run.config.training.replica_check_interval
        self._held: dict[str, Held] | None = None

    def check(self, step: int) -> None:
        """Compare the replicas if ``step`` is a multiple of the interval. Collective.

        Raises:
            NumericalError: replicas differ. All ranks raise it, with the first tensor, the ranks that differ,
                and the checkpoint from which to continue.
        """
        is_due = self._interval and step % self._interval == 0
        if not is_due or self._run.mesh.device_mesh.size() == 1:
            return
        tensors = {**self._run.model_state_dict(), **self._run.optimizer_state_dict()}
        # The ranks that hold each part do not change during a run, so find them only once.
        if self._held is None:
            self._held = holders.find_holders(tensors)
            if not holders.num_replicated(self._held):
                logger.warning(
                    "training.replica_check_interval: no two ranks have the same weights, so only counters are compared"
                )
        odd = replica_comparison.find_odd(tensors, self._held, self._run.state.to_dict())
        if odd:
            self._checkpoints.refuse(step, odd)


def refuse_norms(run: WatchedRun, norm: Tensor) -> None:
    """Stop before an update if the gradient norm differs between ranks. Collective.

    Called if ``grad_clip.Agreement`` suspects a difference.

    Raises:
        NumericalError: the norms differ. All ranks raise the same message, which names the ranks that differ.
    """
    step = run.state.step + 1
    norms = all_gather_json(float(norm))
    # The median is correct if fewer than half of the ranks are wrong.
    median = sorted(norms)[len(norms) // 2]
    tolerance = NORMS_AGREE * median
    odd = [rank for rank, value in enumerate(norms) if abs(value - median) > tolerance]
    # With many ranks, rounding in the sums may have caused the suspicion.
    if not odd:
        return
    # Without a majority, no rank is known to be right, so list them all.
    has_majority = 2 * len(odd) < len(norms)
    shown_ranks = odd if has_majority else list(range(len(norms)))
    values = ", ".join(f"{norms[rank]:.6g} on rank {rank}" for rank in shown_ranks[:8])
    if has_majority:
        values += f" and {median:.6g} on the other {len(norms) - len(odd)}"
    raise NumericalError(
        fix_first(
            f"step {step}: the gradient norm is {values}, but must be the same on all ranks",
            "at the first step, correct the model's LAYOUT (shardtrain verify names the difference); "
            "at a later step, continue from the last checkpoint without the faulty device",
            f"the weights are still those of step {step - 1}",
        )
    )
