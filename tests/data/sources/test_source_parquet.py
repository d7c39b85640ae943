"""Parquet: a row group is a shard, values round-trip, and damage is reported."""

from __future__ import annotations

import pickle
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardtrain.data.sources import BadRow, Request, Shards, every_row, parquet, place_of
from shardtrain.utils.errors import ConfigError, DataError

ROWS = [
    {
        "text": f"row {n}" if n % 5 else None,
        "n": n,
        "messages": [{"role": "user", "content": str(n)}] * (n % 3),
    }
    for n in range(1000)
]


def opened(path, **options):
    return parquet.open_source(Request(str(path), **options))


def write(path, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows) if isinstance(rows, list) else rows, path, **options)
    return path


def test_rows_with_nested_values_round_trip_with_a_shard_per_row_group(tmp_path):
    write(tmp_path / "b.parquet", ROWS[600:], row_group_size=250)
    write(tmp_path / "a.parquet", ROWS[:600], row_group_size=600, compression="zstd")
    source = opened(tmp_path)

    assert isinstance(source, Shards)
    assert source.num_shards == 3
    assert [row for _, row in every_row(source)] == ROWS
    assert list(source.files()) == ["a.parquet", "b.parquet"]
    assert source.total_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert source.shard_place(2, 3) == f"{tmp_path}/b.parquet: row 253 from 0"
    assert next(pickle.loads(pickle.dumps(source)).rows(2)) == ROWS[850]


@pytest.mark.parametrize("start", [0, 1, 255, 256, 257, 599, 600])
def test_shard_is_read_from_any_row(tmp_path, start):
    source = opened(write(tmp_path / "a.parquet", ROWS[:600]))
    assert list(source.rows(0, start)) == ROWS[start:600]


def test_row_above_max_row_bytes_and_invalid_utf_8_are_bad_rows(tmp_path):
    wrong = pa.array([b"a", b"a\xff", b"c" * 2000, b"d"]).cast(pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, wrong.buffers())
    source = opened(write(tmp_path / "a.parquet", pa.table({"text": text})), max_row_bytes=1000)
    first, second, third, last = source.rows(0)

    assert (first, last) == ({"text": "a"}, {"text": "d"})
    assert second == BadRow("is not UTF-8", detail="byte 2 is 0xff")
    assert third.reason == "is longer than data.max_row_bytes"


def test_file_that_is_not_parquet_is_named(tmp_path):
    path = write(tmp_path / "a.parquet", ROWS)
    intact = path.read_bytes()
    for content in (intact[:-10], b"PAR1" + bytes(100) + b"PAR1", b'{"text": "a"}\n'):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r'a.parquet" cannot be read as Parquet') as error:
            opened(tmp_path)
        assert "\n" not in str(error.value)


def test_damaged_row_group_is_one_bad_row_and_others_are_read(tmp_path):
    path = write(
        tmp_path / "a.parquet", ROWS, row_group_size=500, compression="none", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[4:40] = bytes(b"\xff" * 36)  # the header of the first page
    path.write_bytes(content)
    source = opened(tmp_path)
    rows = list(source.rows(0))

    assert rows[-1] == BadRow("the rest of the row group is damaged")
    assert list(source.rows(1)) == ROWS[500:]


def test_file_without_rows_or_with_duplicate_columns_is_rejected(tmp_path):
    path = write(tmp_path / "a.parquet", pa.table({"text": pa.array([], pa.string())}))
    source = opened(path) if pq.ParquetFile(path).metadata.num_row_groups else None
    assert source is None or list(every_row(source)) == []

    write(path, pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]))
    with pytest.raises(DataError, match=r'a.parquet" has two columns with the same name'):
        opened(path)


def test_changed_file_is_named(tmp_path):
    path = write(tmp_path / "a.parquet", ROWS)
    source = opened(path)
    write(path, ROWS[:10])

    for read in (source.check_unchanged, lambda: list(source.rows(0))):
        with pytest.raises(ConfigError, match=r'a.parquet" was changed'):
            read()


def test_missing_pyarrow_is_reported_with_the_install_command(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError,
        match=r'needs the pyarrow library, which is not installed; pip install "shardtrain\[hf\]"',
    ):
        opened(path)


def test_place_names_the_row(tmp_path):
    source = opened(write(tmp_path / "a.parquet", ROWS[:7], row_group_size=4))
    places = [place_of(source, key).rpartition(": ")[2] for key, _ in every_row(source)]
    assert places == [f"row {number} from 0" for number in range(7)]
