"""Causal attention over a sequence that is split over ranks, three ways; each has its own exact backward.

Split: "balanced" ranks hold chunks r and 2P-1-r of 2P (head and tail), others chunk r of P. Shape suffixes: B batch,
t tokens here, T all tokens, N heads, K key-value heads, n heads after an exchange, H head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from shardtrain.errors import ConfigError, Problem

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The first is the name since torch 2.13, which warns of the second."""


def gathered_attention(
    q_BtNH: Tensor, k_BtKH: Tensor, v_BtKH: Tensor, group: dist.ProcessGroup, balanced: bool
) -> Tensor:
    """Gather all keys and values, then attend with this rank's queries; the gradients are reduce-scattered back.

    Each chunk of queries attends to the chunks before it in full and to its own causally, as one call each merged by
    their log-sum-exp, so no mask of (t, T) is ever made.
    """
    size, rank = group.size(), group.rank()
    k_BTKH, v_BTKH = (_natural_order(_GatherSequence.apply(x, group), size, balanced) for x in (k_BtKH, v_BtKH))
    mine = (rank, 2 * size - 1 - rank) if balanced else (rank,)
    length = q_BtNH.size(1) // len(mine)
    outputs = []
    for index, chunk in enumerate(mine):
        q_BlNH = q_BtNH[:, index * length : (index + 1) * length]
        stop = (chunk + 1) * length
        outputs.append(_lower_right_causal(q_BlNH, k_BTKH[:, :stop], v_BTKH[:, :stop]))
    return torch.cat(outputs, dim=1)


def ring_attention(q_BtNH: Tensor, k_BtKH: Tensor, v_BtKH: Tensor, group: dist.ProcessGroup, balanced: bool) -> Tensor:
    """Pass keys and values round the ring and merge what each part contributes; memory stays that of one part."""
    return _Ring.apply(q_BtNH, k_BtKH, v_BtKH, group, balanced)  # type: ignore[no-any-return]


def ulysses_attention(q_BtNH: Tensor, k_BtKH: Tensor, v_BtKH: Tensor, group: dist.ProcessGroup, _: bool) -> Tensor:
    """Exchange heads for tokens, attend to whole sequences with some of the heads, and exchange back."""
    q_BTnH, k_BTkH, v_BTkH = (_HeadsForTokens.apply(x, group) for x in (q_BtNH, k_BtKH, v_BtKH))
    q_BnTH, k_BkTH, v_BkTH = (x.transpose(1, 2) for x in (q_BTnH, k_BTkH, v_BTkH))
    grouped = q_BnTH.size(1) != k_BkTH.size(1)
    out_BnTH = F.scaled_dot_product_attention(q_BnTH, k_BkTH, v_BkTH, is_causal=True, enable_gqa=grouped)
    return _TokensForHeads.apply(out_BnTH.transpose(1, 2), group)  # type: ignore[no-any-return]


def _lower_right_causal(q_BlNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor) -> Tensor:
    """Attention in which the last query sees all keys and each query before it one fewer."""
    return _PrefixAttention.apply(q_BlNH, k_BsKH, v_BsKH)  # type: ignore[no-any-return]


def _natural_order(x_BTKH: Tensor, size: int, balanced: bool) -> Tensor:
    """Undo the order in which balanced parts lie after a gather: chunks 0, 2P-1, 1, 2P-2, ... become 0, 1, 2, ..."""
    if not balanced:
        return x_BTKH
    chunks = x_BTKH.chunk(2 * size, dim=1)
    order = [2 * i if i < size else 2 * (2 * size - 1 - i) + 1 for i in range(2 * size)]
    return torch.cat([chunks[i] for i in order], dim=1)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtKH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x_BtKH = x_BtKH.contiguous()
        parts = [torch.empty_like(x_BtKH) for _ in range(group.size())]
        dist.all_gather(parts, x_BtKH, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # summed in float32: each rank adds a contribution, and a sum in bfloat16 would lose the small ones
        parts = gradients[0].float().chunk(ctx.group.size(), dim=1)
        mine = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        _reduce_scatter(mine, torch.cat(parts, dim=0), group=ctx.group)
        return mine.to(gradients[0].dtype), None


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
    parts_PBtnH = torch.stack(x_BtNH.chunk(group.size(), dim=2))  # a copy in a row: all_to_all reads memory as it lies
    received_PBtnH = torch.empty_like(parts_PBtnH)
    dist.all_to_all_single(received_PBtnH, parts_PBtnH, group=group)
    return torch.cat(received_PBtnH.unbind(0), dim=1)


def _tokens_for_heads(x_BTnH: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts_PBtnH = torch.stack(x_BTnH.chunk(group.size(), dim=1))
    received_PBtnH = torch.empty_like(parts_PBtnH)
    dist.all_to_all_single(received_PBtnH, parts_PBtnH, group=group)
    return torch.cat(received_PBtnH.unbind(0), dim=2)


class _PrefixAttention(torch.autograd.Function):
    """Queries at the end of a prefix of keys: the keys before them in full, their own causally, merged."""

    @staticmethod
    def forward(ctx: Any, q_BlNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor) -> Tensor:
        length, total = q_BlNH.size(1), k_BsKH.size(1)
        merged = Merged(q_BlNH)
        for start, stop, causal in _prefix_pieces(length, total):
            merged.add(slice(0, length), *attend(q_BlNH, k_BsKH[:, start:stop], v_BsKH[:, start:stop], causal))
        out_BlNH = merged.out_BtNH.to(q_BlNH.dtype)
        ctx.save_for_backward(q_BlNH, k_BsKH, v_BsKH, out_BlNH, merged.lse_BNt)
        return out_BlNH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BlNH, k_BsKH, v_BsKH, out_BlNH, lse_BNl = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q_BlNH, dtype=torch.float32), torch.zeros_like(k_BsKH), torch.zeros_like(v_BsKH)
        for start, stop, causal in _prefix_pieces(q_BlNH.size(1), k_BsKH.size(1)):
            keys, values = k_BsKH[:, start:stop], v_BsKH[:, start:stop]
            piece = attend_backward(gradients[0], q_BlNH, keys, values, out_BlNH, lse_BNl, causal)
            dq += piece[0]
            dk[:, start:stop], dv[:, start:stop] = piece[1], piece[2]
        return dq.to(q_BlNH.dtype), dk, dv


def _prefix_pieces(length: int, total: int) -> list[tuple[int, int, bool]]:
    before = [(0, total - length, False)] if total > length else []
    return [*before, (total - length, total, True)]


class Merged:
    """A running softmax over parts of the keys: outputs and log-sum-exp in float32 (Milakov and Gimelshein 2018)."""

    def __init__(self, q_BtNH: Tensor) -> None:
        self.out_BtNH = torch.zeros_like(q_BtNH, dtype=torch.float32)
        B, t, N, _ = q_BtNH.shape
        self.lse_BNt = torch.full((B, N, t), -torch.inf, dtype=torch.float32, device=q_BtNH.device)

    def add(self, rows: slice, out_BlNH: Tensor, lse_BNl: Tensor) -> None:
        """Add what some query rows got from one more part of the keys."""
        old_BNl = self.lse_BNt[:, :, rows]
        new_BNl = torch.logaddexp(old_BNl, lse_BNl)
        keep, take = ((old - new_BNl).exp().transpose(1, 2)[..., None] for old in (old_BNl, lse_BNl))
        self.out_BtNH[:, rows] = self.out_BtNH[:, rows] * keep + out_BlNH.float() * take
        self.lse_BNt[:, :, rows] = new_BNl


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BtNH: Tensor, k_BtKH: Tensor, v_BtKH: Tensor, group: dist.ProcessGroup, balanced: bool
    ) -> Tensor:
        merged = Merged(q_BtNH)
        keys_values = torch.stack((k_BtKH, v_BtKH))
        for source in _sources(group):
            for rows, columns, causal in _ring_pieces(q_BtNH.size(1), source, group.rank(), balanced):
                part = keys_values[:, :, columns]
                merged.add(rows, *attend(q_BtNH[:, rows], part[0], part[1], causal))
            keys_values = _pass_on(keys_values, group)
        out_BtNH = merged.out_BtNH.to(q_BtNH.dtype)
        ctx.save_for_backward(q_BtNH, k_BtKH, v_BtKH, out_BtNH, merged.lse_BNt)
        ctx.group, ctx.balanced = group, balanced
        return out_BtNH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BtNH, k_BtKH, v_BtKH, out_BtNH, lse_BNt = ctx.saved_tensors
        group, tokens = ctx.group, q_BtNH.size(1)
        dq_BtNH = torch.zeros_like(q_BtNH, dtype=torch.float32)
        keys_values = torch.stack((k_BtKH, v_BtKH))
        # the gradient of a part travels with it, gathers what every rank adds, and is home after a whole round
        summed = torch.zeros_like(keys_values, dtype=torch.float32)
        for source in _sources(group):
            for rows, columns, causal in _ring_pieces(tokens, source, group.rank(), ctx.balanced):
                part = keys_values[:, :, columns]
                saved = (q_BtNH[:, rows], part[0], part[1], out_BtNH[:, rows], lse_BNt[:, :, rows])
                dq, dk, dv = attend_backward(gradients[0][:, rows], *saved, causal)
                dq_BtNH[:, rows] += dq
                summed[0][:, columns] += dk
                summed[1][:, columns] += dv
            keys_values = _pass_on(keys_values, group)
            summed = _pass_on(summed, group)
        dtype = q_BtNH.dtype
        return dq_BtNH.to(dtype), summed[0].to(dtype), summed[1].to(dtype), None, None


def _sources(group: dist.ProcessGroup) -> list[int]:
    """Whose keys and values this rank holds in each turn: its own, then its predecessor's, ..."""
    return [(group.rank() - turn) % group.size() for turn in range(group.size())]


def _ring_pieces(tokens: int, source: int, rank: int, balanced: bool) -> list[tuple[slice, slice, bool]]:
    """Which query rows meet which keys of ``source``, and whether causally.

    A balanced part is a head chunk and a tail chunk. Its own part is causal as it lies. To an earlier rank's keys all
    rows come after the head chunk and before the tail one; to a later rank's, the tail rows alone come after both.
    """
    everything, half = slice(0, tokens), tokens // 2
    if source == rank:
        return [(everything, everything, True)]
    if not balanced:
        return [(everything, everything, False)] if source < rank else []
    return [(everything, slice(0, half), False)] if source < rank else [(slice(half, tokens), everything, False)]


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


def attend(q_BlNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention output (B, l, N, H) and its log-sum-exp (B, N, l) in float32, by the device's flash kernel."""
    q, k, v = _heads_first(q_BlNH, k_BsKH, v_BsKH)
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    else:
        _check_flash(q)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out.transpose(1, 2), lse.float()


def attend_backward(
    gradient_BlNH: Tensor,
    q_BlNH: Tensor,
    k_BsKH: Tensor,
    v_BsKH: Tensor,
    out_BlNH: Tensor,
    lse_BNl: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values from one part of the keys, given the output and log-sum-exp over all."""
    q, k, v = _heads_first(q_BlNH, k_BsKH, v_BsKH)
    gradient, out = (x.transpose(1, 2).contiguous() for x in (gradient_BlNH, out_BlNH))
    lse = lse_BNl.contiguous()
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal
        )
    else:
        # lengths and random state of the forward call: dense inputs and no dropout, so neither is read
        lengths = torch.empty(0, dtype=torch.int32, device=q.device)
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, lengths, lengths, q.size(2), k.size(2), 0.0, causal, random_state, random_state
        )
    dq, dk, dv = (x.transpose(1, 2) for x in grads[:3])
    groups = q_BlNH.size(2) // k_BsKH.size(2)
    if groups > 1:  # each key head served several query heads
        dk, dv = (x.unflatten(2, (-1, groups)).float().sum(3).to(x.dtype) for x in (dk, dv))
    return dq, dk, dv


def _heads_first(q_BlNH: Tensor, k_BsKH: Tensor, v_BsKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = q_BlNH.size(2) // k_BsKH.size(2)
    if groups > 1:
        k_BsKH, v_BsKH = (x.repeat_interleave(groups, dim=2) for x in (k_BsKH, v_BsKH))
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q_BlNH, k_BsKH, v_BsKH))
    return q, k, v


def _check_flash(q: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16):
        rule = "has no flash attention kernel on CUDA, which splitting a sequence needs"
        fix = 'use bfloat16 or float16, or parallelism.context_parallel_method="ulysses"'
        raise ConfigError(Problem("training.mixed_precision_param", str(q.dtype).removeprefix("torch."), rule, fix))
