"""Runner of a model with multi-token prediction and without pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardtrain.distributed import loss_at_head
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.cores import TokenBatch
from shardtrain.distributed.multi_token_loss import MultiTokenLoss
from shardtrain.distributed.runner import ModelParts, PlainRunner
from shardtrain.ops.linear_cross_entropy import linear_cross_entropy_sum


class MultiTokenRunner(PlainRunner):
    """Adds the losses of all depths to the gradients, see ``multi_token_loss``.

    Evaluation skips the depths, because they do not affect the logits of the next token.
    """

    def __init__(self, parts: ModelParts) -> None:
        super().__init__(parts)
        self._depths = MultiTokenLoss(parts.num_depths, parts.mesh, parts.config)

    def forward_backward(self, batches: Sequence[TokenBatch], weight: Tensor) -> Tensor:
        self._depths.begin_step(batches)
        return super().forward_backward(batches, weight)

    def measures(self) -> dict[str, float]:
        """Return the measures of the step, with the mean loss of each depth (a collective)."""
        return super().measures() | self._depths.measures()

    def _loss(self, batch: TokenBatch, weight: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super()._loss(batch, weight)
        model = self.parts[0]
        tokens_Bt, targets_Bt, positions_Bt = self._cut(batch)
        next_tokens_BtK, targets_BtK = self._depths.cut(batch)
        arguments = {
            "next_tokens_BTK": next_tokens_BtK,
            **context_parallel.document_argument([batch]),
        }

        # Without the fused head, the model returns the logits of all depths.
        num_tokens = targets_Bt.numel() + targets_BtK.numel()
        if not self._computes_loss_at_head(num_tokens):
            logits = model(tokens_Bt, positions_Bt, **arguments)
            main_BtV, logits_of_depths = self._depths.split(logits)
            loss = self._loss_of_logits(main_BtV, targets_Bt, weight)
            return self._depths.add(
                loss, logits_of_depths, targets_BtK, weight, self._plain_loss_of_logits
            )

        # With the fused head, the model passes the hidden states of all depths to ``loss_of``.
        main_chunk = self._chunk_at_head(targets_Bt)
        plain_chunk, _ = self._loss_function()

        def loss_of(hidden: Tensor, head_VD: Tensor) -> Tensor:
            def loss_of_depth(hidden_BtD: Tensor, targets_Bt: Tensor, weight: Tensor) -> Tensor:
                return linear_cross_entropy_sum(
                    hidden_BtD, head_VD, targets_Bt, weight, plain_chunk
                )

            main_BtD, hidden_of_depths = self._depths.split(hidden)
            loss = linear_cross_entropy_sum(main_BtD, head_VD, targets_Bt, weight, main_chunk)
            return self._depths.add(loss, hidden_of_depths, targets_BtK, weight, loss_of_depth)

        with loss_at_head.instead_of_logits(model, loss_of):
            return model(tokens_Bt, positions_Bt, **arguments)  # type: ignore[no-any-return]
