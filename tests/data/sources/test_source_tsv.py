"""TSV and CSV: the first line names the columns, and every other record is a row with that number of fields."""

from __future__ import annotations

import csv
import gzip
import io
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardtrain.data.sources import (
    BadRow,
    Request,
    Shards,
    Table,
    _index,
    _records,
    every_row,
    place_of,
    tsv,
)
from shardtrain.utils.errors import DataError


def opened(path, **options):
    return tsv.open_source(Request(str(path), **options))


def read(path, **options):
    source = opened(path, **options)
    return [(int(place_of(source, key).rpartition(":")[2]), row) for key, row in every_row(source)]


def write(root, name, content):
    path = root / name
    path.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_tabs_separate_fields_and_quotes_are_text(tmp_path, name):
    path = write(tmp_path, name, b'\xef\xbb\xbflabel\ttext\r\n1\t"a\r\n\n0\tb "c", d\0\r\n2\t')
    assert read(path) == [
        (2, {"label": "1", "text": '"a'}),
        (4, {"label": "0", "text": 'b "c", d\0'}),
        (5, {"label": "2", "text": ""}),
    ]
    assert isinstance(opened(path), Shards if name.endswith("gz") else Table)


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_without_a_header_columns_are_numbered_and_the_first_line_is_a_row(tmp_path, name):
    path = write(tmp_path, name, b"good\t1\nbad\t0\n")
    assert read(path, header=False) == [(1, {"0": "good", "1": "1"}), (2, {"0": "bad", "1": "0"})]


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_invalid_line_is_a_bad_row_with_its_number(tmp_path, name):
    path = write(tmp_path, name, b"a\tb\n1\n1\t2\t3\n\xff\t1\n1\t" + b"x" * 50 + b"\n1\t2\n")
    fields = "has a different number of fields than columns"
    assert read(path, max_row_bytes=50) == [
        (2, BadRow(fields, detail="1, not 2")),
        (3, BadRow(fields, detail="3, not 2")),
        (4, BadRow("is not UTF-8", detail="byte 1 is 0xff")),
        (5, BadRow("is longer than data.max_row_bytes", detail="52 bytes")),
        (6, {"a": "1", "b": "2"}),
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_quoted_csv_fields_may_contain_anything(tmp_path, name):
    path = write(
        tmp_path, name, b'id,text\r\n1,"a, ""b""\r\n\r\nc"\r\n\r\n2,\xc3\xa9\r\n"3",""\r\n4,last'
    )

    assert read(path) == [
        (2, {"id": "1", "text": 'a, "b"\r\n\r\nc'}),
        (6, {"id": "2", "text": "é"}),
        (7, {"id": "3", "text": ""}),
        (8, {"id": "4", "text": "last"}),
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_invalid_csv_quote_makes_bad_rows_and_never_shifts_fields(tmp_path, name):
    path = write(tmp_path, name, b'id,text\n1,"a"b\n2,"open\n3,c\n')
    assert read(path) == [
        (2, BadRow("is not CSV", detail="',' expected after '\"'")),
        (3, BadRow("is not CSV", detail="unexpected end of data")),
    ]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_csv_field_may_exceed_the_limit_of_the_library_and_a_long_record_is_skipped(tmp_path, name):
    lines = b'text\n"' + b"x" * 200_000 + b'"\n"' + b'y""\n' * 300_000 + b'"\nz\n'
    path = write(tmp_path, name, lines)
    (first_line, first), (long_line, long), (last_line, last) = read(path, max_row_bytes=2**20)

    assert (first_line, long_line, last_line) == (2, 3, 300_004)
    assert (first, last) == ({"text": "x" * 200_000}, {"text": "z"})
    assert long == BadRow("is longer than data.max_row_bytes", detail="1200002 bytes")


TEXTS = st.text(st.sampled_from('ab é",\t\n\r\0;'), max_size=8)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=12),
    block=st.sampled_from([7, 1 << 20]),
)
def test_rows_written_by_the_csv_library_round_trip(tmp_path, data, block):
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_ALL).writerows([("a", "b", "c"), *data])
    content = written.getvalue().encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_index, "_BLOCK_BYTES", block)
        patch.setattr(_records, "BLOCK_BYTES", block)
        plain = read(write(tmp_path, "a.csv", content))
        assert plain == read(write(tmp_path, "b.csv.gz", content))

    assert [tuple(row.values()) for _, row in plain] == data

    # A row begins in the line after the previous row, whose fields may contain ends of lines.
    expected_lines = []
    line = 2
    for record in data:
        expected_lines.append(line)
        line += 1 + sum(field.count("\n") for field in record)
    assert [line for line, _ in plain] == expected_lines


@pytest.mark.parametrize(
    ("content", "shown"),
    [(b"a\ta\n1\t2\n", "'a', 'a'"), (b"a\t\n1\t2\n", "'a', ''"), (b"\xff\n1\n", "is not UTF-8")],
)
def test_invalid_header_is_an_error_with_the_option_for_files_without_one(tmp_path, content, shown):
    path = write(tmp_path, "a.tsv", content)
    with pytest.raises(DataError, match=rf"a.tsv:1: the first line .*{shown}"):
        opened(path)


def test_files_with_different_columns_or_formats_are_rejected(tmp_path):
    write(tmp_path, "a.tsv", b"a\tb\n")
    write(tmp_path, "b.tsv", b"b\ta\n")
    with pytest.raises(
        DataError,
        match=r'b.tsv" has the columns b, a, but .*a.tsv has a, b; use the same first line',
    ):
        opened(tmp_path)

    write(tmp_path, "b.csv", b"a,b\n")
    with pytest.raises(DataError, match=r'b.csv" has another format than .*a.tsv'):
        opened(tmp_path / "[ab].[ct]sv")


def test_file_with_only_a_header_has_no_rows_and_sources_are_picklable(tmp_path):
    path = write(tmp_path, "a.tsv", b"a\tb\n")
    assert read(path) == []
    write(tmp_path, "a.tsv", b"a\tb\n1\t2\n")
    assert pickle.loads(pickle.dumps(opened(path))).row(0) == {"a": "1", "b": "2"}
