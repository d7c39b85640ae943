"""Attention on a CPU by matrix products, a block of queries at a time, with its backward.

PyTorch's flash kernel for CPUs multiplies small tiles one by one; whole blocks by ``torch.bmm`` reach oneDNN's kernels,
which are several times faster for bfloat16 where a processor multiplies that type. A block's probabilities are those of
one row of scores, so neither needs the log-sum-exp of flash attention (Dao et al. 2022); like it, the backward pass
computes them again, and memory grows with the sequence, not with its square. Scores are rounded to the type of the
inputs before the softmax, which itself is computed in float32: see docs/performance.md for the error.

Shape suffixes: B batch, l queries, s keys, K key-value heads, N query heads, G query heads of a key-value head, H head,
P pairs of a row and a key-value head, n queries of a block, m keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardtrain.ops.sliding_window import Band, mask

_QUERIES = 128
"""Of a block: 64 to 256 took equal time (512 and 2,048 tokens, heads of 32 to 128)."""
_SCORES_BYTES = 1 << 20
"""Of a block of scores, which is read and written several times while a core's own cache holds it."""

CAUSAL = Band(-(1 << 62), 0)


def attend(q_BlNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor, band: Band = CAUSAL, scale: float | None = None) -> Tensor:
    """Attention (B, l, N, H) of queries to the keys that ``band`` lets them see; each query must see one."""
    q_PGlH = _pairs(q_BlNH, k_BsKH)
    # The keys are scaled once here, in place of each block of scores
    k_PsH = _heads_first(k_BsKH) * _scale(q_BlNH, scale)
    v_PsH = _heads_first(v_BsKH)
    out_PGlH = torch.empty_like(q_PGlH)
    for block in _blocks(q_PGlH, k_PsH, band):
        pairs, queries, keys, _ = block
        p_PXm = _probabilities(q_PGlH, k_PsH, block)
        out_PGlH[pairs, :, queries] = torch.bmm(p_PXm, v_PsH[pairs, keys]).unflatten(1, (q_PGlH.size(1), -1))
    return _as_given(out_PGlH.flatten(0, 1), q_BlNH)


def attend_backward(
    gradient_BlNH: Tensor,
    q_BlNH: Tensor,
    k_BsKH: Tensor,
    v_BsKH: Tensor,
    band: Band = CAUSAL,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, each of the type and shape of what it is the gradient of.

    Those of keys and values are sums over blocks of queries, in float32.
    """
    scale = _scale(q_BlNH, scale)
    q_PGlH = _pairs(q_BlNH, k_BsKH)
    k_PsH = _heads_first(k_BsKH) * scale
    v_PsH = _heads_first(v_BsKH)
    gradient_PGlH = _pairs(gradient_BlNH, k_BsKH)

    # A block holds all keys of its queries, so dq is written once. A key is met by several blocks: dk and dv are sums
    exact = torch.promote_types(q_BlNH.dtype, torch.float32)
    dq_PGlH = torch.empty_like(q_PGlH)
    dk_PsH = torch.zeros_like(k_PsH, dtype=exact)
    dv_PsH = torch.zeros_like(v_PsH, dtype=exact)
    for block in _blocks(q_PGlH, k_PsH, band):
        pairs, queries, keys, _ = block
        p_PXm = _probabilities(q_PGlH, k_PsH, block)
        q_PXH, gradient_PXH = (x[pairs, :, queries].flatten(1, 2) for x in (q_PGlH, gradient_PGlH))
        dv_PsH[pairs, keys] += torch.bmm(p_PXm.transpose(1, 2), gradient_PXH)
        # Of p = softmax(s): ds = p (dp - sum of p dp), which this operation computes in one pass
        dp_PXm = torch.bmm(gradient_PXH, v_PsH[pairs, keys].transpose(1, 2))
        ds_PXm = torch.ops.aten._softmax_backward_data(dp_PXm, p_PXm, -1, p_PXm.dtype)
        dq_PGlH[pairs, :, queries] = torch.bmm(ds_PXm, k_PsH[pairs, keys]).unflatten(1, (q_PGlH.size(1), -1))
        dk_PsH[pairs, keys] += torch.bmm(ds_PXm.transpose(1, 2), q_PXH)
    # The scale is missing in dk alone: dq has met it in the scaled keys
    dk_PsH *= scale
    return _as_given(dq_PGlH.flatten(0, 1), q_BlNH), _as_given(dk_PsH, k_BsKH), _as_given(dv_PsH, v_BsKH)


class Block(NamedTuple):
    """Pairs, queries and keys that meet at a time, and those of the keys that some query must not see."""

    pairs: slice
    queries: slice
    keys: slice
    hidden: list[tuple[slice, Tensor]]
    """Stretches of the block's keys, and what is added to their scores (n, m): minus infinity where hidden."""


def _blocks(q_PGlH: Tensor, k_PsH: Tensor, band: Band) -> Iterator[Block]:
    num_pairs, groups, num_queries, _ = q_PGlH.shape
    num_keys = k_PsH.size(1)
    for start in range(0, num_queries, _QUERIES):
        stop = min(start + _QUERIES, num_queries)
        low = max(0, band.first + start)
        high = min(num_keys, band.last + stop)
        # Keys that all queries of the block see need no mask. They are a stretch in the middle, from the first key that
        # the last query sees to the last that the first one does; a window hides keys before it, causality those after
        open_low = min(max(low, band.first + stop - 1), high)
        open_high = min(max(open_low, band.last + start + 1), high)
        hidden = [
            (
                slice(begin - low, end - low),
                mask(stop - start, end - begin, Band(band.first + start - begin, band.last + start - begin), q_PGlH),
            )
            for begin, end in ((low, open_low), (open_high, high))
            if begin < end
        ]
        # As many pairs of row and head at a time as have scores that the cache holds, but one at least
        scores_bytes = groups * (stop - start) * (high - low) * q_PGlH.element_size()
        at_once = max(1, _SCORES_BYTES // scores_bytes)
        for pair in range(0, num_pairs, at_once):
            yield Block(slice(pair, min(pair + at_once, num_pairs)), slice(start, stop), slice(low, high), hidden)


def _probabilities(q_PGlH: Tensor, k_PsH: Tensor, block: Block) -> Tensor:
    """softmax(q k + hidden) over the keys, (P, G n, m), of keys that are scaled."""
    q_PGnH = q_PGlH[block.pairs, :, block.queries]
    scores_PXm = torch.bmm(q_PGnH.flatten(1, 2), k_PsH[block.pairs, block.keys].transpose(1, 2))
    scores_PGnm = scores_PXm.unflatten(1, q_PGnH.shape[1:3])
    for keys, hidden_nm in block.hidden:
        scores_PGnm[..., keys] += hidden_nm
    return torch.softmax(scores_PXm, dim=-1)


def _scale(q_BlNH: Tensor, scale: float | None) -> float:
    return float(q_BlNH.size(-1) ** -0.5) if scale is None else scale


def _heads_first(x_BsKH: Tensor) -> Tensor:
    return x_BsKH.transpose(1, 2).flatten(0, 1).contiguous()


def _pairs(x_BlNH: Tensor, k_BsKH: Tensor) -> Tensor:
    """Query heads (B, l, N, H) by the key-value head that serves them: (B K, G, l, H)."""
    return x_BlNH.transpose(1, 2).unflatten(1, (k_BsKH.size(2), -1)).flatten(0, 1).contiguous()


def _as_given(x_PlH: Tensor, like_BlNH: Tensor) -> Tensor:
    B, _, N, _ = like_BlNH.shape
    return x_PlH.to(like_BlNH.dtype).unflatten(0, (B, N)).transpose(1, 2).contiguous()
