"""JSON Lines: each non-blank line is a row, read identically by index, in sequence and from compressed files."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import os
import pickle
from functools import partial

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardtrain.data.sources import (
    BadRow,
    Request,
    Shards,
    Table,
    _data_files,
    _index,
    _records,
    every_row,
    jsonl,
    place_of,
)
from shardtrain.utils.errors import DataError

COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": partial(lzma.compress, preset=0),
    ".zst": zstandard.compress,
}


def opened(path, **options):
    return jsonl.open_source(Request(str(path), **options))


def rows_and_lines(source):
    """Each row (or the reason why it is bad) with its line number."""
    rows = []
    for key, row in every_row(source):
        line = int(place_of(source, key).rpartition(":")[2].partition(" (element")[0])
        rows.append((line, str(row) if isinstance(row, BadRow) else dict(row)))
    return rows


def test_plain_file_is_a_table_and_a_compressed_one_is_shards(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    plain = opened(tmp_path)
    assert isinstance(plain, Table)
    assert not isinstance(plain, Shards)
    assert (plain.num_rows, plain.total_bytes) == (2, 19)
    assert (plain.row(1), plain.place(1)) == ({"a": 2}, f"{tmp_path}/a.jsonl:3")

    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'\n{"b": 1}\n{"b": 2}'))
    mixed = opened(tmp_path)
    assert isinstance(mixed, Shards)
    assert not isinstance(mixed, Table)
    assert mixed.num_shards == 2
    assert list(mixed.rows(0)) == [{"a": 1}, {"a": 2}]
    assert list(mixed.rows(1, start=1)) == [{"b": 2}]
    assert mixed.shard_place(0, 1) == f"{tmp_path}/a.jsonl:3"
    assert mixed.shard_place(1, 1) == f"{tmp_path}/b.jsonl.gz:3"
    assert list(mixed.files()) == ["a.jsonl", "b.jsonl.gz"]


def test_rows_of_several_files_are_concatenated(tmp_path):
    for name, count in (("a", 2), ("b", 0), ("c", 3)):
        lines = "".join(f'{{"{name}": {number}}}\n' for number in range(count)) or "\n \n"
        (tmp_path / f"{name}.jsonl").write_text(lines)
    source = opened(tmp_path)

    assert [row for _, row in every_row(source)] == [
        {"a": 0},
        {"a": 1},
        {"c": 0},
        {"c": 1},
        {"c": 2},
    ]
    assert [source.place(index)[-9:] for index in (1, 2, 4)] == [
        "a.jsonl:2",
        "c.jsonl:1",
        "c.jsonl:3",
    ]
    for index in (-1, 5):
        with pytest.raises(IndexError):
            source.row(index)


def test_places_work_in_another_process(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n\n\n{}\n\n{}\n{}"))
    source = pickle.loads(pickle.dumps(opened(tmp_path)))
    assert [source.shard_place(0, number).rpartition(":")[2] for number in (3, 0, 2, 1)] == [
        "7",
        "1",
        "6",
        "4",
    ]


# Parts of files: objects, spaces, blank lines, both line endings, broken text, a byte order mark.
PIECES = st.sampled_from(
    [
        b'{"a": 1}',
        b'{"text": "\xc3\xa9\\n"}',
        b"\n",
        b"\n",
        b"\r\n",
        b" ",
        b"\t",
        b"{",
        b"\xff",
        b'"',
        b"[1]",
        b"\xef\xbb\xbf",
        b'{"long": "' + b"x" * 50 + b'"}',
        b" " * 60,
        b"\0",
    ]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.lists(PIECES, min_size=1, max_size=30).map(b"".join),
    block=st.sampled_from([7, 16, 1 << 20]),
)
def test_table_and_shards_read_the_same_rows(tmp_path, content, block):
    # The definition: blank lines are skipped, and a line is an object of at most 40 bytes or bad.
    expected = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip(b" \t\r"):
            continue
        value = None
        if len(line) <= 40:
            with contextlib.suppress(ValueError):
                value = json.loads(line.decode("utf-8", "strict"))
        expected.append((number, value if isinstance(value, dict) else "bad"))

    # small blocks, to place block boundaries everywhere
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_index, "_BLOCK_BYTES", block)
        patch.setattr(_records, "BLOCK_BYTES", block)
        rows = []
        for name, data in (("a.jsonl", content), ("a.jsonl.gz", gzip.compress(content, 1))):
            (tmp_path / name).write_bytes(data)
            # other tests check that a UTF-16 byte order mark is rejected
            if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
                return
            rows.append(rows_and_lines(opened(tmp_path / name, max_row_bytes=40)))

    assert rows[0] == rows[1]
    assert [(line, "bad" if isinstance(row, str) else row) for line, row in rows[0]] == expected


OBJECTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        ),
        max_leaves=6,
    ),
    max_size=4,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    objects=st.lists(OBJECTS, min_size=1, max_size=8),
    ascii_only=st.booleans(),
    compression=st.sampled_from([*COMPRESS]),
)
def test_rows_round_trip_in_order_plain_compressed_and_as_an_array(
    tmp_path, objects, ascii_only, compression
):
    lines = "\n".join(json.dumps(value, ensure_ascii=ascii_only) for value in objects).encode()
    array = json.dumps(objects, ensure_ascii=ascii_only, indent=1).encode()
    for name, data in (("a.jsonl", lines), ("a.json", lines), ("b.json", array)):
        (tmp_path / name).write_bytes(data)
        (tmp_path / (name + compression)).write_bytes(COMPRESS[compression](data))
        for path in (tmp_path / name, tmp_path / (name + compression)):
            assert [row for _, row in every_row(opened(path))] == objects


@pytest.mark.parametrize("compression", COMPRESS)
def test_compressed_file_may_have_several_members(tmp_path, compression):
    """``cat a.gz b.gz`` and parallel compressors write such files."""
    lines = [b'{"a": %d}\n' % number for number in range(15000)]
    parts = [b"".join(lines[start : start + 5000]) for start in (0, 5000, 10000)]
    content = b"".join(COMPRESS[compression](part) for part in parts)
    (tmp_path / f"a.jsonl{compression}").write_bytes(content)
    source = opened(tmp_path)

    assert [row["a"] for row in source.rows(0)] == list(range(15000))
    assert [row["a"] for row in source.rows(0, start=14990)] == list(range(14990, 15000))


@pytest.mark.parametrize("compression", COMPRESS)
def test_rows_before_a_truncation_are_read_and_the_truncation_is_one_bad_row(tmp_path, compression):
    lines = []
    for number in range(30000):
        row = {"n": number, "text": os.urandom(30).hex()}
        lines.append(json.dumps(row).encode())
    data = COMPRESS[compression](b"\n".join(lines) + b"\n")
    path = tmp_path / f"a.jsonl{compression}"
    path.write_bytes(data[: len(data) * 2 // 3])
    source = opened(path)
    *rows, last = source.rows(0)

    assert last == BadRow("the file ends in the middle of its compressed data")
    # a cut loses one block: 900 kB of text for bzip2, less for the others
    assert len(rows) > (5_000 if compression != ".bz2" else 1_000)
    assert rows == [json.loads(line) for line in lines[: len(rows)]]
    assert source.shard_place(0, len(rows)) == f"{path}:{len(rows) + 1}"


@pytest.mark.parametrize("compression", COMPRESS)
def test_damaged_compressed_data_is_one_bad_row_at_the_end(tmp_path, compression):
    lines = b"".join(
        b'{"n": %d, "text": "%s"}\n' % (n, os.urandom(30).hex().encode()) for n in range(30000)
    )
    data = bytearray(COMPRESS[compression](lines))
    middle = len(data) // 2
    data[middle : middle + 400] = bytes(400)
    (tmp_path / f"a.jsonl{compression}").write_bytes(data)
    # where only a checksum detects damage, damaged rows may precede it
    rows = list(opened(tmp_path).rows(0))

    assert isinstance(rows[-1], BadRow)
    assert "compressed data" in rows[-1].reason
    assert rows[0]["n"] == 0


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b'[{"a": 1},\n {"a": 2}\n', 3, "is not a JSON array: Expecting ',' or ']'"),
        (b'[{"a": 1}\n {"a": 2}]\n', 2, "is not a JSON array: Expecting ',' or ']'"),
        (b'[{"a": 1},\n {"a": 2},\n]\n', 3, "is not a JSON array: Expecting value"),
        (
            b'[{"a": 1}]\n\n[{"a": 2}]\n',
            3,
            "is not a JSON array: Expecting nothing after the array's end",
        ),
        (b'[{"a": 1},\n\n {"a": \xff}]\n', 3, "is not UTF-8"),
        (b'[{"a": 1},\n{"a":' + b"[" * 10**5, 2, "is nested too deeply"),
        (b'[{"a": 1},\n{"a":' + b"1" * 10**4 + b"}]", 2, "contains a number with too many digits"),
    ],
)
def test_broken_array_is_an_error_with_its_line(tmp_path, content, line, reason):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError) as error:
        opened(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/a.json:{line}: {reason}")
    assert "\n" not in str(error.value)


def test_invalid_array_elements_are_bad_rows_with_their_lines(tmp_path):
    elements = [
        '{"text": "\u00e9"}',
        "[1]",
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        '{"a": "' + "x" * 99 + '"}',
        '{"b": 2}',
    ]
    (tmp_path / "a.json").write_text("\ufeff [\n" + ",\n".join(elements) + "\n]\n")
    source = opened(tmp_path, max_row_bytes=90)

    assert rows_and_lines(source) == [
        (2, {"text": "\u00e9"}),
        (3, "is not a JSON object but an array"),
        (4, "contains NaN, which is not JSON"),
        (5, 'has a duplicate key ("a")'),
        (6, "is longer than data.max_row_bytes (108 bytes)"),
        (7, {"b": 2}),
    ]
    assert place_of(source, (0, 3)) == f"{tmp_path}/a.json:5 (element 4)"
    assert pickle.loads(pickle.dumps(source)).row(5) == {"b": 2}


def test_array_above_the_size_limit_is_rejected_and_an_empty_one_has_no_rows(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text("[ ]")
    assert opened(tmp_path).num_rows == 0

    monkeypatch.setattr("shardtrain.data.sources._json_array.MAX_BYTES", 2)
    with pytest.raises(
        DataError, match=r"a.json\" is one JSON array of more than 0 MiB; write one object per line"
    ):
        opened(tmp_path)


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b" \t\n"])
def test_index_skips_blank_lines(tmp_path, monkeypatch, blank):
    monkeypatch.setattr(_index, "_BLOCK_BYTES", 1000)  # runs of blank lines span blocks
    path = tmp_path / "a.jsonl"
    path.write_bytes(blank * 5000 + b"1\n" + blank * 3000 + b"2\n3\n" + blank * 2000 + b"4" + blank)
    (file,) = list_of(path)
    index = _index.RecordIndex(file, _index.RecordReader())

    lines = [index.read(row, 100) for row in range(index.num_rows)]
    assert lines == [b"1", b"2", b"3", b"4" + blank[:-1]]
    assert [index.line(row) for row in range(4)] == [5001, 8002, 8003, 10004]
    # The index has no entry for a blank line.
    assert sum(map(len, index.arrays().values())) < 20


def list_of(path):
    return _data_files.list_files(Request(str(path)), "jsonl", jsonl.ENDINGS)
