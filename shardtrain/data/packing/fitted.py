"""Rows of complete documents: several per row with "first_fit" and "best_fit", one per row with "padded".

Documents are fitted in order of decreasing length (Johnson 1973). This is done in blocks of documents, so a row
depends only on its block. The unused tail of a row has no targets. If truncating a document would remove all its
learned tokens, the document is skipped.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardtrain.data.packing.fit_table import NO_ORDER, BlockFit, FitTable, Order, open_table
from shardtrain.data.packing.packed_rows import ConcatRows, PackedSequences, Packing, Rows
from shardtrain.data.packing.token_buffer import TokenBuffer, Tokens
from shardtrain.data.prepared.shards import ShardTokenBuffer
from shardtrain.utils.errors import ConfigError, Problem

BLOCK_DOCUMENTS = 8192
"""Number of documents that are fitted together.

Never change it, because the rows of prepared datasets depend on it.
"""
MAX_DOCUMENTS = 100_000_000
"""Maximum number of documents in prepared shards without a fit table.

Fitting so many takes 2 minutes and 0.3 GB on each rank, whenever a run starts.
"""


def pack(line: TokenBuffer, packing: Packing, table: FitTable | None = None) -> Rows:
    """Return the rows of a token buffer. ``table`` is the fit table of prepared shards, if there is one."""
    if packing.kind != "concat":
        return FittedRows(line, packing, table)
    rows = ConcatRows(line, packing)
    if packing.masked:
        rows.single = sum(_num_single(line, block) for block in range(num_blocks(line)))
    return rows


def _num_single(line: TokenBuffer, block: int) -> int:
    """Return the number of documents in a block that have only one token, and so no target."""
    starts, stops = documents_of_block(line, block)
    return int((stops - starts < 2).sum())


@dataclass(frozen=True)
class Pieces:
    """The pieces of a block of documents. A piece is a document or part of a long one, and stays in one row.

    Attributes:
        starts: for each piece, the number of its first token.
        stops: for each piece, the number of its last token (its last target) plus 1.
        dropped: numbers (within the block) of documents that are skipped because they are too long.
        num_cut: number of truncated documents.
    """

    starts: Tokens
    stops: Tokens
    dropped: Tokens
    num_cut: int


def pieces_of(
    line: TokenBuffer, block: int, packing: Packing, dropped: Tokens | None = None
) -> Pieces:
    """Cut the documents of a block into pieces of at most ``seq_len`` targets.

    A document with one token has no target, and so no piece. ``dropped`` may be the value from an earlier call for
    the same block, so that it need not be computed again.
    """
    document_starts, document_stops = documents_of_block(line, block)
    T = packing.seq_len
    targets = document_stops - document_starts - 1
    long_documents = np.flatnonzero(targets > T)
    counts = np.where(targets > 0, 1, 0)
    if packing.long_documents == "split":
        counts = -(-np.maximum(targets, 0) // T)
    if dropped is None:
        dropped = _documents_to_drop(line, document_starts, long_documents, packing)
    counts[dropped] = 0
    # Find the document of each piece, and the piece's number within it. The last token of a piece is only a
    # target. It is also the first input of the next piece, so no target is lost between pieces.
    owners = np.repeat(np.arange(len(targets)), counts)
    first_pieces = np.cumsum(counts) - counts
    numbers = np.arange(len(owners)) - np.repeat(first_pieces, counts)
    starts = document_starts[owners] + numbers * T
    stops = np.minimum(starts + T + 1, document_stops[owners])
    num_cut = 0
    if packing.long_documents == "cut":
        num_cut = len(long_documents) - len(dropped)
    return Pieces(starts, stops, dropped, num_cut)


def _documents_to_drop(
    line: TokenBuffer, starts: Tokens, long_documents: Tokens, packing: Packing
) -> Tokens:
    """Return which long documents to skip.

    With "cut", these are documents whose first ``seq_len`` targets are all excluded by the loss mask.
    """
    if packing.long_documents == "drop":
        return long_documents
    if packing.long_documents == "split" or not line.has_mask:
        return long_documents[:0]
    keeps_target = []
    for start in starts[long_documents]:
        first_target = start + 1
        keeps_target.append(line.learned(first_target, first_target + packing.seq_len).any())
    return long_documents[~np.array(keeps_target, dtype=np.bool_)]


def fit_block(line: TokenBuffer, block: int, packing: Packing) -> BlockFit:
    """Fit the documents of one block into rows."""
    pieces = pieces_of(line, block, packing)
    lengths = pieces.stops - pieces.starts - 1
    num_targets = int(lengths.sum())
    num_dropped = len(pieces.dropped)
    num_single = _num_single(line, block)
    if packing.kind == "padded":
        return BlockFit(
            len(lengths), num_targets, pieces.num_cut, num_dropped, num_single, NO_ORDER, NO_ORDER
        )
    fit = first_fit if packing.kind == "first_fit" else best_fit
    rows = fit(lengths, packing.seq_len)
    num_rows = int(rows.max()) + 1 if len(rows) else 0
    # 16 bits are enough for the 8,192 documents of a block, unless long documents have many pieces.
    small = np.uint16 if len(rows) < 2**16 else np.uint32
    order: Order = np.argsort(rows, kind="stable").astype(small)
    ends: Order = np.cumsum(np.bincount(rows, minlength=num_rows)).astype(small)
    return BlockFit(num_rows, num_targets, pieces.num_cut, num_dropped, num_single, order, ends)


def first_fit(lengths: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """Assign each piece to a row by first fit decreasing. Return the row of each piece.

    The lengths in a row add up to at most ``capacity``. Pieces are placed from long to short (equal ones in their
    given order), each into the first row that has room for it. At the end, rows are numbered by their earliest
    piece. To find the row in logarithmic time, a tree stores the maximum room in each subtree.

    Raises:
        ValueError: a length exceeds the capacity.
    """
    count = len(lengths)
    if count == 0:
        return np.array([], dtype=np.int64)
    _check_lengths(lengths, capacity)
    # The tree is a list of plain integers. room[1] is the root, the children of node n are 2n and 2n + 1,
    # and row i is the leaf leaves + i. A node has the maximum room of the rows below it.
    leaves = 1 << (count - 1).bit_length()
    room = [capacity] * (2 * leaves)
    rows = np.empty(count, dtype=np.int64)
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        # Descend to the first row with enough room: to the left if there is one.
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        rows[piece] = node - leaves
        # Update the maxima on the path to the root, until one does not change.
        room[node] -= length
        while node > 1:
            node //= 2
            left = room[2 * node]
            right = room[2 * node + 1]
            max_room = left if left > right else right
            if room[node] == max_room:
                break
            room[node] = max_room
    return _numbered_by_earliest_piece(rows)


def best_fit(lengths: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """Like ``first_fit``, but place each piece into the fullest row that has room for it (best fit decreasing).

    If several rows have the same room, use the one that was opened first.

    Raises:
        ValueError: a length exceeds the capacity.
    """
    _check_lengths(lengths, capacity)
    rows = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0
    # (room, row) of each row that is not full, in ascending order
    open_rows: list[tuple[int, int]] = []
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fullest = bisect.bisect_left(open_rows, (length, 0))
        if fullest < len(open_rows):
            room, row = open_rows.pop(fullest)
        else:
            room, row = capacity, num_rows
            num_rows += 1
        rows[piece] = row
        if room > length:
            bisect.insort(open_rows, (room - length, row))
    return _numbered_by_earliest_piece(rows)


def _check_lengths(lengths: npt.NDArray[np.int64], capacity: int) -> None:
    longest = int(lengths.max(initial=0))
    if longest > capacity:
        raise ValueError(f"a piece of {longest} does not fit into a row of {capacity}")


def _numbered_by_earliest_piece(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Renumber rows in the order of their earliest pieces. ``rows`` must use all numbers without a gap."""
    _, first_piece, inverse = np.unique(rows, return_index=True, return_inverse=True)
    rank = np.empty(len(first_piece), dtype=np.int64)
    rank[np.argsort(first_piece)] = np.arange(len(first_piece))
    return rank[inverse]


def num_blocks(line: TokenBuffer) -> int:
    """Return the number of blocks of documents."""
    return -(-line.num_documents // BLOCK_DOCUMENTS)


def documents_of_block(line: TokenBuffer, block: int) -> tuple[Tokens, Tokens]:
    """Return the token numbers at which the documents of a block start and stop."""
    document_starts = line.document_starts()
    first = block * BLOCK_DOCUMENTS
    last = min(first + BLOCK_DOCUMENTS, line.num_documents)
    # The last document of the data ends at the end of the data. Any other one ends where the next one starts.
    end = line.num_tokens
    if last < len(document_starts):
        end = document_starts[last]
    stops = np.append(document_starts[first + 1 : last], end)
    return np.asarray(document_starts[first:last]), stops.astype(np.int64)


def table_of(
    line: ShardTokenBuffer, packing: Packing, option: str, *, refuses_many: bool = True
) -> FitTable | None:
    """Return the fit table that was prepared for this packing. None if it does not exist.

    Raises:
        ConfigError: the table is damaged. Or it does not exist, and fitting would take minutes on each rank
            whenever a run starts.
    """
    if packing.kind == "concat":
        return None
    table = open_table(
        line.folder,
        packing,
        fingerprint=line.fingerprint,
        num_documents=line.num_documents,
        block_documents=BLOCK_DOCUMENTS,
        option=option,
    )
    if (
        table is None
        and refuses_many
        and packing.fits_documents
        and line.num_documents > MAX_DOCUMENTS
    ):
        rule = (
            f'is "{packing.kind}", and {line.folder} has {line.num_documents:,} documents without a table '
            "for rows of "
            f"{packing.seq_len}: fitting more than {MAX_DOCUMENTS:,} takes minutes on each rank at each start"
        )
        raise ConfigError(
            Problem(
                "data.packing",
                None,
                rule=rule,
                fix='run "shardtrain data prepare" with this configuration, which fits them once, or use "concat"',
            )
        )
    return table


class FittedRows:
    """Rows with one or more complete documents, followed by padding without targets.

    They need two bytes of memory per piece. With one document per row or a ``FitTable``, they need none. Where
    pieces start and stop is not stored, but computed again for each block.

    Attributes:
        cut: number of truncated documents.
        dropped: number of documents that are skipped because they are too long. With "cut", only documents that
            would lose all their targets are skipped.
    """

    def __init__(self, line: TokenBuffer, packing: Packing, table: FitTable | None = None) -> None:
        self._line = line
        self.packing = packing
        self._table = table
        self._fits: list[BlockFit] = []
        # Cache of the last block that was read. Without shuffling, or with few blocks, the next row is often in
        # the same block.
        self._last: tuple[int, Pieces, Order, Order] | None = None
        # Cache of the dropped documents of each block, because computing them again would read the masks.
        self._dropped: dict[int, Tokens] = {}
        if table is not None:
            self.num_rows = table.num_rows
            self.num_targets = table.num_targets
            self._rows_up_to = table.rows_up_to
            self.cut = table.cut
            self.dropped = table.dropped
            self.single = table.single
            return
        self.num_targets = self.cut = self.dropped = self.single = 0
        rows_up_to = [0]
        for block in range(num_blocks(line)):
            fit = fit_block(line, block, packing)
            self.num_targets += fit.num_targets
            self.cut += fit.cut
            self.dropped += fit.dropped
            self.single += fit.single
            rows_up_to.append(rows_up_to[-1] + fit.num_rows)
            if packing.fits_documents:
                self._fits.append(fit)
        self._rows_up_to = np.array(rows_up_to, np.int64)
        self.num_rows = rows_up_to[-1]

    def write(self, row: int, out: PackedSequences, slot: int) -> None:
        # Compute the pieces of the row's block, unless it is the last block that was read.
        block = int(np.searchsorted(self._rows_up_to, row, side="right")) - 1
        if self._last is None or self._last[0] != block:
            pieces = pieces_of(self._line, block, self.packing, self._dropped.get(block))
            self._dropped[block] = pieces.dropped
            self._last = block, pieces, *self._order_of(block, len(pieces.starts))
        _, pieces, order, ends = self._last

        # Write the pieces of the row, each as a separate document.
        row -= int(self._rows_up_to[block])
        indices = [row]
        if self.packing.fits_documents:
            first = int(ends[row - 1]) if row else 0
            indices = order[first : int(ends[row])].tolist()
        column = 0
        columns = []
        for index in indices:
            start = int(pieces.starts[index])
            stop = int(pieces.stops[index])
            learned = None
            if self._line.has_mask:
                learned = self._line.learned(start, stop)
            out.write(slot, column, self._line.tokens(start, stop), learned)
            column += stop - start - 1
            columns.append(column)
        out.number_documents(slot, np.array(columns, dtype=np.int64))

    def _order_of(self, block: int, num_pieces: int) -> tuple[Order, Order]:
        """Return the pieces of a block in the order of their rows, and how many there are up to each row's end."""
        if not self.packing.fits_documents:
            return NO_ORDER, NO_ORDER
        if self._table is not None:
            return self._table.order_of(block, num_pieces)
        fit = self._fits[block]
        return fit.order, fit.ends
