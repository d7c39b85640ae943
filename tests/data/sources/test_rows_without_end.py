"""A file whose row has no end is refused after a bounded number of bytes, however large the file is."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from shardtrain.data.sources import (
    BadRow,
    Request,
    _compressed,
    _data_files,
    _index,
    _json_array,
    every_row,
    jsonl,
    text,
    tsv,
)
from shardtrain.utils.errors import DataError

FILE_BYTES = 2**42
BOUND_BYTES = 2**20
GOOD = b'{"text": "a"}\n'
NO_END = "line {} that does not end within 1.00 MiB"
FIRST_LINE = (
    ":1: the first line cannot be read: contains more than 1.00 MiB without the end of a row"
)
CASES = [
    (jsonl, "a.jsonl", b"", NO_END.format(1)),
    (jsonl, "a.json", b"", NO_END.format(1)),
    (jsonl, "a.ndjson", GOOD * 3, NO_END.format(4)),
    # The bad row begins in a later block than the good ones.
    (jsonl, "a.jsonl", GOOD * 5000, NO_END.format(5001)),
    (jsonl, "a.jsonl", b"\n \n", NO_END.format(3)),
    (jsonl, "a.jsonl", b" ", NO_END.format(1)),
    (jsonl, "a.json", b"[", "is one JSON array of more than 1 MiB"),
    (tsv, "a.csv", b"", FIRST_LINE),
    (tsv, "a.csv", b'"', FIRST_LINE),
    (tsv, "a.csv", b"text\na\n", NO_END.format(3)),
    (tsv, "a.csv", b'text\n"a\nb\n', NO_END.format(2)),
    (tsv, "a.tsv", b"text\na\n", NO_END.format(3)),
]


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Set a small bound, and return a list with the number of bytes that sources have read."""
    monkeypatch.setattr(_index, "UNENDED_BYTES", BOUND_BYTES)
    monkeypatch.setattr(_index, "_BLOCK_BYTES", 2**16)
    monkeypatch.setattr(_json_array, "MAX_BYTES", BOUND_BYTES)
    total = [0]
    read_part = _index.RecordReader.read
    read_block = _compressed._Stream.read

    def count_part(self: _index.RecordReader, file: object, size: int, offset: int) -> bytes:
        data = read_part(self, file, size, offset)
        total[0] += len(data)
        return data

    def count_block(self: _compressed._Stream, size: int) -> bytes:
        data = read_block(self, size)
        total[0] += len(data)
        return data

    monkeypatch.setattr(_index.RecordReader, "read", count_part)
    monkeypatch.setattr(_compressed._Stream, "read", count_block)
    return total


def sparse(path: Path, beginning: bytes) -> Path:
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(FILE_BYTES)
    return path


@pytest.mark.parametrize(("source", "name", "beginning", "message"), CASES)
def test_plain_file_is_refused_at_a_row_without_an_end(
    source: ModuleType,
    name: str,
    beginning: bytes,
    message: str,
    bytes_read: list[int],
    tmp_path: Path,
) -> None:
    path = sparse(tmp_path / name, beginning)
    with pytest.raises(DataError) as refused:
        source.open_source(Request(str(path), max_row_bytes=1000))
    assert str(path) in str(refused.value)
    assert message in str(refused.value)
    assert bytes_read[0] < 4 * BOUND_BYTES


@pytest.mark.parametrize(("source", "name"), [(jsonl, "a.jsonl"), (tsv, "a.tsv"), (tsv, "a.csv")])
def test_one_of_many_files_ends_at_a_row_without_an_end(
    source: ModuleType,
    name: str,
    bytes_read: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_data_files, "MANY_FILES", 1)
    good = GOOD if source is jsonl else b"text\na\n"
    opened = source.open_source(Request(str(sparse(tmp_path / name, good)), max_row_bytes=1000))
    rows = [row for _, row in every_row(opened)]

    assert rows[:1] == [{"text": "a"}]
    assert [type(row) for row in rows[1:]] == [BadRow]
    assert "contains more than 1.00 MiB without the end of a row" in str(rows[1])
    assert bytes_read[0] < 4 * BOUND_BYTES


def test_text_file_above_the_bound_is_not_read(bytes_read: list[int], tmp_path: Path) -> None:
    opened = text.open_source(Request(str(sparse(tmp_path / "a.txt", b"a")), max_row_bytes=1000))
    assert [type(row) for _, row in every_row(opened)] == [BadRow]
    assert bytes_read[0] == 0
