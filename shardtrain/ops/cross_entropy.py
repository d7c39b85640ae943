"""Cross-entropy as a sum over tokens, in float32, a chunk of tokens at a time; the sum over tokens is in float64.

The trainer divides once by the global count of target tokens, so that padding, accumulation and the mesh change no
number. The gradient is computed with the loss, chunk by chunk, so that no float32 copy of all logits ever exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from shardtrain.ops.targets import IGNORE

CHUNK_NUMEL = 1 << 24
"""Logits per chunk: 64 MiB in float32."""


class Vocabulary(Protocol):
    """How the vocabulary is split: this rank's first id, and reductions over the ranks that share a token.

    ``columns`` is the size of the largest part: equal on all ranks, so that all reduce chunks of the same tokens.
    """

    offset: int
    columns: int

    def max(self, values: Tensor) -> Tensor: ...
    def sum(self, values: Tensor) -> Tensor: ...


ChunkFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def cross_entropy_sum(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    weight: Tensor | float = 1.0,
    vocabulary: Vocabulary | None = None,
    chunk: ChunkFunction | None = None,
) -> Tensor:
    """``weight`` times the sum of -log softmax(logits)[target] over targets that are not IGNORE: a float32 scalar.

    The weight (one over the count of tokens, times a loss scale) meets the gradient in float32, before it is rounded
    to the type of the logits. ``vocabulary`` is given when a rank holds only some columns of the logits (loss
    parallelism; as in Megatron-LM, Shoeybi et al. 2019, section 3). ``chunk`` replaces the function that handles one
    chunk, for example by a compiled one.
    """
    if chunk is None:
        chunk = chunk_loss if vocabulary is None else split_vocabulary_chunk_loss(vocabulary)
    weight = torch.as_tensor(weight, dtype=torch.float32, device=logits_BTV.device)
    rows = max(1, CHUNK_NUMEL // (logits_BTV.size(-1) if vocabulary is None else vocabulary.columns))
    logits_NV, targets_N = logits_BTV.flatten(0, -2), targets_BT.flatten()
    return _CrossEntropySum.apply(logits_NV, targets_N, weight, chunk, rows)  # type: ignore[no-any-return]


def chunk_loss(logits_nV: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Loss sum (float64 scalar) and its gradient (n, V), float32, of n tokens."""
    log_probabilities_nV = torch.log_softmax(logits_nV.float(), dim=-1)
    kept_n1 = (targets_n != IGNORE).unsqueeze(1)
    index_n1 = targets_n.clamp_min(0).unsqueeze(1)
    loss = -(log_probabilities_nV.gather(1, index_n1) * kept_n1).sum(dtype=torch.float64)
    gradient_nV = log_probabilities_nV.exp_().scatter_add_(1, index_n1, -torch.ones_like(index_n1, dtype=torch.float32))
    return loss, gradient_nV.mul_(kept_n1)


def split_vocabulary_chunk_loss(vocabulary: Vocabulary) -> ChunkFunction:
    """The same for logits whose columns are split over ranks; every rank of the split gets the same loss."""

    def chunk(logits_nv: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        logits_nv = logits_nv.float()
        shifted_nv = logits_nv - vocabulary.max(logits_nv.amax(dim=-1)).unsqueeze(1)
        probabilities_nv = shifted_nv.exp()
        total_n = vocabulary.sum(probabilities_nv.sum(dim=-1))
        kept_n = targets_n != IGNORE
        local_n = targets_n - vocabulary.offset
        here_n = kept_n & (local_n >= 0) & (local_n < logits_nv.size(-1))
        index_n1 = local_n.clamp(0, logits_nv.size(-1) - 1).unsqueeze(1)
        target_logit_n = vocabulary.sum(shifted_nv.gather(1, index_n1).squeeze(1) * here_n)
        loss = ((total_n.log() - target_logit_n) * kept_n).sum(dtype=torch.float64)
        gradient_nv = probabilities_nv.div_(total_n.unsqueeze(1))
        gradient_nv.scatter_add_(1, index_n1, -here_n.float().unsqueeze(1))
        return loss, gradient_nv.mul_(kept_n.unsqueeze(1))

    return chunk


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, weight: Tensor, chunk: ChunkFunction, rows: int
    ) -> Tensor:
        # a million tokens are thousands of chunks: added one by one in float32, they would lose the last digits
        loss = torch.zeros((), dtype=torch.float64, device=logits_NV.device)
        gradient_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        for start in range(0, logits_NV.size(0), rows):
            stop = start + rows
            chunk_sum, chunk_gradient_nV = chunk(logits_NV[start:stop], targets_N[start:stop])
            loss += chunk_sum
            if gradient_NV is not None:
                gradient_NV[start:stop] = chunk_gradient_nV.mul_(weight)
        if gradient_NV is not None:
            ctx.save_for_backward(gradient_NV)
        return (loss * weight).float()

    @staticmethod
    def backward(ctx: Any, *gradient_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        # In place: the trainer calls backward once, with an output gradient of exactly one.
        return gradient_NV.mul_(gradient_outputs[0].to(gradient_NV.dtype)), None, None, None, None
