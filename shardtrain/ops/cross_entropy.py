"""Cross-entropy as a sum over tokens, in float32, a chunk of tokens at a time; the sum over tokens is in float64.

The trainer divides once by the global count of target tokens, so that padding, accumulation and the mesh change no
number. The gradient is computed with the loss, chunk by chunk, so that no float32 copy of all logits ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardtrain.ops.split_cross_entropy import SplitCrossEntropySum, Vocabulary
from shardtrain.ops.targets import IGNORE

CHUNK_NUMEL = 1 << 24
"""Logits per chunk: 64 MiB in float32."""
CPU_CHUNK_NUMEL = 1 << 18
"""On a CPU without a compiler: 1 MiB, which stays in a core's cache while it is read and written several times."""


_most_chunks: int | None = None


@contextmanager
def few_chunks(count: int = 2) -> Iterator[None]:
    """Work on the first ``count`` chunks alone, inside: for passes that are about memory, and compute nothing.

    All chunks need the same, and each gives it back before the next begins; tracing thousands takes minutes.
    """
    global _most_chunks
    before = _most_chunks
    _most_chunks = count
    try:
        yield
    finally:
        _most_chunks = before


def _chunks(num_tokens: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, num_tokens, rows)][:_most_chunks]


ChunkFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Loss sum, a float64 scalar, of logits (n, V) and targets (n,); and its gradient (n, V) times a float32 scalar,
rounded to the type of the logits or not yet."""


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
    # Small chunks on a CPU, where chunk_loss reads and writes each several times; large ones elsewhere, for fewer calls
    numel = CPU_CHUNK_NUMEL if chunk is None and logits_BTV.device.type == "cpu" else CHUNK_NUMEL
    rows = max(1, numel // max(1, logits_BTV.size(-1)))
    logits_NV = logits_BTV.flatten(0, -2)
    targets_N = targets_BT.flatten()
    chunks = _chunks(logits_NV.size(0), rows)
    if vocabulary is not None:
        return SplitCrossEntropySum.apply(logits_NV, targets_N, weight, vocabulary, chunks)  # type: ignore[no-any-return]
    return _CrossEntropySum.apply(logits_NV, targets_N, weight, chunk or chunk_loss, chunks)  # type: ignore[no-any-return]


def chunk_loss(logits_nV: Tensor, targets_n: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The ChunkFunction that is used unless another is given: in place, where it can be."""
    log_probabilities_nV = torch.log_softmax(logits_nV.float(), dim=-1)
    kept_n1 = (targets_n != IGNORE).unsqueeze(1)
    # IGNORE is not a column: such a token takes column 0, and kept_n1 makes its loss and its gradient zero
    index_n1 = targets_n.clamp_min(0).unsqueeze(1)
    loss = -(log_probabilities_nV.gather(1, index_n1) * kept_n1).sum(dtype=torch.float64)
    # The gradient is softmax - one_hot(target), written over the log-probabilities, which nobody needs any longer
    gradient_nV = log_probabilities_nV.exp_().scatter_add_(1, index_n1, -torch.ones_like(index_n1, dtype=torch.float32))
    return loss, gradient_nV.mul_(kept_n1 * weight)


def chunk_loss_without_scatter(logits_nV: Tensor, targets_n: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same to be compiled: all of it can be one kernel, which reads logits and writes their gradient."""
    log_probabilities_nV = torch.log_softmax(logits_nV.float(), dim=-1)
    kept_n1 = (targets_n != IGNORE).unsqueeze(1)
    index_n1 = targets_n.clamp_min(0).unsqueeze(1)
    loss = -(log_probabilities_nV.gather(1, index_n1) * kept_n1).sum(dtype=torch.float64)
    is_target_nV = torch.arange(logits_nV.size(1), device=logits_nV.device) == index_n1
    gradient_nV = log_probabilities_nV.exp() - is_target_nV.float()
    return loss, (gradient_nV * (kept_n1 * weight)).to(logits_nV.dtype)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, weight: Tensor, chunk: ChunkFunction, chunks: list[slice]
    ) -> Tensor:
        # A million tokens are thousands of chunks: added one by one in float32, they would lose the last digits
        loss = torch.zeros((), dtype=torch.float64, device=logits_NV.device)
        gradient_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        for part in chunks:
            chunk_sum, chunk_gradient_nV = chunk(logits_NV[part], targets_N[part], weight)
            loss += chunk_sum
            if gradient_NV is not None:
                gradient_NV[part] = chunk_gradient_nV
        if gradient_NV is not None:
            ctx.save_for_backward(gradient_NV)
        return (loss * weight).float()

    @staticmethod
    def backward(ctx: Any, *gradient_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_NV,) = ctx.saved_tensors
        # In place: the trainer calls backward once, with an output gradient of exactly one.
        return gradient_NV.mul_(gradient_outputs[0].to(gradient_NV.dtype)), None, None, None, None
