"""Offsets of Arrow data that are outside of their buffers never reach Arrow, whatever the size of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measured import open_measured
from tiers import cases

pa = pytest.importorskip("pyarrow")

from shardtrain.data.sources import _arrow_offsets  # noqa: E402

BAD_OFFSETS = {
    "above": [0, 2**30, 6],
    "negative": [0, -5, 6],
    "backwards": [0, 6, 3],
}


def text(offsets: list[int]) -> Any:
    """Return texts of two rows with 6 bytes of data."""
    return pa.StringArray.from_buffers(
        2, pa.py_buffer(np.array(offsets, "<i4")), pa.py_buffer(b"abcdef")
    )


def lists(offsets: list[int]) -> Any:
    """Return lists of two rows with 6 numbers."""
    buffers = [None, pa.py_buffer(np.array(offsets, "<i4"))]
    values = pa.array(range(6), pa.int32())
    return pa.Array.from_buffers(pa.list_(pa.int32()), 2, buffers, children=[values])


def in_struct(offsets: list[int]) -> Any:
    return pa.StructArray.from_arrays([text(offsets), pa.array([1, 2])], ["text", "number"])


def in_list(offsets: list[int]) -> Any:
    return pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), in_struct(offsets))


def in_fixed_list(offsets: list[int]) -> Any:
    return pa.FixedSizeListArray.from_arrays(text(offsets), 2)


def in_map(offsets: list[int]) -> Any:
    return pa.MapArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), pa.array(["k", "l"]), text(offsets)
    )


MAKERS = {
    "text": text,
    "lists": lists,
    "struct": in_struct,
    "list": in_list,
    "fixed list": in_fixed_list,
    "map": in_map,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_offsets_outside_of_the_data_are_found(kind: str) -> None:
    make = MAKERS[kind]
    for name, offsets in BAD_OFFSETS.items():
        assert not _arrow_offsets.are_valid(pa.table({"x": make(offsets)})), name

    good = pa.table({"x": make([0, 3, 6]), "null": pa.nulls(len(make([0, 3, 6])))})
    assert _arrow_offsets.are_valid(good)
    for first in range(good.num_rows):
        assert _arrow_offsets.are_valid(good.slice(first, 1))
    assert _arrow_offsets.are_valid(good.slice(0, 0))


def test_rare_types_are_left_to_the_complete_check() -> None:
    dictionary = pa.array(["a", "b"]).dictionary_encode()
    for column in (
        dictionary,
        pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), dictionary),
    ):
        assert not _arrow_offsets.is_checkable(column.type)
    for kind in (pa.int8(), pa.bool_(), pa.timestamp("s"), pa.decimal128(5), pa.binary(3)):
        assert _arrow_offsets.is_checkable(kind)


def test_chunk_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"x": pa.chunked_array([["a", "b"], ["c"], text([0, 7, 6])])})
    chunks = _arrow_offsets.CheckedChunks(table)
    assert [chunks.is_valid(row) for row in range(5)] == [True, True, True, False, False]

    monkeypatch.setattr(_arrow_offsets, "are_valid", lambda _batch: False)
    assert chunks.is_valid(1)
    assert chunks.is_valid(2)


def large_file(path: Path, offsets: list[int]) -> None:
    """Write an Arrow file of 300 MiB: chunks of three short texts, and one of a long text in the middle."""
    short = pa.record_batch({"text": ["one", "two", "three"]})
    long = pa.record_batch({"text": pa.array([b"\0" * 300 * 2**20]).cast(pa.string())})
    damaged = pa.StringArray.from_buffers(
        3, pa.py_buffer(np.array(offsets, "<i4")), pa.py_buffer(b"abcdefghi")
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, short.schema) as stream:
        for batch in (short, long, pa.record_batch({"text": damaged}), short):
            stream.write_batch(batch)


@pytest.mark.parametrize("bad", cases([2**31 - 1], nightly=[-(2**31), 2**20, 0]))
def test_large_file_with_a_bad_offset_has_bad_rows(bad: int, tmp_path: Path) -> None:
    """Only the rows at the bad offset are lost. The row of 300 MiB is above data.max_row_bytes."""
    pytest.importorskip("datasets")
    large_file(tmp_path / "a.arrow", [0, 3, bad, 9])
    result = open_measured("huggingface", tmp_path / "a.arrow")

    assert not result.error
    assert result.rows == 10

    num_damaged = 1 if bad == 0 else 2
    assert result.bad_rows == 1 + num_damaged
    assert _arrow_offsets.OUTSIDE in result.last_bad_row
    assert result.grown_bytes < 2**30
    assert result.seconds < 40
