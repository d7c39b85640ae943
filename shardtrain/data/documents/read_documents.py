"""Turn rows into documents, apply the policy for rows that give none, and count."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shardtrain.config.schema import Data
from shardtrain.data.documents.bad_rows import around_bad_rows
from shardtrain.data.documents.encoded import Document, Encoder
from shardtrain.data.sources import BadRow, Key, Row, Shards, Table, every_row, place_of
from shardtrain.utils.errors import DataError

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 256
CHARACTERS_AT_ONCE = 4 * 2**20
"""Rows tokenized together: a tokenizer that works on several cores needs some, and huge ones must not add up."""
TOO_LONG = "the prompt fills seq_len, so no token of the answer is left to learn"
"""Reason of a row that a task leaves out because it is too long."""
_PLACES_KEPT = 3
_REASONS_IN_A_LINE = 3


@dataclass
class RowStats:
    """What reading found: rows, documents, tokens, and rows that gave no document, by reason."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    learned: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    """Remarks about rows that have a document."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """The first places of each reason."""

    @property
    def num_bad(self) -> int:
        """Rows that could not be read."""
        return self.bad.total()

    def add_document(self, document: Document) -> None:
        """Count a document."""
        self.rows += 1
        self.documents += 1
        self.tokens += len(document.tokens)
        self.learned += len(document.tokens) if document.learned is None else int(document.learned.sum())
        self.notes.update(document.notes)

    def add_bad(self, row: BadRow, place: str) -> None:
        """Count a row without a document."""
        self.rows += 1
        counts = self.harmless if row.harmless else self.bad
        counts[row.reason] += 1
        places = self.places.setdefault(row.reason, [])
        if len(places) < _PLACES_KEPT:
            places.append(place)

    def merge(self, other: RowStats) -> None:
        """Add the counts of another reader, which read later rows."""
        for count in ("rows", "documents", "tokens", "learned", "bad", "harmless", "notes"):
            setattr(self, count, getattr(self, count) + getattr(other, count))
        for reason, places in other.places.items():
            self.places[reason] = (self.places.get(reason, []) + places)[:_PLACES_KEPT]

    def reasons(self) -> list[str]:
        """One line per reason, the most frequent first: ``3 rows: is not JSON (a.jsonl:7, a.jsonl:9)``."""
        lines = []
        for reason, count in (Counter(self.bad) + Counter(self.harmless)).most_common():
            places = ", ".join(self.places[reason])
            if count > len(self.places[reason]):
                places += ", ..."
            lines.append(f"{count} {'row' if count == 1 else 'rows'}: {reason} ({places})")
        return lines

    def main_reasons(self) -> str:
        """The most frequent reasons, in one line that a terminal holds."""
        reasons = self.reasons()
        more = f"; and {len(reasons) - _REASONS_IN_A_LINE} more reasons" if len(reasons) > _REASONS_IN_A_LINE else ""
        return "; ".join(reasons[:_REASONS_IN_A_LINE]) + more


@dataclass(frozen=True)
class BadRows:
    """Policy for rows that give no document.

    skip: leave bad rows out, up to a share ``max_fraction`` (data.bad_rows_max_fraction).
    max_long_fraction: largest share of rows that are too long to keep a target (data.long_rows_max_fraction).
    fix: advice about a bad row that stops the run.
    """

    skip: bool = False
    max_fraction: float = 0.0
    max_long_fraction: float = 1.0
    fix: str = (
        'correct or remove the row, name its columns in [data], or set data.bad_rows="skip" and '
        'data.bad_rows_max_fraction to the share that may be left out ("shardtrain data check" counts it)'
    )

    @classmethod
    def of(cls, options: Data) -> BadRows:
        """The policy of a config."""
        return cls(options.bad_rows == "skip", options.bad_rows_max_fraction, options.long_rows_max_fraction)

    def meet(self, row: BadRow, place: str) -> None:
        """Stop at a bad row unless rows may be skipped.

        Raises:
            DataError: naming the row's place and what is wrong with it.
        """
        if not self.skip and not row.harmless:
            raise DataError(f"{place}: {row}; {self.fix}")

    def judge(self, tally: RowStats, dataset: str) -> None:
        """Check the counts of a whole dataset.

        Raises:
            DataError: with counts, reasons and places, if no row is usable or too many are bad or too long.
        """
        if tally.documents == 0:
            why = tally.main_reasons() or "there are none"
            fix = "raise seq_len" if tally.harmless[TOO_LONG] else "name data that have some"
            raise DataError(f"{dataset} has 0 usable of {tally.rows} rows: {why}; {fix}")
        if tally.num_bad > self.max_fraction * tally.rows:
            raise DataError(
                f"{dataset} has {tally.num_bad} bad of {tally.rows} rows, more than data.bad_rows_max_fraction="
                f"{self.max_fraction:g} allows: {tally.main_reasons()}; correct them, or set "
                f"data.bad_rows_max_fraction={as_limit(tally.num_bad, tally.rows)}"
            )
        self.judge_long(tally.harmless[TOO_LONG], tally.rows, dataset)

    def judge_long(self, num_long: int, num_rows: int, dataset: str) -> None:
        """Check how many rows were left out because no target is left within seq_len; raises DataError."""
        if num_long > self.max_long_fraction * num_rows:
            raise DataError(
                f"{dataset} has {num_long} of {num_rows} rows without a target within seq_len, more than "
                f"data.long_rows_max_fraction={self.max_long_fraction:g} allows; raise seq_len, or set "
                f"data.long_rows_max_fraction={as_limit(num_long, num_rows)}"
            )


def as_limit(part: int, whole: int) -> str:
    """Write a fraction with three digits, rounded up, as a limit that just allows ``part``.

    >>> as_limit(1, 3), as_limit(1, 4)
    ('0.334', '0.25')
    """
    return f"{math.ceil(1000 * part / whole) / 1000:g}"


def log_left_out(name: str, reasons: Iterable[str], warns: int) -> None:
    """Log each reason for which rows of a dataset were left out. Not a warning if they are only empty texts."""
    for reason in reasons:
        logger.log(logging.WARNING if warns else logging.INFO, "%s: left out %s", name, reason)


def read_documents(
    source: Table | Shards,
    encoder: Encoder,
    policy: BadRows,
    tally: RowStats,
    keyed_rows: Iterable[tuple[Key, Row]] | None = None,
) -> Iterator[Document]:
    """Documents of all rows of a source, or of ``keyed_rows`` of it, in their order; counted in ``tally``.

    Raises:
        DataError: at a bad row, unless the policy skips them; judging the count is the caller's.
    """
    for chunk in chunks(every_row(source) if keyed_rows is None else keyed_rows):
        results = around_bad_rows([row for _, row in chunk], encoder.encode)
        for (key, _), result in zip(chunk, results, strict=True):
            if isinstance(result, BadRow):
                place = place_of(source, key)
                tally.add_bad(result, place)
                policy.meet(result, place)
            else:
                tally.add_document(result)
                yield result


def chunks(rows: Iterable[tuple[Key, Row]]) -> Iterator[list[tuple[Key, Row]]]:
    """Rows in lists of up to 256 rows or about 4 MiB of text, so that huge rows do not add up."""
    chunk: list[tuple[Key, Row]] = []
    size = 0
    for keyed in rows:
        chunk.append(keyed)
        size += text_size(keyed[1])
        if size >= CHARACTERS_AT_ONCE or len(chunk) >= ROWS_AT_ONCE:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def text_size(value: object) -> int:
    """Characters in a row, about."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(text_size, value))
    return 8
