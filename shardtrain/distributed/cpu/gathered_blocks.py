"""Blocked attention on a CPU from a rank's queries to keys and values that are gathered over
context-parallel ranks.

Keys and values are written once, in the layout that blocks multiply: heads before tokens, tokens in the
order of the sequence. All chunks of a rank read them there in forward and backward, and add to one sum of
gradients. A rank has only keys up to its last chunk, because none of its queries sees later ones.

Shape suffixes: B batch, t tokens of this rank, T all tokens, s keys that this rank has, l tokens of a
chunk, N heads, K key-value heads, H head; 2 keys and values.
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
"""torch 2.13 has renamed the function, and warns of the old name."""

_ALL = 1 << 62
"""A window larger than any sequence."""


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
    """Compute ``gather.gathered_attention`` for plain scores without sinks. Documents must be on the host."""
    chunks = _Chunks(group, balanced, shared)
    return _GatheredBlocks.apply(q_BtNH, k_BtKH, v_BtKH, documents_BT, window, scale, chunks)  # type: ignore[no-any-return]


class _GatheredBlocks(torch.autograd.Function):
    """Gather keys and values and attend; backward reduce-scatters their gradients."""

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
        # Write this rank's keys and values directly to their place in the gathered tensor.
        own = chunks.views(keys_values_2BKsH, chunks.rank)
        for index, own_2BKlH in enumerate(own):
            places = slice(index * length, (index + 1) * length)
            assert own_2BKlH is not None
            blocked_attention.place_heads_first(k_BtKH[:, places], v_BtKH[:, places], own_2BKlH)
        chunks.gather(keys_values_2BKsH)
        # Backward uses the same pieces.
        ctx.pieces = list(chunk_pieces(length, chunks.own, documents_BT, window))
        ctx.scale = scale
        ctx.chunks = chunks
        out_BtNH, lse_BNt = blocked_attention.attend_in_pieces(
            q_BtNH, keys_values_2BKsH, ctx.pieces, scale
        )
        ctx.save_for_backward(q_BtNH, keys_values_2BKsH, lse_BNt)
        return out_BtNH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BtNH, keys_values_2BKsH, lse_BNt = ctx.saved_tensors
        inputs = (gradients[0], q_BtNH, keys_values_2BKsH, lse_BNt)
        dq_BtNH, sums_2BKsH = blocked_attention.attend_in_pieces_backward(
            *inputs, ctx.pieces, ctx.scale
        )
        dk_BtKH, dv_BtKH = ctx.chunks.reduce_scatter(sums_2BKsH, q_BtNH.dtype)
        return dq_BtNH, dk_BtKH, dv_BtKH, None, None, None, None


def chunk_pieces(
    length: int, chunks: Sequence[int], documents_BT: Tensor | None, window: int
) -> Iterator[blocked_attention.Piece]:
    """Yield pieces of the queries of each chunk of ``length`` tokens.

    Keys start at the beginning of the sequence.

    A piece contains all keys of its queries. Its band limits the keys that each query sees.
    """
    for index, chunk in enumerate(chunks):
        stop = (chunk + 1) * length
        start = stop - length
        # Causal: keys up to the end of the chunk, with a window from the first key that the first query sees.
        first_key = max(0, start - window + 1) if window else 0
        query_documents = None
        key_documents = None
        if documents_BT is not None:
            query_documents = documents_BT[:, start:stop]
            key_documents = documents_BT[:, first_key:stop]
        stretch = (slice(0, length), slice(0, stop - first_key))
        for batch, queries, keys in documents_met(*stretch, query_documents, key_documents):
            # distance from the first key of the piece to its first query
            distance = start + queries.start - first_key - keys.start
            band = Band(distance - (window or _ALL) + 1, distance)
            piece_queries = shifted(queries, index * length)
            piece_keys = shifted(keys, first_key)
            yield blocked_attention.Piece(batch, piece_queries, piece_keys, band)


class _Chunks:
    """All-gather of keys and values and reduce-scatter of their gradients between the chunks of all ranks."""

    def __init__(
        self, group: dist.ProcessGroup, balanced: bool, shared: SequenceExchange | None
    ) -> None:
        self._group = group
        self._shared = shared
        self._of_ranks = [chunks_of(rank, group.size(), balanced) for rank in range(group.size())]
        self.rank = group.rank()
        self.own = self._of_ranks[self.rank]
        self.seen = self._seen_by(self.rank)
        """Number of chunks, from the first on, whose keys and values this rank has."""

    def _seen_by(self, rank: int) -> int:
        return max(self._of_ranks[rank]) + 1

    def views(self, x_2BKsH: Tensor, rank: int) -> list[Tensor | None]:
        """Return views of the chunks of a rank, each (2, B, K, l, H).

        None for a chunk that this rank does not see.
        """
        chunks = x_2BKsH.chunk(self.seen, dim=3)
        return [chunks[chunk] if chunk < self.seen else None for chunk in self._of_ranks[rank]]

    def gather(self, x_2BKsH: Tensor) -> None:
        """All-gather the chunks in place. This rank's chunks must be filled (a collective)."""
        of_ranks = [self.views(x_2BKsH, rank) for rank in range(len(self._of_ranks))]
        if self._shared is not None:
            self._shared.gather_parts(of_ranks)
            return
        own = torch.stack([part for part in of_ranks[self.rank] if part is not None])
        gathered = [torch.empty_like(own) for _ in of_ranks]
        dist.all_gather(gathered, own, group=self._group)
        # Copy only the chunks that this rank sees.
        for rank, parts in enumerate(of_ranks):
            if rank == self.rank:
                continue
            for part, received in zip(parts, gathered[rank], strict=True):
                if part is not None:
                    part.copy_(received)

    def reduce_scatter(self, sums_2BKsH: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum the gradients of all ranks, and return those of this rank's chunks, (2, B, t, K, H) (a
        collective).

        ``sums_2BKsH`` may be overwritten. Sums are in float32, because bfloat16 would lose small
        contributions.
        """
        of_ranks = [self.views(sums_2BKsH, rank) for rank in range(len(self._of_ranks))]
        _, B, K, keys, H = sums_2BKsH.shape
        tokens = keys // self.seen * len(self.own)
        out_2BtKH = sums_2BKsH.new_empty(2, B, tokens, K, H, dtype=dtype)
        outs = out_2BtKH.transpose(2, 3).chunk(len(self.own), dim=3)
        if self._shared is not None:
            contributes = []
            for rank in range(len(of_ranks)):
                num_seen = self._seen_by(rank)
                contributes.append([chunk < num_seen for chunk in self.own])
            self._shared.reduce_scatter_parts(of_ranks, contributes, outs)
            return out_2BtKH
        # the collective needs equal sizes, so chunks that this rank does not see are zero
        zeros = torch.zeros_like(
            outs[0], dtype=sums_2BKsH.dtype, memory_format=torch.contiguous_format
        )
        addends = torch.stack(
            [zeros if part is None else part for parts in of_ranks for part in parts]
        )
        summed = torch.empty_like(addends[: len(outs)])
        _reduce_scatter(summed, addends, group=self._group)
        for out, total in zip(outs, summed, strict=True):
            out.copy_(total)
        return out_2BtKH
