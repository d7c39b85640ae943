"""Cross-entropy as a sum over tokens, computed in chunks of tokens. Chunks are float32, the sum is float64.

The trainer divides the sum once by the global number of target tokens. The result therefore does not
depend on padding, gradient accumulation or the mesh. The gradient of each chunk is computed with its
loss, so only one chunk of logits is in float32 at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.grouped_loss import GroupedLoss
from shardtrain.ops.loss_terms import CROSS_ENTROPY, LossTerms
from shardtrain.ops.split_cross_entropy import SplitCrossEntropySum, Vocabulary
from shardtrain.ops.targets import IGNORE

CHUNK_NUMEL = 1 << 24
"""Logits per chunk: 64 MiB in float32."""
CPU_CHUNK_NUMEL = 1 << 18
"""Logits per chunk on a CPU without a compiler: 1 MiB, which fits into a core's cache."""


_most_chunks: int | None = None


@contextmanager
def few_chunks(count: int = 2) -> Iterator[None]:
    """Process only the first ``count`` chunks within the block, to measure memory without a correct loss.

    Every chunk needs the same memory, and frees it before the next chunk. Tracing thousands of chunks takes
    minutes.
    """
    global _most_chunks
    before = _most_chunks
    _most_chunks = count
    try:
        yield
    finally:
        _most_chunks = before


def _chunks(num_tokens: int, rows: int) -> list[slice]:
    """Split tokens into chunks of ``rows``, limited by ``few_chunks``."""
    return [slice(start, start + rows) for start in range(0, num_tokens, rows)][:_most_chunks]


ChunkFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of logits (n, V), targets (n,) and a float32 scalar weight.

It returns the sum of the losses, a float64 scalar, and its gradient (n, V) times the weight.
The gradient is float32 or has the dtype of the logits.
"""


def cross_entropy_sum(
    logits_BTV: Tensor,
    targets_BT: Tensor,
    weight: Tensor | float = 1.0,
    vocabulary: Vocabulary | None = None,
    chunk: ChunkFunction | None = None,
    terms: LossTerms = CROSS_ENTROPY,
    grouped: GroupedLoss | None = None,
) -> Tensor:
    """Return ``weight`` times the sum of -log softmax(logits)[target] over targets except IGNORE, in float32.

    Args:
        weight: Loss scale divided by the number of tokens. It multiplies the float32 gradient before
            rounding.
        vocabulary: Split of the logits' columns over ranks (loss parallelism, Shoeybi et al. 2019, section 3). The call
            is then a collective.
        chunk: Replacement of ``chunk_loss``, such as a compiled function. Not used with ``vocabulary``.
        terms: Label smoothing and z-loss with ``vocabulary``. Without it, ``chunk`` computes them.
        grouped: Receives the sums by group of tokens.
    """
    weight = torch.as_tensor(weight, dtype=torch.float32, device=logits_BTV.device)
    # On a CPU, chunk_loss reads and writes each chunk several times, so a chunk must fit into the cache.
    # Elsewhere, large chunks need fewer calls.
    numel = CPU_CHUNK_NUMEL if chunk is None and logits_BTV.device.type == "cpu" else CHUNK_NUMEL
    rows = max(1, numel // max(1, logits_BTV.size(-1)))
    logits_NV = logits_BTV.flatten(0, -2)
    targets_N = targets_BT.flatten()
    chunks = _chunks(logits_NV.size(0), rows)
    if vocabulary is not None:
        return SplitCrossEntropySum.apply(  # type: ignore[no-any-return]
            logits_NV, targets_N, weight, vocabulary, chunks, terms, grouped
        )
    function = chunk or chunk_loss
    if grouped is not None:
        function = grouped.dividing(function)
    return _CrossEntropySum.apply(logits_NV, targets_N, weight, function, chunks)  # type: ignore[no-any-return]


def chunk_loss(logits_nV: Tensor, targets_n: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one chunk, in place if possible. This is the default ChunkFunction."""
    if logits_nV.device.type == "cpu":
        return _chunk_loss_on_cpu(logits_nV, targets_n, weight)
    log_probabilities_nV = torch.log_softmax(logits_nV.float(), dim=-1)
    kept_n1 = (targets_n != IGNORE).unsqueeze(1)
    # IGNORE is not a column index. Use column 0 instead. kept_n1 sets the loss and the gradient to zero.
    index_n1 = targets_n.clamp_min(0).unsqueeze(1)
    loss = -(log_probabilities_nV.gather(1, index_n1) * kept_n1).sum(
        dtype=sum_dtype(logits_nV.device)
    )
    # The gradient is softmax - one_hot(target). It overwrites the log-probabilities, which are not needed
    # again.
    gradient_nV = log_probabilities_nV.exp_().scatter_add_(
        1, index_n1, -torch.ones_like(index_n1, dtype=torch.float32)
    )
    return loss, gradient_nV.mul_(kept_n1 * weight)


def _chunk_loss_on_cpu(
    logits_nV: Tensor, targets_n: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one chunk like ``chunk_loss``, with a more accurate sum of exponentials.

    ``log_softmax`` on a CPU adds all exponentials of a row to a few running totals. With 262,144 columns, the
    relative error of the loss exceeds 1e-6. ``sum`` adds blocks of columns pairwise. This function also
    computes each exponential once instead of twice.
    """
    logits_nV = logits_nV.float()
    kept_n1 = (targets_n != IGNORE).unsqueeze(1)
    index_n1 = targets_n.clamp_min(0).unsqueeze(1)
    largest_n1 = logits_nV.amax(dim=-1, keepdim=True)
    target_n1 = logits_nV.gather(1, index_n1) - largest_n1
    exponentials_nV = torch.sub(logits_nV, largest_n1).exp_()
    total_n1 = exponentials_nV.sum(dim=-1, keepdim=True)
    losses_n1 = total_n1.log() - target_n1
    loss = (losses_n1 * kept_n1).sum(dtype=sum_dtype(logits_nV.device))

    # The gradient is softmax - one_hot(target). It overwrites the exponentials.
    weight_n1 = kept_n1 * weight
    gradient_nV = exponentials_nV.mul_(weight_n1 / total_n1)
    return loss, gradient_nV.scatter_add_(1, index_n1, -weight_n1)


def chunk_loss_without_scatter(
    logits_nV: Tensor, targets_n: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one chunk like ``chunk_loss``, in a form that compiles to a single kernel."""
    log_probabilities_nV = torch.log_softmax(logits_nV.float(), dim=-1)
    kept_n1 = (targets_n != IGNORE).unsqueeze(1)
    index_n1 = targets_n.clamp_min(0).unsqueeze(1)
    loss = -(log_probabilities_nV.gather(1, index_n1) * kept_n1).sum(
        dtype=sum_dtype(logits_nV.device)
    )
    is_target_nV = torch.arange(logits_nV.size(1), device=logits_nV.device) == index_n1
    gradient_nV = log_probabilities_nV.exp() - is_target_nV.float()
    return loss, (gradient_nV * (kept_n1 * weight)).to(logits_nV.dtype)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        weight: Tensor,
        chunk: ChunkFunction,
        chunks: list[slice],
    ) -> Tensor:
        # A float32 sum over the thousands of chunks of a million tokens would lose the last digits.
        loss = torch.zeros((), dtype=sum_dtype(logits_NV.device), device=logits_NV.device)
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
