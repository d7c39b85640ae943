"""Exact attention over pieces of queries and keys, forward and backward.

The results of the pieces are merged by a running softmax. Used by gather, ring and Ulysses. Shape
suffixes: B batch, t tokens of this rank, l queries and s keys of one call, N heads, K key-value heads, H
head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.distributed.context_parallel.masks import ContextPiece, Window, prefix_pieces
from shardtrain.ops.attention_scores import (
    PLAIN,
    QUERIES_AT_ONCE,
    Scores,
    sinks_gradient,
    with_sinks,
)
from shardtrain.ops.flash_attention import attend, attend_backward
from shardtrain.ops.sliding_window import queries_at_once

CoreFunction = Callable[
    [Tensor, Tensor, Tensor, dist.ProcessGroup, bool, Tensor | None, int, Scores, Tensor | None],
    Tensor,
]
"""A method of attention from this rank's queries to the keys of all ranks.

Its arguments are queries, keys, values, group, balanced, documents, window, scores and sinks.
"""


class PrefixAttention(torch.autograd.Function):
    """Causal attention of the last tokens to all tokens.

    The last query attends to all keys, and each earlier query to one key fewer. A window limits each
    query to its nearest keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BlNH: Tensor,
        k_BsKH: Tensor,
        v_BsKH: Tensor,
        documents_Bs: Tensor | None,
        window: int,
        scores: Scores,
        sinks_N: Tensor | None,
    ) -> Tensor:
        merged = Merged(q_BlNH, scores)
        ctx.scores = scores
        window_blocks = window_of(window, k_BsKH.size(1), q_BlNH, scores)
        ctx.blocked = bool(window_blocks.tokens)
        ctx.pieces = list(
            prefix_pieces(q_BlNH.size(1), k_BsKH.size(1), documents_Bs, window_blocks)
        )
        for piece in ctx.pieces:
            merged.attend(piece, q_BlNH, k_BsKH, v_BsKH)
        merged.add_sinks(sinks_N)
        out_BlNH = merged.out_BtNH.to(q_BlNH.dtype)
        ctx.save_for_backward(q_BlNH, k_BsKH, v_BsKH, out_BlNH, merged.lse_BNt, sinks_N)
        return out_BlNH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BlNH, k_BsKH, v_BsKH, out_BlNH, lse_BNl, sinks_N = ctx.saved_tensors
        d_out = gradients[0]
        saved = (d_out, q_BlNH, k_BsKH, v_BsKH, out_BlNH, lse_BNl)
        # Several blocks of queries add to the gradients of the same keys, so sum them in float32.
        exact = torch.float32 if ctx.blocked else k_BsKH.dtype
        dq = torch.zeros_like(q_BlNH, dtype=torch.float32)
        dk = torch.zeros_like(k_BsKH, dtype=exact)
        dv = torch.zeros_like(v_BsKH, dtype=exact)
        for piece in ctx.pieces:
            dq_piece, dk_piece, dv_piece = backward_of(piece, ctx.scores, *saved)
            dq[piece.batch, piece.rows] += dq_piece
            dk[piece.batch, piece.columns] += dk_piece
            dv[piece.batch, piece.columns] += dv_piece
        dsinks_N = sinks_gradient_of(d_out, out_BlNH, lse_BNl, sinks_N)
        return (
            dq.to(q_BlNH.dtype),
            dk.to(q_BlNH.dtype),
            dv.to(q_BlNH.dtype),
            None,
            None,
            None,
            dsinks_N,
        )


def sinks_gradient_of(
    gradient: Tensor, out: Tensor, lse: Tensor, sinks_N: Tensor | None
) -> Tensor | None:
    """Return the gradient of the sinks, or None without sinks."""
    return None if sinks_N is None else sinks_gradient(gradient, out, lse, sinks_N)


def window_of(window: int, tokens: int, q_BtNH: Tensor, scores: Scores) -> Window:
    """Return the window and the number of queries per block.

    Scores that no flash kernel supports are always computed in blocks. Without a window, use a window that
    covers all tokens. ALiBi requires blocks, because it needs the distance from keys to queries. Within a
    block, tokens are contiguous and the distance is known.
    """
    if scores.has_kernel:
        return Window(window, queries_at_once(window, q_BtNH.device))
    return Window(window or tokens, QUERIES_AT_ONCE)


class Merged:
    """Attention outputs and log-sum-exp over the keys so far, in float32.

    This is the online softmax of Milakov and Gimelshein (2018).
    """

    def __init__(self, q_BtNH: Tensor, scores: Scores = PLAIN) -> None:
        self._scores = scores
        self.out_BtNH = torch.zeros_like(q_BtNH, dtype=torch.float32)
        B, t, N, _ = q_BtNH.shape
        # log(0): no key has been seen yet
        self.lse_BNt = self.out_BtNH.new_full((B, N, t), -torch.inf)

    def attend(self, piece: ContextPiece, q_BtNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor) -> None:
        """Merge the attention of a piece's queries to its keys."""
        batch, rows, columns, causal, band = piece
        q_BlNH = q_BtNH[batch, rows]
        k_BsKH = k_BsKH[batch, columns]
        v_BsKH = v_BsKH[batch, columns]
        out_BlNH, lse_BNl = attend(q_BlNH, k_BsKH, v_BsKH, causal, band, self._scores)
        old_BNl = self.lse_BNt[batch, :, rows]
        # Rescale the old and the new output to the softmax over all keys so far, then add them.
        new_BNl = torch.logaddexp(old_BNl, lse_BNl)
        old_share_BlN1 = (old_BNl - new_BNl).exp().transpose(1, 2).unsqueeze(-1)
        new_share_BlN1 = (lse_BNl - new_BNl).exp().transpose(1, 2).unsqueeze(-1)
        rescaled = self.out_BtNH[batch, rows] * old_share_BlN1
        self.out_BtNH[batch, rows] = rescaled + out_BlNH.float() * new_share_BlN1
        self.lse_BNt[batch, :, rows] = new_BNl

    def add_sinks(self, sinks_N: Tensor | None) -> None:
        """Merge the sink of each head. Call it after all pieces. None is a no-op."""
        if sinks_N is not None:
            self.out_BtNH, self.lse_BNt = with_sinks(self.out_BtNH, self.lse_BNt, sinks_N)


def backward_of(
    piece: ContextPiece,
    scores: Scores,
    gradient_BtNH: Tensor,
    q_BtNH: Tensor,
    k: Tensor,
    v: Tensor,
    out_BtNH: Tensor,
    lse_BNt: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients that a piece adds to its queries, keys and values."""
    batch, rows, columns, causal, band = piece
    gradient = gradient_BtNH[batch, rows]
    q = q_BtNH[batch, rows]
    out = out_BtNH[batch, rows]
    k = k[batch, columns]
    v = v[batch, columns]
    lse_BNl = lse_BNt[batch, :, rows]
    return attend_backward(gradient, q, k, v, out, lse_BNl, causal, band, scores)
