"""The training loss of multi-token prediction (DeepSeek-V3, section 2.2).

With K depths and the option ``mtp_loss_scaling_factor`` f, the loss of a step is

    L_0 + f / K (L_1 + ... + L_K)

L_0 is the loss of the next token. L_k is the mean loss of the token k + 1 positions ahead. It is the sum over the
target tokens of depth k in all micro-batches of all ranks, divided once by the number of these tokens. So it depends
neither on the mesh nor on gradient accumulation. A token has a target of depth k if the token k positions later has a
target, and is in the same document of the same row.

The reported loss is L_0, so it is comparable with validation and with runs without these layers. L_1 to L_K are
separate metrics.

Shape suffixes: B batch, T tokens of full rows, t tokens of this rank, K depths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardtrain.config.schema import Config
from shardtrain.distributed.context_parallel.cores import TokenBatch, is_balanced
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.mesh import BATCH_AXES, LOSS_AXES, Mesh
from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.next_tokens import targets_ahead, tokens_ahead
from shardtrain.ops.targets import IGNORE

LossOfDepth = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps outputs (B, t, ...), targets (B, t) and a scalar weight to the weighted sum of the losses."""


class MultiTokenLoss:
    """Tokens, targets and losses of the depths of a step."""

    def __init__(self, num_depths: int, mesh: Mesh, config: Config) -> None:
        self._num_depths = num_depths
        self._mesh = mesh
        self._is_balanced = is_balanced(config)
        self._factor = config.training.mtp_loss_scaling_factor
        self._ratio_K = torch.zeros(num_depths, device=mesh.device)
        """Weight of a token's loss at each depth, relative to its weight at depth 0."""
        self._counts_K = torch.zeros(num_depths, dtype=sum_dtype(mesh.device), device=mesh.device)
        """Target tokens of each depth in the step, on all ranks."""
        self._sums_K = torch.zeros_like(self._counts_K)
        """Sums of the losses of each depth in the step, on this rank."""

    def begin_step(self, batches: Sequence[TokenBatch]) -> None:
        """Count the targets of a step (a collective). Call it before the first forward pass."""
        # element 0 counts the targets of the main loss, and element k those of depth k
        counts = self._counts_K.new_zeros(1 + self._num_depths)
        for batch in batches:
            counts[0] += (batch.targets_BT != IGNORE).sum()
            counts[1:] += (self._targets(batch) != IGNORE).sum(dim=(0, 1))
        counts = self._mesh.sum(counts, over=BATCH_AXES)
        # The runner's weight divides by the number of targets of depth 0. The ratio cancels this number, and divides
        # by the number of targets of the depth instead.
        num_main = counts[0].clamp_min(1)
        self._counts_K = counts[1:]
        factor_per_depth = self._factor / self._num_depths
        ratio_K = factor_per_depth * num_main / self._counts_K.clamp_min(1)
        self._ratio_K = ratio_K.float()
        self._sums_K = torch.zeros_like(self._counts_K)

    def cut(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of all depths for this rank's part of each sequence, (B, t, K) each."""
        # Shift before the sequences are split, because the tokens ahead may be on other ranks
        tokens_BTK = tokens_ahead(batch.tokens_BT, batch.documents_BT, self._num_depths)
        targets_BTK = self._targets(batch)
        size = self._mesh.size("cp")
        if size == 1:
            return tokens_BTK, targets_BTK
        rank = self._mesh.rank("cp")
        return (
            sequence_part(tokens_BTK, rank, size, self._is_balanced),
            sequence_part(targets_BTK, rank, size, self._is_balanced),
        )

    def split(self, outputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Split outputs ((1 + K) B, ...) into the output of depth 0 and the outputs of depths 1 to K."""
        main, *depths = outputs.chunk(1 + self._num_depths)
        return main, depths

    def add(
        self,
        main_loss: Tensor,
        depths: Sequence[Tensor],
        targets_BtK: Tensor,
        weight: Tensor,
        loss_of: LossOfDepth,
    ) -> Tensor:
        """Add the gradients of the losses of depths 1 to K to the main loss, without changing its value.

        Args:
            main_loss: ``weight`` times the loss sum of depth 0.
            depths: outputs of depths 1 to K.
            targets_BtK: targets of depths 1 to K.
            weight: weight of a token's loss at depth 0.
            loss_of: computes the loss of one depth.
        """
        loss = main_loss
        for depth, outputs in enumerate(depths):
            weight_of_depth = weight * self._ratio_K[depth]
            targets_Bt = targets_BtK[..., depth].contiguous()
            extra = loss_of(outputs, targets_Bt, weight_of_depth)
            self._sums_K[depth] += extra.detach().to(self._sums_K.dtype) / weight_of_depth
            # The difference has the gradient of the loss and the value 0 (NaN if the loss is not finite)
            loss = loss + (extra - extra.detach())
        return loss

    def measures(self) -> dict[str, float]:
        """Return the mean loss of each depth in the step, equal on all ranks (a collective)."""
        sums_K = self._mesh.sum(self._sums_K, over=("pp", *LOSS_AXES))
        means_K = (sums_K / self._counts_K.clamp_min(1)).tolist()
        return {f"mtp_loss_{depth}": mean for depth, mean in enumerate(means_K, start=1)}

    def _targets(self, batch: TokenBatch) -> Tensor:
        return targets_ahead(batch.targets_BT, batch.documents_BT, self._num_depths)
