"""Attention on a CPU by matrix products, a block of queries at a time, with its backward.

PyTorch's flash kernel for CPUs multiplies small tiles one by one; whole blocks by ``torch.bmm`` reach the kernels of
MKL and oneDNN, which are faster, and several times so for bfloat16 where a processor multiplies that type. A block's
probabilities are those of whole rows of scores; like flash attention (Dao et al. 2022), the backward pass computes them
again, so that memory grows with the sequence, not with its square.

In float32 they are ``exp2(scores - lse)`` with the log-sum-exp of the forward pass, all in units of log 2:
``torch.exp2`` takes a third of the time of ``torch.exp`` (on AMD, where the latter is MKL's). In bfloat16 scores are
rounded to that type, and the softmax is computed from them in float32 by PyTorch's kernel: see docs/performance.md for
the error.

Shape suffixes: B batch, l queries, s keys, K key-value heads, N query heads, G query heads of a key-value head, H head;
of a block: r rows, k key-value heads, P = r k pairs of a row and a key-value head, n queries, X = G n, m keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from shardtrain.ops.sliding_window import Band, mask

_QUERIES = {2: 128, 4: 64}
"""Of a block, by the bytes of a number. The more there are, the larger are the products, and the more keys that a query
must not see are computed."""
_SCORES_BYTES = 1 << 20
"""Of a block of scores, which is read and written several times while a core's own cache holds it."""
_VECTOR = 32
"""Numbers: a multiple of what a processor adds at a time."""

CAUSAL = Band(-(1 << 62), 0)


class Piece(NamedTuple):
    """Queries that meet keys: which rows of the batch, which tokens of either, and which of the keys a query sees."""

    batch: slice
    queries: slice
    keys: slice
    band: Band


def attend(
    q_BlNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor, band: Band = CAUSAL, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention (B, l, N, H) of queries to the keys that ``band`` lets them see; each query must see one.

    With it what ``attend_backward`` is given: the log-sum-exp (B, N, l) in units of log 2, and (B, N, 0) for bfloat16,
    which needs none.
    """
    return attend_in_pieces(q_BlNH, heads_first(k_BsKH, v_BsKH, scale), [_whole(q_BlNH, k_BsKH, band)])


def attend_in_pieces(q_BlNH: Tensor, keys_values_2BKsH: Tensor, pieces: Iterable[Piece]) -> tuple[Tensor, Tensor]:
    """The same in pieces, of which each query is in one, with keys and values as ``heads_first`` gives them."""
    heads = keys_values_2BKsH.size(2)
    out_BlNH = torch.empty_like(q_BlNH, memory_format=torch.contiguous_format)
    lse_BNl = empty_lse(q_BlNH)
    for batch, queries, keys, band in pieces:
        q_BKGlH = _grouped(q_BlNH[batch, queries], heads)
        k_BKmH, v_BKmH = keys_values_2BKsH[:, batch, :, keys]
        out_BKGlH = _grouped(out_BlNH[batch, queries], heads)
        lse_BKGl = lse_BNl[batch, :, queries].unflatten(1, (heads, -1))
        for block in _blocks(q_BKGlH, k_BKmH, band):
            scores_PXm = torch.bmm(_pairs(q_BKGlH[block.queries]), _keys(k_BKmH, block).transpose(1, 2))
            _hide(scores_PXm, block)
            out_rkGnH = out_BKGlH[block.queries]
            if is_rounded(q_BlNH.dtype):
                out_PXH = torch.bmm(torch.softmax(scores_PXm, dim=-1), _keys(v_BKmH, block))
                out_rkGnH.copy_(out_PXH.view(out_rkGnH.shape))
            else:
                most_PX1 = scores_PXm.amax(dim=-1, keepdim=True)
                weights_PXm = scores_PXm.sub_(most_PX1).exp2_()
                sums_PX1 = weights_PXm.sum(dim=-1, keepdim=True)
                out_PXH = torch.bmm(weights_PXm, _keys(v_BKmH, block))
                torch.div(out_PXH.view(out_rkGnH.shape), sums_PX1.view(*out_rkGnH.shape[:-1], 1), out=out_rkGnH)
                lse_BKGl[block.queries] = sums_PX1.log2_().add_(most_PX1).view(out_rkGnH.shape[:-1])
    return out_BlNH, lse_BNl


def attend_backward(
    gradient_BlNH: Tensor,
    q_BlNH: Tensor,
    k_BsKH: Tensor,
    v_BsKH: Tensor,
    out_BlNH: Tensor,
    lse_BNl: Tensor,
    band: Band = CAUSAL,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, each of the type and shape of what it is the gradient of.

    ``out_BlNH`` and ``lse_BNl`` are those of ``attend``. Gradients of keys and values are sums over blocks of queries,
    in float32.
    """
    keys_values_2BKsH = heads_first(k_BsKH, v_BsKH, scale)
    whole = _whole(q_BlNH, k_BsKH, band)
    inputs = (gradient_BlNH, q_BlNH, keys_values_2BKsH, out_BlNH, lse_BNl)
    dq_BlNH, dkeys_values_2BKsH = attend_in_pieces_backward(*inputs, [whole], scale)
    dk_BsKH, dv_BsKH = (tokens_first(x_BKsH, q_BlNH.dtype) for x_BKsH in dkeys_values_2BKsH)
    return dq_BlNH, dk_BsKH, dv_BsKH


def attend_in_pieces_backward(
    gradient_BlNH: Tensor,
    q_BlNH: Tensor,
    keys_values_2BKsH: Tensor,
    out_BlNH: Tensor,
    lse_BNl: Tensor,
    pieces: Iterable[Piece],
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in pieces; ``scale`` is that which ``heads_first`` was given.

    Gradients are those of queries, and of the keys and values that ``heads_first`` was given: (2, B, K, s, H) in
    float32 at least, zero where no query sees a key.
    """
    heads = keys_values_2BKsH.size(2)
    key_scale = _key_scale(keys_values_2BKsH, scale)
    # A block holds all keys of its queries, so dq is written once. A key is met by several blocks: dk and dv are sums
    exact = torch.promote_types(q_BlNH.dtype, torch.float32)
    dq_BlNH = torch.empty_like(q_BlNH, memory_format=torch.contiguous_format)
    sums_2BKsH = torch.zeros_like(keys_values_2BKsH, dtype=exact)
    # Derivatives of scores are by natural ones. dq meets their scale in that of the keys, dk does not
    natural = 1.0 if is_rounded(q_BlNH.dtype) else math.log(2.0)
    for batch, queries, keys, band in pieces:
        q_BKGlH = _grouped(q_BlNH[batch, queries], heads)
        gradient_BKGlH = _grouped(gradient_BlNH[batch, queries], heads)
        out_BKGlH = _grouped(out_BlNH[batch, queries], heads)
        dq_BKGlH = _grouped(dq_BlNH[batch, queries], heads)
        lse_BKGl = lse_BNl[batch, :, queries].unflatten(1, (heads, -1))
        of_keys = (*keys_values_2BKsH[:, batch, :, keys], *sums_2BKsH[:, batch, :, keys])
        for block in _blocks(q_BKGlH, of_keys[0], band):
            q_PXH = _pairs(q_BKGlH[block.queries])
            gradient_PXH = _pairs(gradient_BKGlH[block.queries])
            k_PmH, v_PmH, dk_PmH, dv_PmH = (_keys(x, block) for x in of_keys)
            if is_rounded(q_BlNH.dtype):
                scores_PXm = torch.bmm(q_PXH, k_PmH.transpose(1, 2))
                _hide(scores_PXm, block)
                p_PXm = torch.softmax(scores_PXm, dim=-1)
                dv_PmH += torch.bmm(p_PXm.transpose(1, 2), gradient_PXH)
                # Of p = softmax(s): ds = p (dp - sum of p dp), which this operation computes in one pass
                dp_PXm = torch.bmm(gradient_PXH, v_PmH.transpose(1, 2))
                ds_PXm = torch.ops.aten._softmax_backward_data(dp_PXm, p_PXm, -1, p_PXm.dtype)
                dk_PmH.add_(torch.bmm(ds_PXm.transpose(1, 2), q_PXH), alpha=key_scale)
            else:
                # Keys by queries, so that of the five products one reads a matrix across its rows, and not two
                lse_P1X = lse_BKGl[block.queries].reshape(len(q_PXH), 1, -1)
                scores_PmX = torch.bmm(k_PmH, q_PXH.transpose(1, 2)).sub_(lse_P1X)
                _hide_transposed(scores_PmX, block)
                p_PmX = scores_PmX.exp2_()
                dv_PmH.baddbmm_(p_PmX, gradient_PXH)
                # The sum of p dp over keys is that of gradient times output over features
                sums_P1X = (gradient_BKGlH[block.queries] * out_BKGlH[block.queries]).sum(-1).reshape(lse_P1X.shape)
                ds_PmX = torch.bmm(v_PmH, gradient_PXH.transpose(1, 2)).sub_(sums_P1X).mul_(p_PmX)
                dk_PmH.baddbmm_(ds_PmX, q_PXH, alpha=key_scale * natural)
                ds_PXm = ds_PmX.transpose(1, 2)
            dq_rkGnH = dq_BKGlH[block.queries]
            torch.mul(torch.bmm(ds_PXm, k_PmH).view(dq_rkGnH.shape), natural, out=dq_rkGnH)
    return dq_BlNH, sums_2BKsH


def heads_first(k_BsKH: Tensor, v_BsKH: Tensor, scale: float | None = None) -> Tensor:
    """Keys and values as blocks are multiplied: (2, B, K, s, H), keys scaled once, in place of each block of scores."""
    B, keys, K, H = k_BsKH.shape
    out_2BKsH = k_BsKH.new_empty(2, B, K, keys, H)
    place_heads_first(k_BsKH, v_BsKH, scale, out_2BKsH)
    return out_2BKsH


def place_heads_first(k_BsKH: Tensor, v_BsKH: Tensor, scale: float | None, out_2BKsH: Tensor) -> None:
    """The same, to where they are to lie."""
    torch.mul(k_BsKH.transpose(1, 2), _key_scale(k_BsKH, scale), out=out_2BKsH[0])
    out_2BKsH[1].copy_(v_BsKH.transpose(1, 2))


def tokens_first(x_BKsH: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradients of keys or of values as those lie before ``heads_first``: (B, s, K, H)."""
    B, K, keys, H = x_BKsH.shape
    # A copy always, so that keys and values have memory of their own
    return x_BKsH.new_empty(B, keys, K, H, dtype=dtype).copy_(x_BKsH.transpose(1, 2))


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether scores are rounded to 16 bits."""
    return dtype.itemsize < 4


def empty_lse(q_BlNH: Tensor) -> Tensor:
    """Room for the log-sum-exp that ``attend`` gives with the output of these queries."""
    B, queries, N, _ = q_BlNH.shape
    exact = torch.promote_types(q_BlNH.dtype, torch.float32)
    return q_BlNH.new_empty((B, N, 0 if is_rounded(q_BlNH.dtype) else queries), dtype=exact)


class Block(NamedTuple):
    """Rows, key-value heads, queries and keys that meet at a time, and those of the keys that a query must not see."""

    queries: tuple[slice, slice, slice, slice]
    """Of (B, K, G, l)."""
    keys: tuple[slice, slice, slice]
    """Of (B, K, s)."""
    hidden: list[tuple[slice, Tensor]]
    """Stretches of the block's keys, and what is added to their scores (n, m): minus infinity where hidden."""


def _blocks(q_BKGlH: Tensor, k_BKsH: Tensor, band: Band) -> Iterator[Block]:
    rows, heads, groups, num_queries, _ = q_BKGlH.shape
    num_keys = k_BKsH.size(2)
    queries_at_once = _QUERIES[2 if is_rounded(q_BKGlH.dtype) else 4]
    for start in range(0, num_queries, queries_at_once):
        stop = min(start + queries_at_once, num_queries)
        low = max(0, band.first + start)
        high = min(num_keys, band.last + stop)
        queries = slice(start, stop)
        keys = slice(low, high)
        # Keys that all queries of the block see need no mask. They are a stretch in the middle, from the first key that
        # the last query sees to the last that the first one does; a window hides keys before it, causality those after.
        # Whole vectors of a processor are masked faster, so the stretch begins and ends with one
        open_low = low + _round_up(max(0, band.first + stop - 1 - low))
        open_high = low + _round_down(max(0, band.last + start + 1 - low))
        masked = [(low, min(open_low, high)), (open_high, high)] if open_low <= open_high else [(low, high)]
        hidden = [
            (
                slice(begin - low, end - low),
                mask(stop - start, end - begin, Band(band.first + start - begin, band.last + start - begin), q_BKGlH),
            )
            for begin, end in masked
            if begin < end
        ]
        # As many pairs of row and head at a time as have scores that the cache holds, but one at least: whole rows, or
        # heads of one
        scores_bytes = groups * (stop - start) * (high - low) * q_BKGlH.element_size()
        at_once = max(1, _SCORES_BYTES // scores_bytes)
        rows_at_once = max(1, at_once // heads)
        heads_at_once = min(heads, at_once)
        for row in range(0, rows, rows_at_once):
            for head in range(0, heads, heads_at_once):
                pairs = (slice(row, row + rows_at_once), slice(head, head + heads_at_once))
                yield Block((*pairs, slice(None), queries), (*pairs, keys), hidden)


def _hide(scores_PXm: Tensor, block: Block) -> None:
    for keys, hidden_nm in block.hidden:
        scores_PXm.unflatten(1, (-1, len(hidden_nm)))[..., keys] += hidden_nm


def _hide_transposed(scores_PmX: Tensor, block: Block) -> None:
    for keys, hidden_nm in block.hidden:
        scores_PmX[:, keys].unflatten(2, (-1, len(hidden_nm))).add_(hidden_nm.t().contiguous()[:, None])


def _key_scale(k: Tensor, scale: float | None) -> float:
    """By what keys are multiplied, so that scores have their scale, and their unit."""
    natural = float(k.size(-1) ** -0.5) if scale is None else scale
    return natural if is_rounded(k.dtype) else natural * math.log2(math.e)


def _whole(q_BlNH: Tensor, k_BsKH: Tensor, band: Band) -> Piece:
    return Piece(slice(None), slice(0, q_BlNH.size(1)), slice(0, k_BsKH.size(1)), band)


def _grouped(x_BlNH: Tensor, heads: int) -> Tensor:
    """A view of query heads (B, l, N, H) by the key-value head that serves them: (B, K, G, l, H)."""
    return x_BlNH.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)


def _pairs(x_rkGnH: Tensor) -> Tensor:
    return x_rkGnH.flatten(2, 3).flatten(0, 1)


def _keys(x_BKsH: Tensor, block: Block) -> Tensor:
    """A view (P, m, H) of a block's keys: whole rows, or heads of one row, lie at equal distances."""
    x_rkmH = x_BKsH[block.keys]
    return x_rkmH.view(-1, *x_rkmH.shape[2:])


def _round_up(number: int) -> int:
    return -(-number // _VECTOR) * _VECTOR


def _round_down(number: int) -> int:
    return number // _VECTOR * _VECTOR
