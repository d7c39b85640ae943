"""Cross-entropy as a sum over tokens, in float32, a chunk of tokens at a time; the sum over tokens is in float64.

The trainer divides once by the global count of target tokens, so that padding, accumulation and the mesh change no
number. The gradient is computed with the loss, chunk by chunk, so that no float32 copy of all logits ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from shardtrain.ops.targets import IGNORE

CHUNK_NUMEL = 1 << 24
"""Logits per chunk: 64 MiB in float32."""
CPU_CHUNK_NUMEL = 1 << 18
"""On a CPU without a compiler: 1 MiB, which stays in a core's cache while it is read and written several times."""


class Vocabulary(Protocol):
    """How the vocabulary is split: this rank's first id, and what ranks that share a token do together.

    ``columns`` is the size of the largest part: equal on all ranks, so that all reduce chunks of the same tokens.
    """

    offset: int
    columns: int

    def max(self, values: Tensor) -> Tensor: ...
    def sum(self, values: Tensor) -> Tensor: ...
    def gather(self, values: Tensor) -> Tensor:
        """The values of each rank, one after the other along a new first dimension."""
        ...


_most_chunks: int | None = None


@contextmanager
def few_chunks(count: int = 2) -> Iterator[None]:
    """Work on the first ``count`` chunks alone, inside: for passes that are about memory, and compute nothing.

    All chunks need the same, and each gives it back before the next begins; tracing thousands takes minutes.
    """
    global _most_chunks
    before, _most_chunks = _most_chunks, count
    try:
        yield
    finally:
        _most_chunks = before


def _chunks(num_tokens: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, num_tokens, rows)][:_most_chunks]


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
    parallelism; as in Megatron-LM, Shoeybi et al. 2019, section 3): then this is a collective, and one. ``chunk``
    replaces the function that handles one chunk of whole rows, for example by a compiled one.
    """
    weight = torch.as_tensor(weight, dtype=torch.float32, device=logits_BTV.device)
    numel = CPU_CHUNK_NUMEL if chunk is None and logits_BTV.device.type == "cpu" else CHUNK_NUMEL
    rows = max(1, numel // max(1, logits_BTV.size(-1)))
    logits_NV, targets_N = logits_BTV.flatten(0, -2), targets_BT.flatten()
    if vocabulary is not None:
        return _SplitCrossEntropySum.apply(logits_NV, targets_N, weight, vocabulary, rows)  # type: ignore[no-any-return]
    return _CrossEntropySum.apply(logits_NV, targets_N, weight, chunk or chunk_loss, rows)  # type: ignore[no-any-return]


def chunk_loss(logits_nV: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    """Loss sum (float64 scalar) and its gradient (n, V), float32, of n tokens."""
    log_probabilities_nV = torch.log_softmax(logits_nV.float(), dim=-1)
    kept_n1 = (targets_n != IGNORE).unsqueeze(1)
    index_n1 = targets_n.clamp_min(0).unsqueeze(1)
    loss = -(log_probabilities_nV.gather(1, index_n1) * kept_n1).sum(dtype=torch.float64)
    gradient_nV = log_probabilities_nV.exp_().scatter_add_(1, index_n1, -torch.ones_like(index_n1, dtype=torch.float32))
    return loss, gradient_nV.mul_(kept_n1)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, weight: Tensor, chunk: ChunkFunction, rows: int
    ) -> Tensor:
        # a million tokens are thousands of chunks: added one by one in float32, they would lose the last digits
        loss = torch.zeros((), dtype=torch.float64, device=logits_NV.device)
        gradient_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        for part in _chunks(logits_NV.size(0), rows):
            chunk_sum, chunk_gradient_nV = chunk(logits_NV[part], targets_N[part])
            loss += chunk_sum
            if gradient_NV is not None:
                gradient_NV[part] = chunk_gradient_nV.mul_(weight)
        if gradient_NV is not None:
            ctx.save_for_backward(gradient_NV)
        return (loss * weight).float()

    @staticmethod
    def backward(ctx: Any, *gradient_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        # In place: the trainer calls backward once, with an output gradient of exactly one.
        return gradient_NV.mul_(gradient_outputs[0].to(gradient_NV.dtype)), None, None, None, None


class _SplitCrossEntropySum(torch.autograd.Function):
    """The same of logits whose columns are split over ranks; each rank of the split gets the same loss.

    Softmax is found as flash attention finds it (Dao et al. 2022): each rank takes the largest logit of its columns,
    the sum of exponentials below it, and the target's logit, three numbers a token, which ranks exchange once.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_Nv: Tensor, targets_N: Tensor, weight: Tensor, vocabulary: Vocabulary, rows: int
    ) -> Tensor:
        num_tokens, columns = logits_Nv.shape
        kept_N = targets_N != IGNORE
        local_N = targets_N - vocabulary.offset
        here_N = kept_N & (local_N >= 0) & (local_N < columns)
        index_N1 = local_N.clamp(0, max(0, columns - 1)).unsqueeze(1)
        chunks = _chunks(num_tokens, rows)
        own_3N = torch.zeros(3, num_tokens, dtype=torch.float32, device=logits_Nv.device)
        lowest = torch.finfo(
            torch.float32
        ).min  # columns that are all minus infinity, and no columns at all, add nothing
        own_3N[0] = lowest
        for part in chunks if columns else ():
            logits_nv = logits_Nv[part].float()
            largest_n1 = logits_nv.amax(dim=-1, keepdim=True).clamp_min_(lowest)
            own_3N[0, part] = largest_n1.squeeze(1)
            own_3N[1, part] = (logits_nv - largest_n1).exp_().sum(dim=-1)
            own_3N[2, part] = torch.where(here_N[part], logits_nv.gather(1, index_N1[part]).squeeze(1), 0.0)
        largest_RN, sums_RN, target_RN = vocabulary.gather(own_3N).unbind(1)
        largest_N = largest_RN.amax(0)
        total_N = (sums_RN * (largest_RN - largest_N).exp_()).sum(0)
        # the target is the logit of one rank, and zero on the others
        losses_N = (total_N.log() - (target_RN.sum(0) - largest_N)) * kept_N
        loss = losses_N.sum(dtype=torch.float64)
        if ctx.needs_input_grad[0]:
            gradient_Nv = torch.empty_like(logits_Nv)
            scale_N1 = (kept_N / total_N).mul_(weight).unsqueeze(1)
            for part in chunks if columns else ():
                gradient_nv = (logits_Nv[part].float() - largest_N[part].unsqueeze(1)).exp_().mul_(scale_N1[part])
                gradient_nv.scatter_add_(1, index_N1[part], -(here_N[part] * weight).unsqueeze(1))
                gradient_Nv[part] = gradient_nv
            ctx.save_for_backward(gradient_Nv)
        return (loss * weight).float()

    @staticmethod
    def backward(ctx: Any, *gradient_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_Nv,) = ctx.saved_tensors
        return gradient_Nv.mul_(gradient_outputs[0].to(gradient_Nv.dtype)), None, None, None, None
