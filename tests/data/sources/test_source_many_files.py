"""Folders of many files: files are opened only when read, and yield the same rows as few files."""

from __future__ import annotations

import gzip
import os

import pytest

from shardtrain.data.sources import (
    Request,
    Shards,
    _data_files,
    every_row,
    jsonl,
    parquet,
    text,
    tsv,
)
from shardtrain.utils.errors import ConfigError, DataError

COUNT = 30


def _jsonl(path, number):
    path.with_suffix(".jsonl").write_text(f'{{"text": "{number}"}}\n\n{{"text": "b{number}"}}\n')


def _array(path, number):
    path.with_suffix(".json").write_text(f'[{{"text": "{number}"}}, {{"text": "b{number}"}}]')


def _compressed(path, number):
    path.with_name(path.name + ".jsonl.gz").write_bytes(
        gzip.compress(f'{{"text": "{number}"}}\n'.encode())
    )


def _tsv(path, number):
    path.with_suffix(".tsv").write_text(f"text\tlabel\n{number}\t0\nb{number}\t1\n")


def _text(path, number):
    path.with_suffix(".txt").write_text(f"text {number}")


def _parquet(path, number):
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": [f"{number}", f"b{number}", f"c{number}"]})
    writer.write_table(table, path.with_suffix(".parquet"), row_group_size=2)


KINDS = {
    "jsonl": (jsonl, _jsonl), "arrays": (jsonl, _array), "compressed": (jsonl, _compressed),
    "tsv": (tsv, _tsv), "text": (text, _text), "parquet": (parquet, _parquet),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    module, write = KINDS[request.param]
    for number in range(COUNT):
        write(tmp_path / f"{number:03d}", number)
    return module, Request(str(tmp_path))


def rows_of(source):
    return [row for _, row in every_row(source)]


def test_many_files_yield_the_same_rows_as_few(folder, monkeypatch):
    module, request = folder
    few = rows_of(module.open_source(request))
    monkeypatch.setattr(_data_files, "MANY_FILES", COUNT)
    many = module.open_source(request)

    assert rows_of(many) == few

    if isinstance(many, Shards):
        rows = list(many.rows(7))
        for start in range(len(rows) + 1):
            assert list(many.rows(7, start)) == rows[start:]
        assert many.shard_place(7, 0).startswith(os.path.join(request.path, "007"))


def test_files_of_a_large_folder_are_opened_only_when_read_or_sampled(folder, monkeypatch):
    module, request = folder
    opened = []
    open_file = _data_files.File.open

    def recorded_open(file):
        opened.append(file.name)
        return open_file(file)

    monkeypatch.setattr(_data_files.File, "open", recorded_open)
    monkeypatch.setattr(_data_files, "MANY_FILES", COUNT)
    monkeypatch.setattr(_data_files, "_FILES_SAMPLED", 10)
    source = module.open_source(request)

    # Only the first file may be opened, for the columns of a table.
    assert len(set(opened)) <= 1

    marks = source.files()
    assert len(set(opened)) <= 11
    assert len(marks) == COUNT
    assert sum(":" in mark for mark in marks.values()) == 10


def test_unsuitable_file_of_a_large_folder_is_named_when_read(tmp_path, monkeypatch):
    monkeypatch.setattr(_data_files, "MANY_FILES", 3)
    for number in range(3):
        _tsv(tmp_path / str(number), number)
    (tmp_path / "2.tsv").write_text("label\ttext\n0\tx\n")
    source = tsv.open_source(Request(str(tmp_path)))

    assert len(list(source.rows(1))) == 2
    with pytest.raises(DataError, match=r"2\.tsv.*has the columns label, text, but"):
        list(source.rows(2))

    _jsonl(tmp_path / "0", 0)
    (tmp_path / "1.jsonl").write_bytes('{"text": "x"}'.encode("utf-16"))
    _jsonl(tmp_path / "2", 2)

    with pytest.raises(DataError, match=r"1\.jsonl.*is UTF-16"):
        list(jsonl.open_source(Request(str(tmp_path))).rows(1))


def test_too_many_files_are_rejected_with_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(_data_files, "MAX_FILES", 2)
    for number in range(3):
        _text(tmp_path / str(number), number)

    with pytest.raises(
        ConfigError, match="names 3 files, but at most 2 .*; put more documents into each file"
    ):
        text.open_source(Request(str(tmp_path)))
