"""Divide attention over split sequences into pieces.

A piece is a set of queries and a set of keys that a kernel processes in one call.

With P ranks, rank r holds chunk r of P. If chunks are balanced, it holds chunks r and 2P-1-r of 2P: one
from the start (the head) and one from the end (the tail). A piece contains only documents that its
queries and keys share, and only keys inside the attention window. Every query of a piece has at least one
key, so its log-sum-exp is finite.

Shape suffixes: B batch, T all tokens, l queries, s keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardtrain.ops.shared_documents import Shared, shared, shifted
from shardtrain.ops.sliding_window import Band, blocks


class Window(NamedTuple):
    """An attention window.

    Attributes:
        tokens: number of tokens that a query attends to, including itself. 0 for no window.
        at_once: number of queries that a kernel processes in one call.
    """

    tokens: int
    at_once: int


class ContextPiece(NamedTuple):
    """A set of queries and the keys that they attend to.

    Attributes:
        batch: the batch rows.
        rows: the tokens whose queries attend.
        columns: the tokens whose keys they attend to.
        causal: True if the mask is causal.
        band: the keys that each query attends to. None for all keys or a causal mask.
    """

    batch: slice
    rows: slice
    columns: slice
    causal: bool
    band: Band | None = None


Stretches = Sequence[tuple[slice, slice, int]]
"""(query tokens, key tokens, distance): the distance is from the first key to the first query, in tokens
of the sequence.
"""


def sequence_part(x_BT: Tensor, rank: int, size: int, balanced: bool) -> Tensor:
    """Return a rank's part of each sequence, (B, T / size)."""
    if not balanced:
        return x_BT.chunk(size, dim=1)[rank].contiguous()
    # Late queries see more keys than early ones. With a head and a tail chunk, each rank has equal work.
    chunks = x_BT.chunk(2 * size, dim=1)
    head = chunks[rank]
    tail = chunks[2 * size - 1 - rank]
    return torch.cat((head, tail), dim=1)


def chunks_of(rank: int, size: int, balanced: bool) -> tuple[int, ...]:
    """Return the indices of a rank's chunks of each sequence.

    >>> chunks_of(0, 4, balanced=True), chunks_of(0, 4, balanced=False)
    ((0, 7), (0,))
    """
    if not balanced:
        return (rank,)
    head = rank
    tail = 2 * size - 1 - rank
    return (head, tail)


def prefix_pieces(
    length: int, total: int, documents_Bs: Tensor | None, window: Window
) -> Iterator[ContextPiece]:
    """Return the pieces of ``length`` queries that are the last tokens of ``total`` keys."""
    queries = slice(0, length)
    own_keys = slice(total - length, total)
    query_documents_Bl = None if documents_Bs is None else documents_Bs[:, own_keys]
    if window.tokens:
        stretch = (queries, slice(0, total), total - length)
        return _within_window([stretch], query_documents_Bl, documents_Bs, window)
    # All queries see all earlier keys, which need no mask. The keys of the queries' tokens need a causal
    # mask.
    pieces = [(queries, own_keys, True)]
    if total > length:
        pieces.insert(0, (queries, slice(0, total - length), False))
    return _by_document(pieces, query_documents_Bl, documents_Bs)


def ring_pieces(
    tokens: int, rank: int, size: int, balanced: bool, documents_BT: Tensor | None, window: Window
) -> list[list[ContextPiece]]:
    """Return the pieces of each turn of the ring.

    In turn 0 this rank has its own keys, in turn 1 the keys of the previous rank, and so on.
    """
    document_parts: list[Tensor | None] = [None] * size
    if documents_BT is not None:
        document_parts = [
            sequence_part(documents_BT, other, size, balanced) for other in range(size)
        ]
    turns = []
    for turn in range(size):
        source = (rank - turn) % size
        documents = (document_parts[rank], document_parts[source])
        if window.tokens:
            pieces = _within_window(
                _stretches(tokens, source, rank, size, balanced), *documents, window
            )
        else:
            pieces = _by_document(_causal_parts(tokens, source, rank, balanced), *documents)
        turns.append(list(pieces))
    return turns


def _by_document(
    pieces: Sequence[tuple[slice, slice, bool]], queries_Bl: Tensor | None, keys_Bs: Tensor | None
) -> Iterator[ContextPiece]:
    """Cut pieces to the documents that their queries and keys share.

    Without documents, yield them unchanged.
    """
    for rows, columns, causal in pieces:
        if queries_Bl is None or keys_Bs is None:
            yield ContextPiece(slice(None), rows, columns, causal)
            continue
        # In a causal piece, a document has the same tokens on both sides, so its mask stays causal.
        for row, queries, keys in shared(queries_Bl[:, rows], keys_Bs[:, columns]):
            query_rows = shifted(queries, rows.start)
            key_columns = shifted(keys, columns.start)
            yield ContextPiece(row, query_rows, key_columns, causal)


def _stretches(tokens: int, source: int, rank: int, size: int, balanced: bool) -> Stretches:
    """Pair each chunk of this rank's queries with the source's chunks of keys that are not after it."""
    query_chunks = chunks_of(rank, size, balanced)
    key_chunks = chunks_of(source, size, balanced)
    length = tokens // len(query_chunks)
    # Chunks are stored one after the other, so all ranks have them at the same places.
    places = []
    for index in range(len(query_chunks)):
        places.append(slice(index * length, (index + 1) * length))
    stretches = []
    for rows, query_chunk in zip(places, query_chunks, strict=True):
        for columns, key_chunk in zip(places, key_chunks, strict=True):
            if key_chunk > query_chunk:
                continue
            distance = (query_chunk - key_chunk) * length
            stretches.append((rows, columns, distance))
    return stretches


def _within_window(
    stretches: Stretches, queries_Bl: Tensor | None, keys_Bs: Tensor | None, window: Window
) -> Iterator[ContextPiece]:
    """Cut stretches to documents and to the blocks of a window."""
    for rows, columns, offset in stretches:
        for batch, queries, keys in documents_met(rows, columns, queries_Bl, keys_Bs):
            # The window counts tokens of the sequence, so pass the distance from the first key of this
            # document to its first query.
            past = offset + queries.start - keys.start
            num_queries = queries.stop - queries.start
            num_keys = keys.stop - keys.start
            for block in blocks(num_queries, num_keys, past, *window):
                block_rows = shifted(block.queries, rows.start + queries.start)
                block_columns = shifted(block.keys, columns.start + keys.start)
                yield ContextPiece(batch, block_rows, block_columns, False, block.band)


def documents_met(
    rows: slice, columns: slice, queries_Bl: Tensor | None, keys_Bs: Tensor | None
) -> list[Shared]:
    """Return the documents that the queries ``rows`` and the keys ``columns`` share.

    Their tokens are counted from the start of ``rows`` and ``columns``. Without document numbers, all
    tokens are one document.
    """
    if queries_Bl is None or keys_Bs is None:
        queries = slice(0, rows.stop - rows.start)
        keys = slice(0, columns.stop - columns.start)
        return [Shared(slice(None), queries, keys)]
    return shared(queries_Bl[:, rows], keys_Bs[:, columns])


def _causal_parts(
    tokens: int, source: int, rank: int, balanced: bool
) -> list[tuple[slice, slice, bool]]:
    """Return (queries of ``rank``, keys of ``source`` that they attend to, True for a causal mask).

    The mask is causal only for a rank's own keys. If parts are balanced, each consists of a head and a tail
    chunk, and:

    - keys of an earlier rank: all queries attend to its head chunk, and none to its tail chunk
    - keys of a later rank: only the tail queries attend, to both of its chunks
    """
    all_tokens = slice(0, tokens)
    # A balanced part stores the head chunk first, then the tail chunk.
    half = tokens // 2
    if source == rank:
        return [(all_tokens, all_tokens, True)]
    if balanced:
        if source < rank:
            return [(all_tokens, slice(0, half), False)]
        return [(slice(half, tokens), all_tokens, False)]
    if source < rank:
        return [(all_tokens, all_tokens, False)]
    return []
