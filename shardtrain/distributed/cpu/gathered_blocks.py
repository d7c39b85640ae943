"""Attention of a rank's queries to gathered keys and values by blocks of products, on a CPU: one function both ways.

Keys and values are written once to where blocks multiply them: heads before tokens, in the order of the
sequence. All chunks of a rank read them there, in the backward pass too, and add to one sum of gradients. A rank has
keys up to its last chunk alone, since no query of it sees later ones.
Shape suffixes: B batch, t tokens of this rank, T all tokens, s keys that this rank has, l tokens of a chunk, N heads,
K key-value heads, H head; 2 keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.distributed.context_parallel.masks import chunks_of, documents_met
from shardtrain.distributed.cpu.shared_memory import SequenceExchange
from shardtrain.ops.cpu import blocked_attention
from shardtrain.ops.shared_documents import shifted
from shardtrain.ops.sliding_window import Band

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The first is the name since torch 2.13, which warns of the second."""

_ALL = 1 << 62
"""A window of more tokens than there are."""


def attention(
    q_BtNH: Tensor,
    k_BtKH: Tensor,
    v_BtKH: Tensor,
    documents_BT: Tensor | None,
    window: int,
    scale: float | None,
    group: dist.ProcessGroup,
    balanced: bool,
    shared: SequenceExchange | None,
) -> Tensor:
    """``gather.gathered_attention`` of plain scores without sinks; documents are on the host."""
    chunks = _Chunks(group, balanced, shared)
    return _GatheredBlocks.apply(q_BtNH, k_BtKH, v_BtKH, documents_BT, window, scale, chunks)  # type: ignore[no-any-return]


class _GatheredBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BtNH: Tensor,
        k_BtKH: Tensor,
        v_BtKH: Tensor,
        documents_BT: Tensor | None,
        window: int,
        scale: float | None,
        chunks: _Chunks,
    ) -> Tensor:
        B, tokens, K, H = k_BtKH.shape
        length = tokens // len(chunks.own)
        keys_values_2BKsH = k_BtKH.new_empty(2, B, K, chunks.seen * length, H)
        own = chunks.views(keys_values_2BKsH, chunks.rank)
        for index, own_2BKlH in enumerate(own):
            places = slice(index * length, (index + 1) * length)
            assert own_2BKlH is not None
            blocked_attention.place_heads_first(k_BtKH[:, places], v_BtKH[:, places], own_2BKlH)
        chunks.gather(keys_values_2BKsH)
        ctx.pieces = list(chunk_pieces(length, chunks.own, documents_BT, window))
        ctx.scale, ctx.chunks = scale, chunks
        out_BtNH, lse_BNt = blocked_attention.attend_in_pieces(q_BtNH, keys_values_2BKsH, ctx.pieces, scale)
        ctx.save_for_backward(q_BtNH, keys_values_2BKsH, lse_BNt)
        return out_BtNH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BtNH, keys_values_2BKsH, lse_BNt = ctx.saved_tensors
        inputs = (gradients[0], q_BtNH, keys_values_2BKsH, lse_BNt)
        dq_BtNH, sums_2BKsH = blocked_attention.attend_in_pieces_backward(*inputs, ctx.pieces, ctx.scale)
        dk_BtKH, dv_BtKH = ctx.chunks.reduce_scatter(sums_2BKsH, q_BtNH.dtype)
        return dq_BtNH, dk_BtKH, dv_BtKH, None, None, None, None


def chunk_pieces(
    length: int, chunks: Sequence[int], documents_BT: Tensor | None, window: int
) -> Iterator[blocked_attention.Piece]:
    """Yield pieces of the queries of each chunk of ``length`` tokens. Keys begin at the start of the sequence.

    A piece has all keys of its queries. Its band says which of them a query sees.
    """
    for index, chunk in enumerate(chunks):
        stop = (chunk + 1) * length
        own = slice(stop - length, stop)
        # Causal: keys up to the end of the chunk; with a window from the first that the first query sees
        seen = slice(max(0, own.start - window + 1) if window else 0, stop)
        mine, theirs = (None, None) if documents_BT is None else (documents_BT[:, own], documents_BT[:, seen])
        for batch, queries, keys in documents_met(slice(0, length), slice(0, stop - seen.start), mine, theirs):
            past = own.start + queries.start - seen.start - keys.start
            band = Band(past - (window or _ALL) + 1, past)
            places = shifted(queries, index * length), shifted(keys, seen.start)
            yield blocked_attention.Piece(batch, *places, band)


class _Chunks:
    """The chunks of each rank: how keys and values of others come to this one, and sums of gradients home."""

    def __init__(self, group: dist.ProcessGroup, balanced: bool, shared: SequenceExchange | None) -> None:
        self._group, self._shared = group, shared
        self._of_ranks = [chunks_of(rank, group.size(), balanced) for rank in range(group.size())]
        self.rank = group.rank()
        self.own = self._of_ranks[self.rank]
        self.seen = self._seen_by(self.rank)
        """How many chunks, from the first on, this rank has keys and values of."""

    def _seen_by(self, rank: int) -> int:
        return max(self._of_ranks[rank]) + 1

    def views(self, x_2BKsH: Tensor, rank: int) -> list[Tensor | None]:
        """What lies in the chunks of a rank, each (2, B, K, l, H); None for one that this rank does not see."""
        chunks = x_2BKsH.chunk(self.seen, dim=3)
        return [chunks[chunk] if chunk < self.seen else None for chunk in self._of_ranks[rank]]

    def gather(self, x_2BKsH: Tensor) -> None:
        """Write what other ranks have in their chunks; this rank's are there."""
        of_ranks = [self.views(x_2BKsH, rank) for rank in range(len(self._of_ranks))]
        if self._shared is not None:
            self._shared.gather_parts(of_ranks)
            return
        own = torch.stack([part for part in of_ranks[self.rank] if part is not None])
        given = [torch.empty_like(own) for _ in of_ranks]
        dist.all_gather(given, own, group=self._group)
        for rank, parts in enumerate(of_ranks):
            for part, theirs in zip(parts, given[rank], strict=True):
                if part is not None and rank != self.rank:
                    part.copy_(theirs)

    def reduce_scatter(self, sums_2BKsH: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum over ranks of what each has for this rank's chunks: (2, B, t, K, H). It may change ``sums_2BKsH``.

        In float32: a sum over ranks in bfloat16 would lose small contributions.
        """
        of_ranks = [self.views(sums_2BKsH, rank) for rank in range(len(self._of_ranks))]
        _, B, K, keys, H = sums_2BKsH.shape
        tokens = keys // self.seen * len(self.own)
        out_2BtKH = sums_2BKsH.new_empty(2, B, tokens, K, H, dtype=dtype)
        outs = out_2BtKH.transpose(2, 3).chunk(len(self.own), dim=3)
        if self._shared is not None:
            have = [[chunk < self._seen_by(rank) for chunk in self.own] for rank in range(len(of_ranks))]
            self._shared.reduce_scatter_parts(of_ranks, have, outs)
            return out_2BtKH
        zeros = torch.zeros_like(outs[0], dtype=sums_2BKsH.dtype, memory_format=torch.contiguous_format)
        whole = torch.stack([zeros if part is None else part for parts in of_ranks for part in parts])
        summed = torch.empty_like(whole[: len(outs)])
        _reduce_scatter(summed, whole, group=self._group)
        for out, total in zip(outs, summed, strict=True):
            out.copy_(total)
        return out_2BtKH
