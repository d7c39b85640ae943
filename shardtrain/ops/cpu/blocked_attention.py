"""Attention on a CPU by matrix products of blocks of queries, forward and backward.

PyTorch's flash kernel for CPUs multiplies small tiles. ``torch.bmm`` of larger blocks uses the faster
kernels of MKL and oneDNN. A block contains all keys of its queries. Like flash attention (Dao et al.
2022), the backward pass recomputes the weights from the log-sum-exp, so memory grows with the length of
the sequence instead of its square.

Scores, softmax and derivatives of scores are float32 also for 16-bit inputs. Rounding a score to bfloat16
has an error proportional to the score, and this error becomes the relative error of its weight. Only
products that return an output or a gradient have 16-bit operands, as in the flash kernel.

Scores are in units of log 2, because ``torch.exp2`` takes a third of the time of ``torch.exp`` on AMD
processors.

Shape suffixes: B batch, l queries, s keys, K key-value heads, N query heads, G query heads per key-value
head, H head. In a block: r rows, k key-value heads, P = r k pairs of row and key-value head, n queries, X
= G n, m keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardtrain.ops.sliding_window import Band, mask

_QUERIES = 64
"""Queries per block. More queries make larger products, but compute more masked scores."""
_SCORES_BYTES = 1 << 20
"""Size of a block of scores.

It must fit into the cache of a core, because it is read and written several times.
"""
_VECTOR = 32
"""Elements: a multiple of the vector length of a processor."""

CAUSAL = Band(-(1 << 62), 0)
"""Band of a causal mask."""


class Piece(NamedTuple):
    """A block of the attention matrix: queries, and keys that they may attend to.

    Attributes:
        batch: Range of rows.
        queries, keys: Token ranges.
        band: Visible keys of each query.
    """

    batch: slice
    queries: slice
    keys: slice
    band: Band


def attend(
    q_BlNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor, band: Band = CAUSAL, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention (B, l, N, H) and its log-sum-exp (B, N, l) in units of log 2,
    which the backward pass needs.

    Each query must see a key of the ``band``. ``scale`` defaults to 1 / sqrt(H).
    """
    return attend_in_pieces(
        q_BlNH, heads_first(k_BsKH, v_BsKH), [_single_piece(q_BlNH, k_BsKH, band)], scale
    )


def attend_in_pieces(
    q_BlNH: Tensor, keys_values_2BKsH: Tensor, pieces: Iterable[Piece], scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``attend`` in pieces, with keys and values from ``heads_first``.

    Each query must be in one piece.
    """
    heads = keys_values_2BKsH.size(2)
    scale = _resolved(scale, q_BlNH)
    out_BlNH = torch.empty_like(q_BlNH, memory_format=torch.contiguous_format)
    lse_BNl = empty_lse(q_BlNH)
    scores_memory = _Memory(lse_BNl)
    rounded_memory = _Memory(q_BlNH)
    for batch, queries, keys, band in pieces:
        q_BKGlH = _grouped(q_BlNH[batch, queries], heads)
        k_BKmH, v_BKmH = keys_values_2BKsH[:, batch, :, keys]
        out_BKGlH = _grouped(out_BlNH[batch, queries], heads)
        lse_BKGl = lse_BNl[batch, :, queries].unflatten(1, (heads, -1))
        for block in _blocks(q_BKGlH, k_BKmH, band, lse_BNl.dtype):
            q_PXH = _pairs(q_BKGlH[block.queries]).to(lse_BNl.dtype) * (scale * math.log2(math.e))
            k_PmH = _keys(k_BKmH, block).to(lse_BNl.dtype)
            scores_PXm = scores_memory.product(q_PXH, k_PmH.transpose(1, 2))
            for key_range, mask_nm in block.masks:
                scores_PXm.unflatten(1, (-1, len(mask_nm)))[..., key_range] += mask_nm
            largest_PX1 = scores_PXm.amax(dim=-1, keepdim=True)
            weights_PXm = scores_PXm.sub_(largest_PX1).exp2_()
            sums_PX1 = weights_PXm.sum(dim=-1, keepdim=True)
            # Normalize the weights instead of the output. The output would be rounded to 16 bits before
            # and after.
            p_PXm = rounded_memory.rounded(weights_PXm.div_(sums_PX1))
            out_rkGnH = out_BKGlH[block.queries]
            out_PXH = torch.bmm(p_PXm, _keys(v_BKmH, block))
            out_rkGnH.copy_(out_PXH.view(out_rkGnH.shape))
            lse_PX1 = sums_PX1.log2_().add_(largest_PX1)
            lse_BKGl[block.queries] = lse_PX1.view(out_rkGnH.shape[:-1])
    return out_BlNH, lse_BNl


def attend_backward(
    gradient_BlNH: Tensor,
    q_BlNH: Tensor,
    k_BsKH: Tensor,
    v_BsKH: Tensor,
    lse_BNl: Tensor,
    band: Band = CAUSAL,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, each with the dtype and shape of its tensor.

    ``lse_BNl`` is the second result of ``attend``. Gradients of keys and values are summed over blocks of
    queries in float32.
    """
    pieces = [_single_piece(q_BlNH, k_BsKH, band)]
    inputs = (gradient_BlNH, q_BlNH, heads_first(k_BsKH, v_BsKH), lse_BNl)
    dq_BlNH, dkeys_values_2BKsH = attend_in_pieces_backward(*inputs, pieces, scale)
    dk_BsKH, dv_BsKH = (tokens_first(x_BKsH, q_BlNH.dtype) for x_BKsH in dkeys_values_2BKsH)
    return dq_BlNH, dk_BsKH, dv_BsKH


def attend_in_pieces_backward(
    gradient_BlNH: Tensor,
    q_BlNH: Tensor,
    keys_values_2BKsH: Tensor,
    lse_BNl: Tensor,
    pieces: Iterable[Piece],
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``attend_in_pieces`` for the queries,
    and for the keys and values from ``heads_first``.

    The latter are (2, B, K, s, H) in float32 (float64 for float64), zero for keys that no query sees.
    """
    heads = keys_values_2BKsH.size(2)
    scale = _resolved(scale, q_BlNH)
    exact = lse_BNl.dtype
    # A block contains all keys of its queries, so dq is written once. Blocks share keys, so dk and dv are
    # sums.
    dq_BlNH = torch.empty_like(q_BlNH, memory_format=torch.contiguous_format)
    sums_2BKsH = torch.zeros_like(keys_values_2BKsH, dtype=exact)
    scores_memory = _Memory(lse_BNl)
    derivatives_memory = _Memory(lse_BNl)
    rounded_memory = _Memory(q_BlNH)
    for batch, queries, keys, band in pieces:
        q_BKGlH = _grouped(q_BlNH[batch, queries], heads)
        gradient_BKGlH = _grouped(gradient_BlNH[batch, queries], heads)
        dq_BKGlH = _grouped(dq_BlNH[batch, queries], heads)
        lse_BKGl = lse_BNl[batch, :, queries].unflatten(1, (heads, -1))
        key_tensors = (*keys_values_2BKsH[:, batch, :, keys], *sums_2BKsH[:, batch, :, keys])
        for block in _blocks(q_BKGlH, key_tensors[0], band, exact):
            q_PXH = _pairs(q_BKGlH[block.queries])
            gradient_PXH = _pairs(gradient_BKGlH[block.queries])
            k_PmH, v_PmH, dk_PmH, dv_PmH = [_keys(x, block) for x in key_tensors]
            # Compute scores with keys as rows. Then only one of the five products reads a matrix by columns.
            scaled_q_PXH = q_PXH.to(exact) * (scale * math.log2(math.e))
            lse_P1X = lse_BKGl[block.queries].reshape(len(q_PXH), 1, -1)
            scores_PmX = scores_memory.product(k_PmH.to(exact), scaled_q_PXH.transpose(1, 2))
            scores_PmX.sub_(lse_P1X)
            for key_range, mask_nm in block.masks:
                mask_m1n = mask_nm.t().contiguous()[:, None]
                scores_Pmgn = scores_PmX[:, key_range].unflatten(2, (-1, len(mask_nm)))
                scores_Pmgn.add_(mask_m1n)
            p_PmX = scores_PmX.exp2_()
            _add_product(dv_PmH, rounded_memory.rounded(p_PmX), gradient_PXH)
            # ds = scale (p dp - p (sum of p dp over keys)). Flash kernels compute the sum as gradient times
            # output, which includes the rounding error of a 16-bit output.
            scaled_PXH = gradient_PXH.to(exact) * scale
            dp_PmX = derivatives_memory.product(v_PmH.to(exact), scaled_PXH.transpose(1, 2))
            p_dp_PmX = dp_PmX.mul_(p_PmX)
            sums_P1X = p_dp_PmX.sum(dim=1, keepdim=True)
            exact_ds_PmX = p_dp_PmX.addcmul_(p_PmX, sums_P1X, value=-1)
            ds_PmX = rounded_memory.rounded(exact_ds_PmX)
            _add_product(dk_PmH, ds_PmX, q_PXH)
            dq_rkGnH = dq_BKGlH[block.queries]
            dq_PXH = torch.bmm(ds_PmX.transpose(1, 2), k_PmH)
            dq_rkGnH.copy_(dq_PXH.view(dq_rkGnH.shape))
    return dq_BlNH, sums_2BKsH


def heads_first(k_BsKH: Tensor, v_BsKH: Tensor) -> Tensor:
    """Return keys and values in the layout in which blocks multiply them: (2, B, K, s, H)."""
    B, keys, K, H = k_BsKH.shape
    out_2BKsH = k_BsKH.new_empty(2, B, K, keys, H)
    place_heads_first(k_BsKH, v_BsKH, out_2BKsH)
    return out_2BKsH


def place_heads_first(k_BsKH: Tensor, v_BsKH: Tensor, out_2BKsH: Tensor) -> None:
    """Write the result of ``heads_first`` to ``out_2BKsH``."""
    for out_BKsH, x_BsKH in zip(out_2BKsH, (k_BsKH, v_BsKH), strict=True):
        out_BKsH.copy_(x_BsKH.transpose(1, 2))


def tokens_first(x_BKsH: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradients of keys or values in the layout before ``heads_first``: (B, s, K, H)."""
    B, K, keys, H = x_BKsH.shape
    # Always copy, so keys and values have separate memory.
    return x_BKsH.new_empty(B, keys, K, H, dtype=dtype).copy_(x_BKsH.transpose(1, 2))


def empty_lse(q_BlNH: Tensor) -> Tensor:
    """Return an empty log-sum-exp (B, N, l) for these queries. Scores are computed in its dtype."""
    B, queries, N, _ = q_BlNH.shape
    return q_BlNH.new_empty((B, N, queries), dtype=torch.promote_types(q_BlNH.dtype, torch.float32))


class ScoreBlock(NamedTuple):
    """Rows, key-value heads, queries and keys of one matrix product, with masks.

    Attributes:
        queries: Indexes (B, K, G, l).
        keys: Indexes (B, K, s).
        masks: Ranges of the block's keys, with additive masks (n, m).
    """

    queries: tuple[slice, slice, slice, slice]
    keys: tuple[slice, slice, slice]
    masks: list[tuple[slice, Tensor]]


class _Memory:
    """Memory of a matrix of scores that all blocks use in turn.

    New memory for each block would take longer, because the system clears its pages.
    """

    def __init__(self, like: Tensor) -> None:
        self._flat = like.new_empty(0)

    def product(self, left_Pac: Tensor, right_Pcb: Tensor) -> Tensor:
        """Return the product (P, a, b). It is valid until the next use of this memory."""
        out_Pab = self._matrix((*left_Pac.shape[:2], right_Pcb.size(2)))
        return torch.bmm(left_Pac, right_Pcb, out=out_Pab)

    def rounded(self, x_Pab: Tensor) -> Tensor:
        """Return the matrix in the dtype of this memory, without a copy if it has this dtype."""
        if x_Pab.dtype == self._flat.dtype:
            return x_Pab
        return self._matrix(x_Pab.shape).copy_(x_Pab)

    def _matrix(self, shape: Sequence[int]) -> Tensor:
        elements = math.prod(shape)
        if self._flat.numel() < elements:
            self._flat = self._flat.new_empty(elements)
        return self._flat[:elements].view(shape)


def _blocks(
    q_BKGlH: Tensor, k_BKsH: Tensor, band: Band, dtype: torch.dtype
) -> Iterator[ScoreBlock]:
    """Yield the blocks of a piece. ``dtype`` is the dtype of the scores."""
    rows, heads, groups, num_queries, _ = q_BKGlH.shape
    num_keys = k_BKsH.size(2)
    for start in range(0, num_queries, _QUERIES):
        stop = min(start + _QUERIES, num_queries)
        low = max(0, band.first + start)
        high = min(num_keys, band.last + stop)
        queries = slice(start, stop)
        keys = slice(low, high)

        # Keys that are visible to all queries of the block need no mask. They are in the middle, from the
        # first key of the last query to the last key of the first query. Round both ends to the vector
        # length, because complete vectors are masked faster.
        open_low = low + _round_up(max(0, band.first + stop - 1 - low))
        open_high = low + _round_down(max(0, band.last + start + 1 - low))
        masked_ranges = [(low, high)]
        if open_low <= open_high:
            masked_ranges = [(low, min(open_low, high)), (open_high, high)]
        masks = []
        for begin, end in masked_ranges:
            if begin < end:
                shifted = Band(band.first + start - begin, band.last + start - begin)
                mask_nm = mask(stop - start, end - begin, shifted, q_BKGlH).to(dtype)
                masks.append((slice(begin - low, end - low), mask_nm))

        # Multiply several pairs of row and head together, if their scores fit into the cache. They are
        # entire rows, or heads of one row.
        scores_bytes = groups * (stop - start) * (high - low) * dtype.itemsize
        at_once = max(1, _SCORES_BYTES // scores_bytes)
        rows_at_once = max(1, at_once // heads)
        heads_at_once = min(heads, at_once)
        for row in range(0, rows, rows_at_once):
            for head in range(0, heads, heads_at_once):
                pairs = (slice(row, row + rows_at_once), slice(head, head + heads_at_once))
                yield ScoreBlock((*pairs, slice(None), queries), (*pairs, keys), masks)


def _add_product(sum_Pab: Tensor, left_Pac: Tensor, right_Pcb: Tensor) -> None:
    """Add a product to a sum, which may have a wider dtype than its factors."""
    if sum_Pab.dtype == left_Pac.dtype:
        sum_Pab.baddbmm_(left_Pac, right_Pcb)
    else:
        sum_Pab += torch.bmm(left_Pac, right_Pcb)


def _resolved(scale: float | None, q_BlNH: Tensor) -> float:
    """Return the scale, by default 1 / sqrt(H)."""
    return float(q_BlNH.size(-1) ** -0.5) if scale is None else scale


def _single_piece(q_BlNH: Tensor, k_BsKH: Tensor, band: Band) -> Piece:
    return Piece(slice(None), slice(0, q_BlNH.size(1)), slice(0, k_BsKH.size(1)), band)


def _grouped(x_BlNH: Tensor, heads: int) -> Tensor:
    """Return a view of query heads (B, l, N, H) by the key-value head that serves them: (B, K, G, l, H)."""
    return x_BlNH.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)


def _pairs(x_rkGnH: Tensor) -> Tensor:
    """Reshape the queries of a block to (P, X, H), where P counts pairs of a row and a key-value head."""
    return x_rkGnH.flatten(2, 3).flatten(0, 1)


def _keys(x_BKsH: Tensor, block: ScoreBlock) -> Tensor:
    """Return the keys of a block as a view (P, m, H).

    No copy is needed, because the pairs of a block (row and key-value head) are entire rows,
    or heads of one row.
    """
    x_rkmH = x_BKsH[block.keys]
    return x_rkmH.view(-1, *x_rkmH.shape[2:])


def _round_up(number: int) -> int:
    return -(-number // _VECTOR) * _VECTOR


def _round_down(number: int) -> int:
    return number // _VECTOR * _VECTOR
