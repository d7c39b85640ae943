"""The load-balancing loss of ``transformers`` networks on a mesh (models/balance_loss.py).

The loss of a step equals the loss that one process would compute for the entire batch. For this, the routers'
choices and probabilities must be summed over all ranks and micro-batches before the first backward pass. With
one micro-batch and without pipeline stages, they are known after its forward pass. Otherwise an additional
forward pass without gradients counts them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.config.schema import Config
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.cores import TokenBatch
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.mesh import LOSS_AXES, Mesh
from shardtrain.ops import accelerator
from shardtrain.ops.targets import IGNORE


def apply(part: Any, mesh: Mesh, config: Config) -> None:
    """Attach the balance loss of a model or a pipeline stage to its routers, in place.

    Does nothing if the model has no balance loss. Must run after tensor parallelism, which replaces the
    forward of modules.
    """
    balance = getattr(part, "balance", None)
    if balance is None:
        return
    balance.install(part.hf)
    ranks = mesh.size("cp")
    if ranks > 1:
        is_balanced = context_parallel.is_balanced(config)
        balance.own_part = partial(
            sequence_part, rank=mesh.rank("cp"), size=ranks, balanced=is_balanced
        )


def of(parts: Sequence[nn.Module], mesh: Mesh) -> GlobalBalance | None:
    """Return the balance loss of this rank's modules, or None if the model is trained without one."""
    losses = [getattr(part, "balance", None) for part in parts]
    if not losses or losses[0] is None:
        return None
    return GlobalBalance(losses, mesh)


class GlobalBalance:
    """The balance loss of a step over all ranks.

    Args:
        losses: the ``models.balance_loss.BalanceLoss`` of each module of this rank.
        mesh: the ranks.
    """

    def __init__(self, losses: Sequence[Any], mesh: Mesh) -> None:
        self._losses = losses
        self._mesh = mesh
        self._value: Tensor | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager that counts the routers' choices. It must enclose all passes of a step."""
        for balance in self._losses:
            balance.start()
        try:
            yield
        finally:
            for balance in self._losses:
                balance.end()

    def count(self, run: Callable[[], Any]) -> None:
        """Run a forward pass without gradients, then restore the state of the random generators.

        The real forward pass after it draws the same random numbers, and so makes the same choices.
        """
        device = self._mesh.device
        devices = [device] if accelerator.is_accelerator(device) else []
        device_type = device.type if devices else "cuda"
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device_type):
            run()

    def sum_over_ranks(self, batches: Sequence[TokenBatch], weight: Tensor) -> None:
        """End counting, and prepare the gradients of the backward passes (a collective).

        Args:
            batches: this rank's micro-batches of the step.
            weight: factor of the main loss, which is a sum over targets. The factor of the balance loss is
                ``weight`` times the number of targets on all ranks: 1 if the main loss is a mean.
        """
        device = self._mesh.device
        first, *others = self._losses
        sums_2E = first.local_sums(device)
        for balance in others:
            sums_2E = sums_2E + balance.local_sums(device)
        num_targets = sums_2E.new_zeros(1)
        # Ranks along pp and cp read the same batches, so only the first one counts the targets.
        if self._mesh.rank("pp", "cp") == 0:
            for batch in batches:
                num_targets += (batch.targets_BT != IGNORE).sum()
        summands = torch.cat([sums_2E.flatten(), num_targets])
        # Do not sum over tp, because tensor-parallel ranks route the same tokens. Do sum over pp: the loss
        # uses sums over all layers, and each stage has only some.
        totals = self._mesh.sum(summands, over=(*LOSS_AXES, "pp"))
        scale = weight.to(totals.dtype) * totals[-1]
        for balance in self._losses:
            self._value = balance.set_totals(totals[:-1].view_as(sums_2E), scale)

    def measures(self) -> dict[str, float]:
        """Return ``moe_aux_loss``: the balance loss of the last step times its coefficient.

        It is equal on all ranks.
        """
        return {} if self._value is None else {"moe_aux_loss": self._value.item()}
