"""A runner for losses that the caller defines on outputs per token, as reinforcement learning does.

The outputs are log-probabilities and entropies of a language model, or the values of a model with one output. The
caller gets them for full sequences on any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardtrain.distributed import expert_parallel
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.gather import natural_order
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.pipeline_parallel import PipelineRunner
from shardtrain.distributed.runner import ModelParts, PlainRunner, Runner
from shardtrain.ops.targets import FILLER_DOCUMENT
from shardtrain.ops.token_probabilities import token_probabilities

Outputs = dict[str, Tensor]
"""Tensors (B, T) by name: "log_probs" and "entropy", or "values"."""


@dataclass(frozen=True)
class TokenLossBatch:
    """A micro-batch with its loss. All tensors are (B, T).

    Attributes:
        targets_BT: the token that follows each token.
        positions_BT: position of each token in its document.
        temperatures_BT: divisors of the logits.
        documents_BT: number of each token's document, or None; see ``data.Batch``.
        loss: computes the loss from the outputs for full sequences. Called on every rank that has outputs.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    positions_BT: Tensor
    temperatures_BT: Tensor
    documents_BT: Tensor | None
    loss: Callable[[Outputs], Tensor]


def with_token_losses(plain: Runner, has_values: bool) -> TokenLossRunner | TokenLossPipeline:
    """Return a runner of the same model whose batches are ``TokenLossBatch``.

    Args:
        has_values: True for a model with one output per token, which is its value.
    """
    if isinstance(plain, PipelineRunner):
        return TokenLossPipeline(plain, has_values)
    return TokenLossRunner(plain, has_values)


class TokenLossRunner(PlainRunner):
    """Runner of a model without pipeline stages. Batches are ``TokenLossBatch``.

    Args:
        has_values: as for ``with_token_losses``.
    """

    def __init__(self, plain: Runner, has_values: bool) -> None:
        super().__init__(plain.model_parts)
        self._has_values = has_values

    @property
    def counts_filler(self) -> bool:
        """Always False, because the caller marks padding tokens."""
        return False

    def forward_only(self, batches: Sequence[TokenLossBatch]) -> None:
        """Call the loss of each batch without gradients (a collective)."""
        if self._before_pass:
            self._before_pass()
        weight = torch.ones((), device=self._mesh.device)
        with torch.no_grad():
            for batch in batches:
                self._loss(batch, weight)

    def _select_rows(self, index: int, batch: Any) -> None:
        """Do nothing, because only next-token training has embedding noise and losses by source."""

    def _loss(self, batch: Any, weight: Tensor) -> Tensor:
        # The caller's loss has no balance loss, and the load must not change router biases.
        if self._has_experts:
            expert_parallel.count(self.parts, False)
        tokens_Bt, _, positions_Bt = self._cut(batch)
        documents = context_parallel.document_argument([batch])
        out_BtV = self.parts[0](tokens_Bt, positions_Bt, **documents)
        outputs = token_outputs(out_BtV, batch, self.model_parts, self._has_values)
        return batch.loss(outputs) * weight  # type: ignore[no-any-return]


class TokenLossPipeline(PipelineRunner):
    """Runner of the pipeline stages of this rank. Batches are ``TokenLossBatch`` with one row.

    Their number and lengths may differ between passes. Only ranks with the last stage call the losses.

    Args:
        plain: the runner of the stages. It must not be used any more.
        has_values: as for ``with_token_losses``.
    """

    def __init__(self, plain: PipelineRunner, has_values: bool) -> None:
        # Take over the stages and everything that was derived from them.
        vars(self).update(vars(plain))
        self._has_values = has_values
        self._batches: list[TokenLossBatch] = []

    @property
    def counts_filler(self) -> bool:
        """Always False, because the caller marks padding tokens."""
        return False

    def forward_backward(self, batches: Sequence[Any], weight: Tensor) -> Tensor:
        self._begin(batches)
        return super().forward_backward(self._batches, weight)

    def forward_only(self, batches: Sequence[TokenLossBatch]) -> None:
        """Call the loss of each batch without gradients (a collective)."""
        self._begin(batches)
        self._weight = torch.ones((), device=self._mesh.device)
        self._ties.copy_weights(self.parts)
        if self._before_pass:
            self._before_pass()
        with torch.no_grad():
            self._run(self._schedule.eval, self._batches)

    def _begin(self, batches: Sequence[TokenLossBatch]) -> None:
        """Pad batches to equal lengths, and build a schedule for them."""
        if self._has_experts:
            expert_parallel.count(self.parts, False)
        longest = max(batch.tokens_BT.size(1) for batch in batches)
        padded = [_padded(batch, longest) for batch in batches]
        # Schedules need a multiple of the number of stages. Additional batches have no loss.
        while len(padded) % (self._last + 1):
            padded.append(replace(padded[0], loss=_no_loss))
        self._batches = padded
        self.prepare(len(padded), longest // self._mesh.size("cp"))

    def _cut(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, the number of the batch instead of targets, and positions."""
        tokens_Bt, _, positions_Bt = super()._cut(batch)
        number = next(i for i, other in enumerate(self._batches) if other is batch)
        return tokens_Bt, torch.full((1, 1), number), positions_Bt

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        batch = self._batches[int(targets)]
        outputs = token_outputs(logits, batch, self.model_parts, self._has_values)
        return batch.loss(outputs) * self._weight


def _padded(batch: TokenLossBatch, length: int) -> TokenLossBatch:
    """Pad a row to a length with tokens of another document."""
    padding = length - batch.tokens_BT.size(1)
    documents_BT = batch.documents_BT
    if documents_BT is None:
        documents_BT = torch.zeros_like(batch.tokens_BT)

    def pad(values_BT: Tensor, value: float) -> Tensor:
        return F.pad(values_BT, (0, padding), value=value)

    return TokenLossBatch(
        pad(batch.tokens_BT, 0),
        pad(batch.targets_BT, 0),
        pad(batch.positions_BT, 0),
        pad(batch.temperatures_BT, 1.0),
        pad(documents_BT, FILLER_DOCUMENT),
        batch.loss,
    )


def _no_loss(outputs: Outputs) -> Tensor:
    """Return zero, with gradients of zero."""
    return torch.stack([values_BT.sum() for values_BT in outputs.values()]).sum() * 0.0


def token_outputs(
    out_BtV: Tensor, batch: TokenLossBatch, parts: ModelParts, has_values: bool
) -> Outputs:
    """Return the outputs for full sequences from the model's output for this rank's tokens (a collective)."""
    mesh = parts.mesh
    if has_values:
        return {"values": _full_sequences(out_BtV.float().squeeze(-1), parts)}
    targets_Bt = batch.targets_BT
    temperatures_Bt = batch.temperatures_BT
    if mesh.size("cp") > 1:
        place = mesh.rank("cp"), mesh.size("cp"), context_parallel.is_balanced(parts.config)
        targets_Bt = sequence_part(targets_Bt, *place)
        temperatures_Bt = sequence_part(temperatures_Bt, *place)
    log_probabilities_Bt, entropies_Bt = token_probabilities(
        out_BtV, targets_Bt, temperatures_Bt, parts.vocabulary
    )
    return {
        "log_probs": _full_sequences(log_probabilities_Bt, parts),
        "entropy": _full_sequences(entropies_Bt, parts),
    }


def _full_sequences(values_Bt: Tensor, parts: ModelParts) -> Tensor:
    """Gather full sequences over the context-parallel ranks, (B, T)."""
    mesh = parts.mesh
    if mesh.size("cp") == 1:
        return values_Bt
    balanced = context_parallel.is_balanced(parts.config)
    full_BT: Tensor = _GatherValues.apply(values_Bt, mesh.group("cp"), balanced)  # type: ignore[no-untyped-call]
    return full_BT


class _GatherValues(torch.autograd.Function):
    """Gather values whose loss every rank computes in full.

    The gradient of this rank's values is its part of the gradient. Summing over ranks would count the loss of
    each rank.
    """

    @staticmethod
    def forward(ctx: Any, values_Bt: Tensor, group: dist.ProcessGroup, balanced: bool) -> Tensor:
        ctx.group = group
        ctx.balanced = balanced
        values_Bt = values_Bt.contiguous()
        parts = [torch.empty_like(values_Bt) for _ in range(group.size())]
        dist.all_gather(parts, values_Bt, group=group)
        return natural_order(torch.cat(parts, dim=1), group.size(), balanced)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        part = sequence_part(gradients[0], group.rank(), group.size(), ctx.balanced)
        return part, None, None
