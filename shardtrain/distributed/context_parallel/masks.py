"""Who attends to whom when a sequence is split over ranks: pieces of queries and keys that a kernel takes at once.

Split: "balanced" ranks hold chunks r and 2P-1-r of 2P (head and tail), others chunk r of P. Pieces are cut down to
documents that their queries and keys share, and to a window. Every query of a cut piece has keys, so no log-sum-exp is
that of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardtrain.ops.shared_documents import Shared, shared, shifted
from shardtrain.ops.sliding_window import Band, blocks


class Window(NamedTuple):
    """How many tokens a token sees, 0 for no window; and how many queries a kernel takes at once."""

    tokens: int
    at_once: int


class ContextPiece(NamedTuple):
    """Queries that attend to keys: which rows of the batch, which tokens of either, and whether causally.

    With a ``band`` a query sees the keys in it alone.
    """

    batch: slice
    rows: slice
    columns: slice
    causal: bool
    band: Band | None = None


Stretches = Sequence[tuple[slice, slice, int]]
"""Queries, keys, and how far the first query is past the first key in the sequence."""


def sequence_part(x_BT: Tensor, rank: int, size: int, balanced: bool) -> Tensor:
    """The part of each sequence that a rank holds: (B, T / size)."""
    if not balanced:
        return x_BT.chunk(size, dim=1)[rank].contiguous()
    # head and tail: late queries see more keys than early ones, and together each rank has equal work
    chunks = x_BT.chunk(2 * size, dim=1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=1)


def chunks_of(rank: int, size: int, balanced: bool) -> tuple[int, ...]:
    """Which chunks of each sequence a rank holds.

    >>> chunks_of(0, 4, balanced=True), chunks_of(0, 4, balanced=False)
    ((0, 7), (0,))
    """
    return (rank, 2 * size - 1 - rank) if balanced else (rank,)


def prefix_pieces(length: int, total: int, documents_Bs: Tensor | None, window: Window) -> Iterator[ContextPiece]:
    """The pieces of ``length`` queries at the end of ``total`` keys."""
    everything = slice(0, length)
    own = slice(total - length, total)
    mine = None if documents_Bs is None else documents_Bs[:, own]
    if window.tokens:
        return _within_window([(everything, slice(0, total), total - length)], mine, documents_Bs, window)
    before = [(everything, slice(0, total - length), False)] if total > length else []
    return _by_document([*before, (everything, own, True)], mine, documents_Bs)


def ring_pieces(
    tokens: int, rank: int, size: int, balanced: bool, documents_BT: Tensor | None, window: Window
) -> list[list[ContextPiece]]:
    """The pieces of each turn of the ring: with this rank's own keys, then its predecessor's, ..."""
    parts = None
    if documents_BT is not None:
        parts = [sequence_part(documents_BT, other, size, balanced) for other in range(size)]
    turns = []
    # turn 0 is this rank's own part, and each further turn brings that of the rank before
    for source in [(rank - turn) % size for turn in range(size)]:
        mine = parts[rank] if parts else None
        theirs = parts[source] if parts else None
        if window.tokens:
            pieces = _within_window(_stretches(tokens, source, rank, size, balanced), mine, theirs, window)
        else:
            pieces = _by_document(_causal_parts(tokens, source, rank, balanced), mine, theirs)
        turns.append(list(pieces))
    return turns


def _by_document(
    pieces: Sequence[tuple[slice, slice, bool]], queries_Bl: Tensor | None, keys_Bs: Tensor | None
) -> Iterator[ContextPiece]:
    """The pieces, cut down to documents that their queries and keys share; whole without the documents' numbers."""
    for rows, columns, causal in pieces:
        if queries_Bl is None or keys_Bs is None:
            yield ContextPiece(slice(None), rows, columns, causal)
            continue
        for row, queries, keys in shared(queries_Bl[:, rows], keys_Bs[:, columns]):
            yield ContextPiece(row, shifted(queries, rows.start), shifted(keys, columns.start), causal)


def _stretches(tokens: int, source: int, rank: int, size: int, balanced: bool) -> Stretches:
    """Chunks of this rank's queries with those chunks of another's keys that are not after them."""
    mine = chunks_of(rank, size, balanced)
    theirs = chunks_of(source, size, balanced)
    length = tokens // len(mine)
    places = [slice(index * length, (index + 1) * length) for index in range(len(mine))]
    return [
        (rows, columns, (own - other) * length)
        for rows, own in zip(places, mine, strict=True)
        for columns, other in zip(places, theirs, strict=True)
        if other <= own
    ]


def _within_window(
    stretches: Stretches, queries_Bl: Tensor | None, keys_Bs: Tensor | None, window: Window
) -> Iterator[ContextPiece]:
    for rows, columns, offset in stretches:
        for batch, queries, keys in documents_met(rows, columns, queries_Bl, keys_Bs):
            past = offset + queries.start - keys.start
            for block in blocks(queries.stop - queries.start, keys.stop - keys.start, past, *window):
                seeing = shifted(block.queries, rows.start + queries.start)
                seen = shifted(block.keys, columns.start + keys.start)
                yield ContextPiece(batch, seeing, seen, False, block.band)


def documents_met(rows: slice, columns: slice, queries_Bl: Tensor | None, keys_Bs: Tensor | None) -> list[Shared]:
    """Return the documents of a stretch, with places from its beginning; the entire stretch without documents."""
    if queries_Bl is None or keys_Bs is None:
        whole = (slice(0, places.stop - places.start) for places in (rows, columns))
        return [Shared(slice(None), *whole)]
    return shared(queries_Bl[:, rows], keys_Bs[:, columns])


def _causal_parts(tokens: int, source: int, rank: int, balanced: bool) -> list[tuple[slice, slice, bool]]:
    """Which query rows meet which keys of ``source``, and whether causally.

    A balanced part is a head chunk and a tail chunk. Its own part is causal as it lies. To an earlier rank's keys all
    rows come after the head chunk and before the tail one; to a later rank's, the tail rows alone come after both.
    """
    everything = slice(0, tokens)
    half = tokens // 2
    if source == rank:
        return [(everything, everything, True)]
    if not balanced:
        return [(everything, everything, False)] if source < rank else []
    return [(everything, slice(0, half), False)] if source < rank else [(slice(half, tokens), everything, False)]
