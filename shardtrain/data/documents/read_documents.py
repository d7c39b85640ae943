"""Convert rows to documents, apply the policy for bad rows, and count both."""

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
"""Maximum number of characters in rows that are tokenized together.

Rows are tokenized together to use several cores. The limit prevents huge rows from filling the memory.
"""
TOO_LONG = "the prompt fills seq_len, so no token of the answer is left to learn"
"""The reason of a task for skipping a row that is too long."""
_PLACES_KEPT = 3
_REASONS_IN_A_LINE = 3


@dataclass
class RowStats:
    """Counts of rows, documents and tokens, and for each reason the number of rows without a document."""

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    learned: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    """Counts of remarks about rows that have a document."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """For each reason, the places of its first rows, such as "a.jsonl:7"."""

    @property
    def num_bad(self) -> int:
        """Number of rows that could not be read."""
        return self.bad.total()

    def add_document(self, document: Document) -> None:
        """Count a document."""
        self.rows += 1
        self.documents += 1
        self.tokens += len(document.tokens)
        # Without a mask, all tokens are learned.
        num_learned = len(document.tokens)
        if document.learned is not None:
            num_learned = int(document.learned.sum())
        self.learned += num_learned
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
            total = getattr(self, count) + getattr(other, count)
            setattr(self, count, total)
        for reason, places in other.places.items():
            all_places = self.places.get(reason, []) + places
            self.places[reason] = all_places[:_PLACES_KEPT]

    def reasons(self) -> list[str]:
        """Return one line per reason, most frequent first: ``3 rows: is not JSON (a.jsonl:7, a.jsonl:9)``."""
        lines = []
        counts = Counter(self.bad) + Counter(self.harmless)
        for reason, count in counts.most_common():
            places = ", ".join(self.places[reason])
            if count > len(self.places[reason]):
                places += ", ..."
            unit = "row" if count == 1 else "rows"
            lines.append(f"{count} {unit}: {reason} ({places})")
        return lines

    def main_reasons(self) -> str:
        """Return the most frequent reasons in one line."""
        reasons = self.reasons()
        shown = "; ".join(reasons[:_REASONS_IN_A_LINE])
        num_others = len(reasons) - _REASONS_IN_A_LINE
        if num_others > 0:
            shown += f"; and {num_others} more reasons"
        return shown


@dataclass(frozen=True)
class BadRows:
    """Policy for rows without a document.

    Attributes:
        skip: True to skip bad rows, up to the fraction ``max_fraction`` (data.bad_rows_max_fraction).
        max_long_fraction: maximum fraction of rows that have no target within seq_len
            (data.long_rows_max_fraction).
        fix: advice in the message about a bad row that stops the run.
    """

    skip: bool = False
    max_fraction: float = 0.0
    max_long_fraction: float = 1.0
    fix: str = (
        'correct or remove the row, name its columns in [data], or set data.bad_rows="skip" and '
        'data.bad_rows_max_fraction to the share that may be skipped ("shardtrain data check" counts it)'
    )

    @classmethod
    def of(cls, options: Data) -> BadRows:
        """Return the policy that the options in [data] describe."""
        return cls(
            options.bad_rows == "skip",
            options.bad_rows_max_fraction,
            options.long_rows_max_fraction,
        )

    def meet(self, row: BadRow, place: str) -> None:
        """Raise DataError for a bad row, unless bad rows are skipped or this one is harmless.

        The message contains the row's place and the reason.
        """
        if not self.skip and not row.harmless:
            raise DataError(f"{place}: {row}; {self.fix}")

    def judge(self, stats: RowStats, dataset: str) -> None:
        """Check the counts of a complete dataset.

        Raises:
            DataError: no row is usable, or too many rows are bad or too long. The message contains counts,
                reasons and places.
        """
        # Harmless bad rows, such as empty texts, have no limit below, so a dataset may consist of them.
        if stats.documents == 0:
            reasons = stats.main_reasons() or "the dataset is empty"
            fix = "use data with usable rows"
            if stats.harmless[TOO_LONG]:
                fix = "raise seq_len"
            raise DataError(f"{dataset} has 0 usable of {stats.rows} rows: {reasons}; {fix}")
        if stats.num_bad > self.max_fraction * stats.rows:
            needed_limit = as_limit(stats.num_bad, stats.rows)
            raise DataError(
                f"{dataset} has {stats.num_bad} bad of {stats.rows} rows, more than data.bad_rows_max_fraction="
                f"{self.max_fraction:g} allows: {stats.main_reasons()}; correct them, or set "
                f"data.bad_rows_max_fraction={needed_limit}"
            )
        self.judge_long(stats.harmless[TOO_LONG], stats.rows, dataset)

    def judge_long(self, num_long: int, num_rows: int, dataset: str) -> None:
        """Raise DataError if too many rows were skipped because they have no target within seq_len."""
        if num_long > self.max_long_fraction * num_rows:
            raise DataError(
                f"{dataset} has {num_long} of {num_rows} rows without a target within seq_len, more than "
                f"data.long_rows_max_fraction={self.max_long_fraction:g} allows; raise seq_len, or set "
                f"data.long_rows_max_fraction={as_limit(num_long, num_rows)}"
            )


def as_limit(part: int, total: int) -> str:
    """Format the fraction part / total with three digits, rounded up. As a limit, it allows ``part``.

    >>> as_limit(1, 3), as_limit(1, 4)
    ('0.334', '0.25')
    """
    thousandths = math.ceil(1000 * part / total)
    return f"{thousandths / 1000:g}"


def log_skipped_rows(name: str, reasons: Iterable[str], warns: int) -> None:
    """Log each reason why rows of a dataset were skipped, as a warning if ``warns`` is not 0."""
    level = logging.WARNING if warns else logging.INFO
    for reason in reasons:
        logger.log(level, "%s: skipped %s", name, reason)


def read_documents(
    source: Table | Shards,
    encoder: Encoder,
    policy: BadRows,
    stats: RowStats,
    keyed_rows: Iterable[tuple[Key, Row]] | None = None,
) -> Iterator[Document]:
    """Yield the documents of all rows of a source, or only of ``keyed_rows``, in order.

    Rows and documents are counted in ``stats``. The caller must check the counts with ``BadRows.judge``.

    Raises:
        DataError: a row is bad, and the policy does not skip bad rows.
    """
    if keyed_rows is None:
        keyed_rows = every_row(source)
    for chunk in chunks(keyed_rows):
        rows = [row for _, row in chunk]
        results = around_bad_rows(rows, encoder.encode)
        for (key, _), result in zip(chunk, results, strict=True):
            if isinstance(result, BadRow):
                # Only bad rows need their place, because finding it may mean reading the file again.
                place = place_of(source, key)
                stats.add_bad(result, place)
                policy.meet(result, place)
            else:
                stats.add_document(result)
                yield result


def chunks(rows: Iterable[tuple[Key, Row]]) -> Iterator[list[tuple[Key, Row]]]:
    """Yield lists of up to 256 rows or about 4 MiB of text. The limit keeps huge rows from filling the memory."""
    chunk: list[tuple[Key, Row]] = []
    size = 0
    for key, row in rows:
        chunk.append((key, row))
        size += text_size(row)
        # Check after adding, so a row that exceeds the limit still belongs to a chunk.
        if size >= CHARACTERS_AT_ONCE or len(chunk) >= ROWS_AT_ONCE:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def text_size(value: object) -> int:
    """Return the approximate number of characters in a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_size, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(text_size, value))
    return 8
