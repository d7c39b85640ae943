"""Context parallelism by all-gather on a CPU, with attention computed in blocks.

Gathered keys and values are written once, in the layout that the block kernel needs: heads before
tokens, and tokens in the order of the sequence. All chunks of a rank read this one copy in forward and
backward, and add their gradients into one tensor. A rank stores only the keys up to the end of its last
chunk, because none of its queries attends to later keys.

Shape suffixes: B batch, t tokens of this rank, T all tokens, s keys that this rank stores, l tokens of a
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
"""``reduce_scatter_single`` since torch 2.13, and before that its old name, which is now deprecated."""

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
    """Return what ``gather.gathered_attention`` returns, for plain scores without sinks.

    ``documents_BT`` must be in host memory.
    """
    chunks = _Chunks(group, balanced, shared)
    return _GatheredBlocks.apply(q_BtNH, k_BtKH, v_BtKH, documents_BT, window, scale, chunks)  # type: ignore[no-any-return]


class _GatheredBlocks(torch.autograd.Function):
    """Gather keys and values, then attend. Backward reduce-scatters the gradients of keys and values."""

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
        # Write this rank's keys and values directly to their position in the gathered tensor.
        own_keys_values = chunks.views(keys_values_2BKsH, chunks.rank)
        for index, own_2BKlH in enumerate(own_keys_values):
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
    """Yield the pieces of this rank's ``chunks``, which have ``length`` tokens each.

    A piece contains all keys that any of its queries sees. Its band limits them for each query. Positions
    of keys are counted from the start of the sequence.
    """
    for index, chunk in enumerate(chunks):
        stop = (chunk + 1) * length
        start = stop - length
        # Attention is causal, so use keys up to the end of the chunk. With a window, skip the keys that
        # even the chunk's first query does not see.
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
    """Collectives on chunks of the sequence: all-gather keys and values, reduce-scatter their gradients."""

    def __init__(
        self, group: dist.ProcessGroup, balanced: bool, shared: SequenceExchange | None
    ) -> None:
        self._group = group
        self._shared = shared
        self._of_ranks = [chunks_of(rank, group.size(), balanced) for rank in range(group.size())]
        self.rank = group.rank()
        self.own = self._of_ranks[self.rank]
        self.seen = self._seen_by(self.rank)
        """This rank stores the keys and values of the first ``seen`` chunks of the sequence."""

    def _seen_by(self, rank: int) -> int:
        return max(self._of_ranks[rank]) + 1

    def views(self, x_2BKsH: Tensor, rank: int) -> list[Tensor | None]:
        """Return views of the chunks of ``rank``, each (2, B, K, l, H).

        None for a chunk that this rank does not store.
        """
        chunks = x_2BKsH.chunk(self.seen, dim=3)
        return [chunks[chunk] if chunk < self.seen else None for chunk in self._of_ranks[rank]]

    def gather(self, x_2BKsH: Tensor) -> None:
        """Fill in the chunks of the other ranks (a collective). This rank's chunks must be filled already."""
        of_ranks = [self.views(x_2BKsH, rank) for rank in range(len(self._of_ranks))]
        if self._shared is not None:
            self._shared.gather_parts(of_ranks)
            return
        # This filter is only for mypy: a rank stores all of its own chunks.
        sent_parts = [part for part in of_ranks[self.rank] if part is not None]
        sent = torch.stack(sent_parts)
        gathered = [torch.empty_like(sent) for _ in of_ranks]
        dist.all_gather(gathered, sent, group=self._group)
        # Copy only the chunks that this rank stores.
        for rank, parts in enumerate(of_ranks):
            if rank == self.rank:
                continue
            for part, received in zip(parts, gathered[rank], strict=True):
                if part is not None:
                    part.copy_(received)

    def reduce_scatter(self, sums_2BKsH: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum the gradients over ranks, and return the sums for this rank's chunks, (2, B, t, K, H).

        A collective. ``sums_2BKsH`` may be overwritten. Sums are computed in float32, because bfloat16
        would lose small contributions.
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
        # the collective needs equal sizes, so send zeros for the chunks that this rank does not store
        zeros = torch.zeros_like(
            outs[0], dtype=sums_2BKsH.dtype, memory_format=torch.contiguous_format
        )
        addends_of_chunks = []
        for parts in of_ranks:
            for part in parts:
                addends_of_chunks.append(zeros if part is None else part)
        addends = torch.stack(addends_of_chunks)
        summed = torch.empty_like(addends[: len(outs)])
        _reduce_scatter(summed, addends, group=self._group)
        for out, total in zip(outs, summed, strict=True):
            out.copy_(total)
        return out_2BtKH
