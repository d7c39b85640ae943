"""Documents to rows of ``seq_len`` inputs and as many targets: which tokens are in a row, and where.

"concat" joins all documents end to end and cuts every ``seq_len`` targets, so that each token but the first is the
target of one row. "first_fit" and "padded" keep documents whole: see ``fitted``. Where documents are masked, positions
restart in each, and no token has a target in another document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from shardtrain.data.packing.token_buffer import Mask, TokenBuffer, Tokens
from shardtrain.ops.targets import IGNORE


@dataclass(frozen=True)
class Packing:
    """How documents become rows: the options of [data], and the length of a row."""

    seq_len: int
    kind: Literal["concat", "first_fit", "padded"] = "concat"
    masked: bool = False
    long_documents: Literal["split", "cut", "drop"] = "split"
    pad_id: int = 0
    """Token id of padding; never a target."""

    @property
    def needs_documents(self) -> bool:
        """Whether attention needs the document of each token: in a row of one document it does not."""
        return self.masked and self.kind != "padded"


class PackedSequences:
    """Output arrays: B rows of T tokens, all int64; rows that are not written have no targets."""

    def __init__(self, num_rows: int, packing: Packing) -> None:
        shape = (num_rows, packing.seq_len)
        self.tokens_BT = np.full(shape, packing.pad_id, dtype=np.int64)
        self.targets_BT = np.full(shape, IGNORE, dtype=np.int64)
        self.positions_BT = np.tile(np.arange(packing.seq_len, dtype=np.int64), (num_rows, 1))
        self.documents_BT = np.zeros(shape, dtype=np.int64) if packing.needs_documents else None
        self.lengths_B = np.zeros(num_rows, dtype=np.int64)  # tokens of a row; filler follows them

    def write(self, slot: int, column: int, tokens: Tokens, learned: Mask | None) -> None:
        """Put inputs ``tokens[:-1]`` and targets ``tokens[1:]`` into row ``slot`` from ``column`` on."""
        stop = column + len(tokens) - 1
        self.lengths_B[slot] = max(self.lengths_B[slot], stop)
        self.tokens_BT[slot, column:stop] = tokens[:-1]
        self.targets_BT[slot, column:stop] = (
            tokens[1:] if learned is None else np.where(learned[1:], tokens[1:], IGNORE)
        )

    def number_documents(self, slot: int, columns: Tokens) -> None:
        """Number the documents of a row, which begin at 0 and at ``columns`` (ascending), and restart its positions."""
        if self.documents_BT is None:
            return
        T = self.tokens_BT.shape[1]
        begins = np.zeros(T, dtype=np.int64)
        begins[columns[(columns > 0) & (columns < T)]] = 1
        self.documents_BT[slot] = np.cumsum(begins)
        # Positions restart with each document: the distance from the last beginning at or before a column.
        places = np.arange(T, dtype=np.int64)
        self.positions_BT[slot] = places - np.maximum.accumulate(np.where(begins == 1, places, 0))


class Rows(Protocol):
    """Rows cut out of a dataset's tokens, by random access.

    num_targets:  targets of all rows, learned or not.
    cut, dropped: documents that were truncated or left out because they are longer than a row.
    single:      documents of one token that have no target, because no other document follows in their row or is seen.
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
    """Count the documents that lost tokens, by reason: cut, longer than a row, or without a target."""
    most = rows.packing.seq_len + 1
    is_cut = rows.packing.long_documents == "cut"
    reason = "have no target in their first" if is_cut else "are longer than"
    return {
        f"are cut to {most} tokens": rows.cut,
        f"{reason} {most} tokens and are left out": rows.dropped,
        "have a single token, and so no target": rows.single,
    }


def lost_documents(rows: Rows, num_documents: int) -> list[str]:
    """Return a line for each entry of ``fates`` whose count is not 0."""
    return [f"{count} of {num_documents} documents {fate}" for fate, count in fates(rows).items() if count]


class ConcatRows:
    """Row i holds the tokens ``i * seq_len`` to ``(i + 1) * seq_len`` inclusive: its last is the target of its last
    input, and the first input of row i + 1. The last row is padded.
    """

    cut = dropped = single = 0

    def __init__(self, tokens: TokenBuffer, packing: Packing) -> None:
        self._tokens = tokens
        self.packing = packing
        self.num_targets = max(0, tokens.num_tokens - 1)
        self.num_rows = -(-self.num_targets // packing.seq_len)

    def write(self, row: int, out: PackedSequences, slot: int) -> None:
        start = row * self.packing.seq_len
        stop = min(start + self.packing.seq_len + 1, self._tokens.num_tokens)
        learned = self._tokens.learned(start, stop) if self._tokens.has_mask else None
        begins = self._tokens.starts(start + 1, stop) - start if self.packing.masked else None
        write_window(out, slot, self._tokens.tokens(start, stop), learned, begins)


def write_window(out: PackedSequences, slot: int, tokens: Tokens, learned: Mask | None, begins: Tokens | None) -> None:
    """Fill a row with up to ``seq_len + 1`` consecutive tokens of a dataset.

    ``begins`` are the places in ``tokens`` after the first at which a document begins, where documents are masked.
    """
    out.write(slot, 0, tokens, learned)
    if begins is None:
        return
    # Else the last token of a document would have the first of the next as its target.
    out.targets_BT[slot, begins - 1] = IGNORE
    # Padding after the last token counts as one more document, so that it does not attend to the text before it.
    inputs = len(tokens) - 1
    filler = [inputs] if inputs < out.tokens_BT.shape[1] else []
    out.number_documents(slot, np.append(begins[begins < inputs], filler).astype(np.int64))
