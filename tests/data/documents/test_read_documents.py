"""Reading documents from rows: a bad row stops the run with its place, or is skipped and counted. Memory is bounded."""

from __future__ import annotations

import numpy as np
import pytest

from shardtrain.config.schema import Data
from shardtrain.data.documents import read_documents as reading
from shardtrain.data.documents.encoded import Document
from shardtrain.data.documents.read_documents import BadRows, RowStats, chunks, read_documents
from shardtrain.data.sources import BadRow
from shardtrain.utils.errors import DataError


class Rows:
    """Table with bad rows at the given numbers."""

    total_bytes = None

    def __init__(self, count, bad=(), empty=()):
        self.num_rows, self._bad, self._empty = count, set(bad), set(empty)

    def row(self, index):
        if index in self._bad:
            return (
                BadRow("is not JSON", detail=f"column {index}") if index else BadRow("is not JSON")
            )
        return {"text": "" if index in self._empty else "ab"}

    def place(self, index):
        return f"a.jsonl:{index + 1}"

    def files(self):
        return {}

    def check_unchanged(self):
        return None


class Bytes:
    fingerprint = "bytes"

    def encode(self, rows):
        ids = [np.frombuffer(row["text"].encode(), np.uint8).astype(np.int32) for row in rows]
        return [
            Document(tokens) if len(tokens) else BadRow("the text is empty", harmless=True)
            for tokens in ids
        ]


def read(source, policy):
    tally = RowStats()
    return list(read_documents(source, Bytes(), policy, tally)), tally


def test_first_bad_row_stops_with_its_place_and_detail():
    with pytest.raises(
        DataError,
        match=r"^a.jsonl:301: is not JSON \(column 300\); correct or remove the row, name its",
    ):
        read(Rows(1000, bad=[300, 700]), BadRows())


def test_empty_text_is_counted_and_does_not_stop_the_run():
    documents, tally = read(Rows(10, empty=[2, 5]), BadRows())
    assert (len(documents), tally.rows, tally.documents, tally.tokens, tally.num_bad) == (
        8,
        10,
        8,
        16,
        0,
    )
    assert tally.reasons() == ["2 rows: the text is empty (a.jsonl:3, a.jsonl:6)"]


def test_skipped_rows_are_counted_by_reason_with_the_first_places():
    documents, tally = read(
        Rows(2000, bad=[0, 7, 900, 1999]), BadRows(skip=True, max_fraction=0.002)
    )

    assert (len(documents), tally.num_bad, tally.rows) == (1996, 4, 2000)
    assert tally.reasons() == ["4 rows: is not JSON (a.jsonl:1, a.jsonl:8, a.jsonl:901, ...)"]

    BadRows(skip=True, max_fraction=0.002).judge(tally, "dataset x")


def test_too_many_bad_rows_stop_with_the_count():
    policy = BadRows.of(Data(bad_rows="skip"))
    _, tally = read(Rows(1000, bad=[3, 4]), policy)
    with pytest.raises(
        DataError,
        match=r"dataset x has 2 bad of 1000 rows, more than data.bad_rows_max_fraction=0.001",
    ):
        policy.judge(tally, "dataset x")


def test_error_names_the_main_reasons_and_the_number_of_others():
    tally = RowStats()
    for number in range(5):
        for _ in range(number + 1):
            tally.add_bad(BadRow(f"reason {number}"), f"a:{number}")
    line = tally.main_reasons()

    assert line.startswith("5 rows: reason 4 (a:4, a:4, a:4, ...); ")
    assert line.endswith("3 rows: reason 2 (a:2, a:2, a:2); and 2 more reasons")


def test_dataset_without_usable_rows_reports_their_reasons():
    _, tally = read(Rows(3, bad=[0], empty=[1, 2]), BadRows(skip=True, max_fraction=1))
    expected = r"x has 0 usable of 3 rows: 2 rows: the text is empty \(a.jsonl:2, a.jsonl:3\); 1 row: is not JSON"
    with pytest.raises(DataError, match=expected):
        BadRows(skip=True, max_fraction=1).judge(tally, "x")
    with pytest.raises(DataError, match="x has 0 usable of 0 rows: the dataset is empty"):
        BadRows().judge(RowStats(), "x")


def test_tallies_of_parts_add_up():
    policy = BadRows(skip=True, max_fraction=1)
    source = Rows(600, bad=[5, 50, 500], empty=[7])
    _, total = read(source, policy)
    merged = RowStats()
    for start in range(0, 600, 150):
        part = RowStats()
        keyed = (((0, index), source.row(index)) for index in range(start, start + 150))
        list(read_documents(source, Bytes(), policy, part, keyed))
        merged.merge(part)

    assert merged == total


def test_huge_rows_are_not_in_memory_together(monkeypatch):
    monkeypatch.setattr(reading, "CHARACTERS_AT_ONCE", 100)
    rows = [((0, i), {"text": "x" * size}) for i, size in enumerate([10, 95, 300, 1, 1, 1])]
    numbers_of_chunks = []
    for chunk in chunks(rows):
        numbers_of_chunks.append([number for (_, number), _ in chunk])

    assert numbers_of_chunks == [[0, 1], [2], [3, 4, 5]]

    # Short rows are limited by their number.
    monkeypatch.setattr(reading, "CHARACTERS_AT_ONCE", 10**9)
    short_rows = [((0, i), {"text": "x"}) for i in range(600)]
    assert [len(chunk) for chunk in chunks(short_rows)] == [256, 256, 88]
