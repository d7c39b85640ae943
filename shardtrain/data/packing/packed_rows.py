"""Pack documents into rows of ``seq_len`` inputs and as many targets.

"concat" concatenates all documents and cuts every ``seq_len`` targets, so each token except the first is
the target of one row. "first_fit", "best_fit" and "padded" keep documents complete: see ``fitted``. If
documents are masked, positions restart in each document, and no token has a target in another document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from shardtrain.data.packing.token_buffer import Mask, TokenBuffer, Tokens
from shardtrain.ops.targets import IGNORE


@dataclass(frozen=True)
class Packing:
    """How documents become rows: the options of [data], and the length of rows."""

    seq_len: int
    kind: Literal["concat", "first_fit", "best_fit", "padded"] = "concat"
    masked: bool = False
    long_documents: Literal["split", "cut", "drop"] = "split"
    pad_id: int = 0
    """Token id of padding; never a target."""

    @property
    def needs_documents(self) -> bool:
        """True if attention needs the document of each token. Not needed with one document per row."""
        return self.masked and self.kind != "padded"

    @property
    def fits_documents(self) -> bool:
        """True if a row may have several complete documents, so their rows must be computed."""
        return self.kind in ("first_fit", "best_fit")


class PackedSequences:
    """Output arrays: B rows of T tokens, all int64. Rows that are not written have no targets."""

    def __init__(self, num_rows: int, packing: Packing) -> None:
        shape = (num_rows, packing.seq_len)
        self.tokens_BT = np.full(shape, packing.pad_id, dtype=np.int64)
        self.targets_BT = np.full(shape, IGNORE, dtype=np.int64)
        self.positions_BT = np.tile(np.arange(packing.seq_len, dtype=np.int64), (num_rows, 1))
        self.documents_BT = np.zeros(shape, dtype=np.int64) if packing.needs_documents else None
        # tokens of each row, before padding
        self.lengths_B = np.zeros(num_rows, dtype=np.int64)

    def write(self, slot: int, column: int, tokens: Tokens, learned: Mask | None) -> None:
        """Write inputs ``tokens[:-1]`` and targets ``tokens[1:]`` to row ``slot``, starting at ``column``."""
        stop = column + len(tokens) - 1
        self.lengths_B[slot] = max(self.lengths_B[slot], stop)
        self.tokens_BT[slot, column:stop] = tokens[:-1]
        targets = tokens[1:]
        if learned is not None:
            targets = np.where(learned[1:], targets, IGNORE)
        self.targets_BT[slot, column:stop] = targets

    def number_documents(self, slot: int, columns: Tokens) -> None:
        """Number the documents of a row, which start at 0 and at ``columns`` (ascending), and restart
        positions in each."""
        if self.documents_BT is None:
            return
        T = self.tokens_BT.shape[1]
        begins = np.zeros(T, dtype=np.int64)
        inner_columns = columns[(columns > 0) & (columns < T)]
        begins[inner_columns] = 1
        self.documents_BT[slot] = np.cumsum(begins)
        # a position is the distance from the last document start
        places = np.arange(T, dtype=np.int64)
        latest_start = np.maximum.accumulate(np.where(begins == 1, places, 0))
        self.positions_BT[slot] = places - latest_start


class Rows(Protocol):
    """Rows cut out of a dataset's tokens, with random access.

    Attributes:
        num_targets: number of targets of all rows, learned or not.
        cut, dropped: number of documents that are truncated or skipped because they are longer than a row.
        single: number of documents of one token that have no target, because they are the last of their
            row or attention does not reach the next document.
    """

    num_rows: int
    num_targets: int
    packing: Packing
    cut: int
    dropped: int
    single: int

    def write(self, row: int, out: PackedSequences, slot: int) -> None:
        """Fill row ``slot`` of ``out`` with row ``row``, 0..num_rows-1."""
        ...


def fates(rows: Rows) -> dict[str, int]:
    """Count the documents that lost tokens, by reason: truncated, longer than a row, or without a target."""
    most = rows.packing.seq_len + 1
    is_cut = rows.packing.long_documents == "cut"
    reason = "have no target in their first" if is_cut else "are longer than"
    return {
        f"are cut to {most} tokens": rows.cut,
        f"{reason} {most} tokens and are skipped": rows.dropped,
        "have a single token, and so no target": rows.single,
    }


def lost_documents(rows: Rows, num_documents: int) -> list[str]:
    """Return a line for each entry of ``fates`` whose count is not 0."""
    return [
        f"{count} of {num_documents} documents {fate}"
        for fate, count in fates(rows).items()
        if count
    ]


class ConcatRows:
    """Rows of concatenated documents.

    Row i contains the tokens ``i * seq_len`` to ``(i + 1) * seq_len`` inclusive. Its last token is only a
    target, and the first input of row i + 1. The last row is padded.
    """

    cut = dropped = single = 0

    def __init__(self, tokens: TokenBuffer, packing: Packing) -> None:
        self._tokens = tokens
        self.packing = packing
        self.num_targets = max(0, tokens.num_tokens - 1)
        self.num_rows = -(-self.num_targets // packing.seq_len)

    def write(self, row: int, out: PackedSequences, slot: int) -> None:
        source = self._tokens
        start = row * self.packing.seq_len
        stop = min(start + self.packing.seq_len + 1, source.num_tokens)
        learned = source.learned(start, stop) if source.has_mask else None
        begins = source.starts(start + 1, stop) - start if self.packing.masked else None
        write_window(out, slot, source.tokens(start, stop), learned, begins)


def write_window(
    out: PackedSequences, slot: int, tokens: Tokens, learned: Mask | None, begins: Tokens | None
) -> None:
    """Fill a row with up to ``seq_len + 1`` consecutive tokens of a dataset.

    ``begins`` contains the indices in ``tokens``, except 0, at which a document starts. It is None if tokens
    may attend to other documents.
    """
    out.write(slot, 0, tokens, learned)
    if begins is None:
        return
    # otherwise the last token of a document would have the first token of the next document as its target
    out.targets_BT[slot, begins - 1] = IGNORE
    # padding counts as another document, so it does not attend to the text before it
    num_inputs = len(tokens) - 1
    columns = begins[begins < num_inputs]
    if num_inputs < out.tokens_BT.shape[1]:
        columns = np.append(columns, num_inputs)
    out.number_documents(slot, columns.astype(np.int64))
