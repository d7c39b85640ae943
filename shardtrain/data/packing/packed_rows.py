"""Pack documents into rows of ``seq_len`` inputs and ``seq_len`` targets.

"concat" concatenates all documents and cuts the result into rows of ``seq_len`` targets. Each token except the
first is a target in exactly one row. "first_fit", "best_fit" and "padded" keep documents complete, see
``fitted``. If documents are masked, positions restart in each document, and the last token of a document has no
target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from shardtrain.data.packing.token_buffer import Mask, TokenBuffer, Tokens
from shardtrain.ops.targets import IGNORE


@dataclass(frozen=True)
class Packing:
    """How documents are packed into rows: options of [data], and the length of rows."""

    seq_len: int
    kind: Literal["concat", "first_fit", "best_fit", "padded"] = "concat"
    masked: bool = False
    long_documents: Literal["split", "cut", "drop"] = "split"
    pad_id: int = 0
    """Token id of padding. Padding is never a target."""

    @property
    def needs_documents(self) -> bool:
        """True if attention needs the document of each token. It does not, if each row has one document."""
        return self.masked and self.kind != "padded"

    @property
    def fits_documents(self) -> bool:
        """True if rows may have several complete documents, so that documents must be fitted into rows."""
        return self.kind in ("first_fit", "best_fit")


class PackedSequences:
    """Output arrays: B rows of T tokens, all int64. Rows that are not written have no targets."""

    def __init__(self, num_rows: int, packing: Packing) -> None:
        shape = (num_rows, packing.seq_len)
        self.tokens_BT = np.full(shape, packing.pad_id, dtype=np.int64)
        self.targets_BT = np.full(shape, IGNORE, dtype=np.int64)
        self.positions_BT = np.tile(np.arange(packing.seq_len, dtype=np.int64), (num_rows, 1))
        self.documents_BT = np.zeros(shape, dtype=np.int64) if packing.needs_documents else None
        # number of tokens in each row before its padding
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
        """Number the documents of a row, and let positions restart in each document.

        The first document starts at 0, and the others start at ``columns``, in ascending order.
        """
        if self.documents_BT is None:
            return
        T = self.tokens_BT.shape[1]
        begins = np.zeros(T, dtype=np.int64)
        inner_columns = columns[(columns > 0) & (columns < T)]
        begins[inner_columns] = 1
        self.documents_BT[slot] = np.cumsum(begins)
        # The position of a token is its distance from the start of its document.
        places = np.arange(T, dtype=np.int64)
        latest_start = np.maximum.accumulate(np.where(begins == 1, places, 0))
        self.positions_BT[slot] = places - latest_start


class Rows(Protocol):
    """Interface of the rows of a dataset. They can be read in any order.

    Attributes:
        num_rows: number of rows.
        num_targets: number of targets in all rows, learned or not.
        packing: how documents are packed into rows.
        cut: number of documents that are truncated because they are longer than a row.
        dropped: number of documents that are skipped because they are longer than a row.
        single: number of one-token documents without a target. A target would be the first token of the next
            document, which is in another row or masked.
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
    """Count the documents of which tokens are not used. The keys are phrases that describe the reason."""
    most = rows.packing.seq_len + 1
    is_cut = rows.packing.long_documents == "cut"
    reason = "have no target in their first" if is_cut else "are longer than"
    return {
        f"are cut to {most} tokens": rows.cut,
        f"{reason} {most} tokens and are skipped": rows.dropped,
        "have a single token, and so no target": rows.single,
    }


def lost_documents(rows: Rows, num_documents: int) -> list[str]:
    """Return a line for each reason of ``fates`` that occurs."""
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

    ``begins`` contains the indices in ``tokens`` at which a document starts, except 0. It is None if documents are
    not masked.
    """
    out.write(slot, 0, tokens, learned)
    if begins is None:
        return
    # Remove the target of each document's last token, because it is the first token of the next document.
    out.targets_BT[slot, begins - 1] = IGNORE
    # Make padding a separate document, so that it does not attend to the text before it.
    num_inputs = len(tokens) - 1
    columns = begins[begins < num_inputs]
    if num_inputs < out.tokens_BT.shape[1]:
        columns = np.append(columns, num_inputs)
    out.number_documents(slot, columns.astype(np.int64))
