"""Causal attention over a sequence that is split over ranks, three ways; each has its own exact backward.

With ``balanced`` rank r holds chunks r and 2P-1-r of 2P (head and tail), else chunk r of P. ``documents_BT`` is whole
on every rank, so each knows the mask without communication, and blocks of queries and keys that share no document are
skipped. Shape suffixes: B batch, t tokens of this rank, T all tokens, N heads, K key-value heads, n heads after an
exchange, H head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardtrain.distributed.context_parallel.masks import ContextPiece, Window, chunks_of, prefix_pieces, ring_pieces
from shardtrain.ops import document_mask
from shardtrain.ops.attention_scores import PLAIN, QUERIES_AT_ONCE, Scores, sinks_gradient, with_sinks
from shardtrain.ops.flash_attention import attend, attend_backward
from shardtrain.ops.sliding_window import queries_at_once

if TYPE_CHECKING:
    from shardtrain.distributed.cpu.shared_memory import SequenceExchange

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The first is the name since torch 2.13, which warns of the second."""


def gathered_attention(
    q_BtNH: Tensor,
    k_BtKH: Tensor,
    v_BtKH: Tensor,
    group: dist.ProcessGroup,
    balanced: bool,
    documents_BT: Tensor | None = None,
    window: int = 0,
    scores: Scores = PLAIN,
    sinks_N: Tensor | None = None,
    shared: SequenceExchange | None = None,
) -> Tensor:
    """Gather all keys and values, then attend with this rank's queries; the gradients are reduce-scattered back.

    With ``shared`` both go by shared memory in place of the group's collectives. Each chunk of queries attends
    to the chunks before it in full and to its own causally, as one call each merged by their log-sum-exp, so no mask of
    (t, T) is ever made.
    """
    documents_BT = None if documents_BT is None else document_mask.on_host(documents_BT)
    if sinks_N is None and scores.has_kernel and document_mask.in_blocks(q_BtNH):  # as in an attention core
        from shardtrain.distributed.cpu import gathered_blocks  # a run on an accelerator does not import it

        inputs = (q_BtNH, k_BtKH, v_BtKH)
        return gathered_blocks.attention(*inputs, documents_BT, window, scores.scale, group, balanced, shared)
    size = group.size()
    chunks = chunks_of(group.rank(), size, balanced)
    k_BTKH = _natural_order(_GatherSequence.apply(k_BtKH, group, shared), size, balanced)
    v_BTKH = _natural_order(_GatherSequence.apply(v_BtKH, group, shared), size, balanced)
    length = q_BtNH.size(1) // len(chunks)
    outputs = []
    for index, chunk in enumerate(chunks):
        q_BlNH = q_BtNH[:, index * length : (index + 1) * length]
        stop = (chunk + 1) * length
        # causal: keys up to the end of the chunk; with a window from the first that the first query attends to
        keys = slice(max(0, stop - length - window + 1) if window else 0, stop)
        documents_Bs = None if documents_BT is None else documents_BT[:, keys]
        keys_values = k_BTKH[:, keys], v_BTKH[:, keys]
        outputs.append(_PrefixAttention.apply(q_BlNH, *keys_values, documents_Bs, window, scores, sinks_N))
    return torch.cat(outputs, dim=1)


def ring_attention(
    q_BtNH: Tensor,
    k_BtKH: Tensor,
    v_BtKH: Tensor,
    group: dist.ProcessGroup,
    balanced: bool,
    documents_BT: Tensor | None = None,
    window: int = 0,
    scores: Scores = PLAIN,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Pass keys and values round the ring and merge what each part contributes; memory stays that of one part."""
    documents_BT = None if documents_BT is None else document_mask.on_host(documents_BT)
    inputs = (q_BtNH, k_BtKH, v_BtKH, group, balanced, documents_BT, window, scores, sinks_N)
    return _Ring.apply(*inputs)  # type: ignore[no-any-return]


def ulysses_attention(
    q_BtNH: Tensor,
    k_BtKH: Tensor,
    v_BtKH: Tensor,
    group: dist.ProcessGroup,
    _: bool,
    documents_BT: Tensor | None = None,
    window: int = 0,
    scores: Scores = PLAIN,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Exchange heads for tokens, attend to whole sequences with some of the heads, and exchange back."""
    q_BTnH = _HeadsForTokens.apply(q_BtNH, group)
    k_BTkH = _HeadsForTokens.apply(k_BtKH, group)
    v_BTkH = _HeadsForTokens.apply(v_BtKH, group)
    heads = slice(group.rank() * q_BTnH.size(2), (group.rank() + 1) * q_BTnH.size(2))
    if scores.slopes:
        scores = scores._replace(slopes=scores.slopes[heads])
    sinks_n = None if sinks_N is None else sinks_N[heads]
    # soft caps and other scores without a kernel are computed in blocks of queries
    if not scores.has_kernel:
        documents_BT = None if documents_BT is None else document_mask.on_host(documents_BT)
        out_BTnH = _PrefixAttention.apply(q_BTnH, k_BTkH, v_BTkH, documents_BT, window, scores, sinks_n)
        return _TokensForHeads.apply(out_BTnH, group)  # type: ignore[no-any-return]
    masked = documents_BT is not None or 0 < window < q_BTnH.size(1) or sinks_n is not None
    if masked or document_mask.in_blocks(q_BTnH):  # as in an attention core
        out_BTnH = document_mask.attention(q_BTnH, k_BTkH, v_BTkH, documents_BT, window, scores.scale, sinks_n)
        return _TokensForHeads.apply(out_BTnH, group)  # type: ignore[no-any-return]
    # scaled_dot_product_attention has heads before tokens
    q_BnTH = q_BTnH.transpose(1, 2)
    k_BkTH = k_BTkH.transpose(1, 2)
    v_BkTH = v_BTkH.transpose(1, 2)
    grouped = q_BnTH.size(1) != k_BkTH.size(1)
    out_BnTH = F.scaled_dot_product_attention(
        q_BnTH, k_BkTH, v_BkTH, is_causal=True, scale=scores.scale, enable_gqa=grouped
    )
    return _TokensForHeads.apply(out_BnTH.transpose(1, 2), group)  # type: ignore[no-any-return]


def _natural_order(x_BTKH: Tensor, size: int, balanced: bool) -> Tensor:
    """Undo the order in which balanced parts lie after a gather: chunks 0, 2P-1, 1, 2P-2, ... become 0, 1, 2, ..."""
    if not balanced:
        return x_BTKH
    chunks = x_BTKH.chunk(2 * size, dim=1)
    order = [2 * i if i < size else 2 * (2 * size - 1 - i) + 1 for i in range(2 * size)]
    return torch.cat([chunks[i] for i in order], dim=1)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtKH: Tensor, group: dist.ProcessGroup, shared: SequenceExchange | None) -> Tensor:
        ctx.group, ctx.shared = group, shared
        if shared is not None:
            return shared.gather(x_BtKH.flatten(2)).unflatten(2, x_BtKH.shape[2:])
        x_BtKH = x_BtKH.contiguous()
        parts = [torch.empty_like(x_BtKH) for _ in range(group.size())]
        dist.all_gather(parts, x_BtKH, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # reduced in float32: a sum over ranks in bfloat16 would lose small contributions
        if ctx.shared is not None:
            gradient = ctx.shared.reduce_scatter(gradients[0].flatten(2))
            return gradient.unflatten(2, gradients[0].shape[2:]), None, None
        parts = gradients[0].float().chunk(ctx.group.size(), dim=1)
        gradient = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        _reduce_scatter(gradient, torch.cat(parts, dim=0), group=ctx.group)
        return gradient.to(gradients[0].dtype), None, None


class _HeadsForTokens(torch.autograd.Function):
    """(B, t, N, H) of all heads and some tokens -> (B, T, N / P, H) of some heads and all tokens."""

    @staticmethod
    def forward(ctx: Any, x_BtNH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _heads_for_tokens(x_BtNH, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _tokens_for_heads(gradients[0], ctx.group), None


class _TokensForHeads(torch.autograd.Function):
    """The inverse of ``_HeadsForTokens``."""

    @staticmethod
    def forward(ctx: Any, x_BTnH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _tokens_for_heads(x_BTnH, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _heads_for_tokens(gradients[0], ctx.group), None


def _heads_for_tokens(x_BtNH: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts_PBtnH = torch.stack(x_BtNH.chunk(group.size(), dim=2))  # contiguous, as all_to_all_single needs
    received_PBtnH = torch.empty_like(parts_PBtnH)
    dist.all_to_all_single(received_PBtnH, parts_PBtnH, group=group)
    return torch.cat(received_PBtnH.unbind(0), dim=1)


def _tokens_for_heads(x_BTnH: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts_PBtnH = torch.stack(x_BTnH.chunk(group.size(), dim=1))
    received_PBtnH = torch.empty_like(parts_PBtnH)
    dist.all_to_all_single(received_PBtnH, parts_PBtnH, group=group)
    return torch.cat(received_PBtnH.unbind(0), dim=2)


class _PrefixAttention(torch.autograd.Function):
    """Causal attention of queries at the end of a prefix of keys: in full to earlier keys, causally to their own.

    The last query attends to all keys, each query before it to one fewer; with a window, to the nearest ones.
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
        window_blocks = _window(window, k_BsKH.size(1), q_BlNH, scores)
        ctx.blocked = bool(window_blocks.tokens)
        ctx.pieces = list(prefix_pieces(q_BlNH.size(1), k_BsKH.size(1), documents_Bs, window_blocks))
        for piece in ctx.pieces:
            merged.attend(piece, q_BlNH, k_BsKH, v_BsKH)
        merged.add_sinks(sinks_N)
        out_BlNH = merged.out_BtNH.to(q_BlNH.dtype)
        ctx.save_for_backward(q_BlNH, k_BsKH, v_BsKH, out_BlNH, merged.lse_BNt, sinks_N)
        return out_BlNH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BlNH, k_BsKH, v_BsKH, out_BlNH, lse_BNl, sinks_N = ctx.saved_tensors
        saved = (gradients[0], q_BlNH, k_BsKH, v_BsKH, out_BlNH, lse_BNl)
        exact = torch.float32 if ctx.blocked else k_BsKH.dtype  # blocks of queries add to the same keys
        dq = torch.zeros_like(q_BlNH, dtype=torch.float32)
        dk = torch.zeros_like(k_BsKH, dtype=exact)
        dv = torch.zeros_like(v_BsKH, dtype=exact)
        for piece in ctx.pieces:
            part = _backward_of(piece, ctx.scores, *saved)
            dq[piece.batch, piece.rows] += part[0]
            dk[piece.batch, piece.columns] += part[1]
            dv[piece.batch, piece.columns] += part[2]
        dsinks_N = _sinks_gradient(gradients[0], out_BlNH, lse_BNl, sinks_N)
        return dq.to(q_BlNH.dtype), dk.to(q_BlNH.dtype), dv.to(q_BlNH.dtype), None, None, None, dsinks_N


def _sinks_gradient(gradient: Tensor, out: Tensor, lse: Tensor, sinks_N: Tensor | None) -> Tensor | None:
    return None if sinks_N is None else sinks_gradient(gradient, out, lse, sinks_N)


def _window(window: int, tokens: int, q_BtNH: Tensor, scores: Scores) -> Window:
    """How queries are cut into blocks. Scores without a kernel are computed in blocks too, in a window of all tokens.

    Blocks are contiguous and know the offset of their queries from their keys, which ALiBi's distances need.
    """
    if scores.has_kernel:
        return Window(window, queries_at_once(window, q_BtNH.device))
    return Window(window or tokens, QUERIES_AT_ONCE)


class Merged:
    """A running softmax over parts of the keys: outputs and log-sum-exp in float32 (Milakov and Gimelshein 2018)."""

    def __init__(self, q_BtNH: Tensor, scores: Scores = PLAIN) -> None:
        self._scores = scores
        self.out_BtNH = torch.zeros_like(q_BtNH, dtype=torch.float32)
        B, t, N, _ = q_BtNH.shape
        self.lse_BNt = torch.full((B, N, t), -torch.inf, dtype=torch.float32, device=q_BtNH.device)

    def attend(self, piece: ContextPiece, q_BtNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor) -> None:
        """Merge the attention of a piece's queries to its keys."""
        batch, rows, columns, causal, band = piece
        q_BlNH = q_BtNH[batch, rows]
        k_BsKH = k_BsKH[batch, columns]
        v_BsKH = v_BsKH[batch, columns]
        out_BlNH, lse_BNl = attend(q_BlNH, k_BsKH, v_BsKH, causal, band, self._scores)
        old_BNl = self.lse_BNt[batch, :, rows]
        # both parts are rescaled to the softmax over all keys so far
        new_BNl = torch.logaddexp(old_BNl, lse_BNl)
        keep = (old_BNl - new_BNl).exp().transpose(1, 2)[..., None]
        take = (lse_BNl - new_BNl).exp().transpose(1, 2)[..., None]
        self.out_BtNH[batch, rows] = self.out_BtNH[batch, rows] * keep + out_BlNH.float() * take
        self.lse_BNt[batch, :, rows] = new_BNl

    def add_sinks(self, sinks_N: Tensor | None) -> None:
        """Merge the sink of each head, after all pieces; None does nothing."""
        if sinks_N is not None:
            self.out_BtNH, self.lse_BNt = with_sinks(self.out_BtNH, self.lse_BNt, sinks_N)


def _backward_of(
    piece: ContextPiece,
    scores: Scores,
    gradient_BtNH: Tensor,
    q_BtNH: Tensor,
    k: Tensor,
    v: Tensor,
    out_BtNH: Tensor,
    lse_BNt: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a piece's queries, keys and values from this piece alone."""
    batch, rows, columns, causal, band = piece
    gradient = gradient_BtNH[batch, rows]
    q = q_BtNH[batch, rows]
    out = out_BtNH[batch, rows]
    k = k[batch, columns]
    v = v[batch, columns]
    lse_BNl = lse_BNt[batch, :, rows]
    return attend_backward(gradient, q, k, v, out, lse_BNl, causal, band, scores)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BtNH: Tensor,
        k_BtKH: Tensor,
        v_BtKH: Tensor,
        group: dist.ProcessGroup,
        balanced: bool,
        documents_BT: Tensor | None,
        window: int,
        scores: Scores,
        sinks_N: Tensor | None,
    ) -> Tensor:
        merged = Merged(q_BtNH, scores)
        ctx.scores = scores
        keys_values = torch.stack((k_BtKH, v_BtKH))
        window_blocks = _window(window, q_BtNH.size(1) * group.size(), q_BtNH, scores)
        ctx.pieces = ring_pieces(q_BtNH.size(1), group.rank(), group.size(), balanced, documents_BT, window_blocks)
        for pieces in ctx.pieces:
            for piece in pieces:
                merged.attend(piece, q_BtNH, *keys_values)
            keys_values = _pass_on(keys_values, group)
        merged.add_sinks(sinks_N)
        out_BtNH = merged.out_BtNH.to(q_BtNH.dtype)
        ctx.save_for_backward(q_BtNH, k_BtKH, v_BtKH, out_BtNH, merged.lse_BNt, sinks_N)
        ctx.group = group
        return out_BtNH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BtNH, k_BtKH, v_BtKH, out_BtNH, lse_BNt, sinks_N = ctx.saved_tensors
        dq_BtNH = torch.zeros_like(q_BtNH, dtype=torch.float32)
        keys_values = torch.stack((k_BtKH, v_BtKH))
        # the gradient of keys and values travels with them: every rank adds to it, and after a whole round it is home
        summed = torch.zeros_like(keys_values, dtype=torch.float32)
        for pieces in ctx.pieces:
            for piece in pieces:
                batch, rows, columns = piece[:3]
                k, v = keys_values
                dq, dk, dv = _backward_of(piece, ctx.scores, gradients[0], q_BtNH, k, v, out_BtNH, lse_BNt)
                dq_BtNH[batch, rows] += dq
                summed[0][batch, columns] += dk
                summed[1][batch, columns] += dv
            keys_values = _pass_on(keys_values, ctx.group)
            summed = _pass_on(summed, ctx.group)
        dtype = q_BtNH.dtype
        dsinks_N = _sinks_gradient(gradients[0], out_BtNH, lse_BNt, sinks_N)
        return dq_BtNH.to(dtype), summed[0].to(dtype), summed[1].to(dtype), None, None, None, None, None, dsinks_N


def _pass_on(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send to the next rank of the ring and receive from the one before."""
    tensor = tensor.contiguous()
    received = torch.empty_like(tensor)
    next_rank = dist.get_global_rank(group, (group.rank() + 1) % group.size())
    previous = dist.get_global_rank(group, (group.rank() - 1) % group.size())
    operations = [
        dist.P2POp(dist.isend, tensor, next_rank, group),
        dist.P2POp(dist.irecv, received, previous, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received
