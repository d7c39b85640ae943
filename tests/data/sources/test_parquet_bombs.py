"""Parquet files that contradict themselves are read or refused within the limits of memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from measured import open_measured
from parquet_files import (
    BYTE_ARRAY,
    DELTA_LENGTH,
    DICTIONARY,
    FIXED,
    I32,
    I64,
    INT32,
    LIST,
    OPTIONAL,
    REQUIRED,
    STRUCT,
    UTF8,
    Column,
    Groups,
    Page,
    compress,
    delta_binary,
    group,
    leaf,
    list_head,
    one_column,
    rle,
    text,
    thrift,
    with_length,
)
from tiers import cases

MIB = 2**20
MAX_GROWTH_BYTES = 300 * MIB
"""The rows of one batch, with their copies."""


def one_list(num_values: int, definition: int = 3) -> bytes:
    """Return the levels of one row with a list of ``num_values`` values."""
    repetition = rle(0, 1, 1) + rle(1, num_values - 1, 1)
    return with_length(repetition) + with_length(rle(definition, num_values, 2))


def large_page(codec: str, size: int) -> Callable[[Path], Path]:
    """A page larger than the footer's total uncompressed size, in a file of more than 64 KiB."""

    def write(path: Path) -> Path:
        pages = [Page(text(os.urandom(70_000)), 1), Page(text(b"a" * size), 1)]
        return one_column(path, pages, 2, codec=codec, total_uncompressed=80_000)

    return write


def repeated_text(size: int, count: int, codec: str, is_honest: bool) -> Callable[[Path], Path]:
    """One row with a list of ``count`` times the same text, which is stored once."""

    def write(path: Path) -> Path:
        dictionary = Page(text(b"a" * size), 1, kind="dictionary")
        content = one_list(count) + bytes([1]) + rle(0, count, 1)
        pages = [dictionary, Page(content, count, DICTIONARY)]
        if is_honest:
            return one_column(path, pages, 1, True, codec=codec)
        return one_column(path, pages, 1, True, codec=codec, total_uncompressed=9, num_values=1)

    return write


def null_values(count: int, version: str) -> Callable[[Path], Path]:
    """One row with a run-length encoded list of nulls."""

    def write(path: Path) -> Path:
        levels = (rle(0, 1, 1) + rle(1, count - 1, 1), rle(2, count, 2))
        page = Page(with_length(levels[0]) + with_length(levels[1]), count)
        if version == "v2":
            sizes = (len(levels[0]), len(levels[1]))
            page = Page(b"".join(levels), count, kind="v2", levels=sizes)
        return one_column(
            path, [page], 1, True, codec="snappy", total_uncompressed=100, num_values=1
        )

    return write


def null_values_in_pages(path: Path) -> Path:
    """One row with a list of a billion nulls, in a thousand pages."""
    count = MIB
    first = Page(one_list(count, 2), count)
    more = Page(with_length(rle(1, count, 1)) + with_length(rle(2, count, 2)), count)
    pages = [first, *[more] * 1000]
    return one_column(
        path, pages, 1, True, codec="none", num_values=1001 * count, total_uncompressed=9
    )


def many_columns(path: Path) -> Path:
    """Sixty columns with a page of 60 MiB each. None of them is above the limit."""
    names = [f"c{number}" for number in range(60)]
    page = Page(
        text(b""), 1, packed=compress("zstd", text(b"a" * 60 * MIB)), uncompressed=60 * MIB + 4
    )
    columns = [Column([page], path=(name,)) for name in names]
    schema = [group("schema", 60), *(leaf(name, BYTE_ARRAY, REQUIRED, UTF8) for name in names)]
    return Groups(schema, [(columns, 1)]).save(path)


def wide_nulls(path: Path) -> Path:
    """Null values of a type with 4 MiB per value."""
    page = Page(with_length(rle(0, 256, 1)), 256)
    schema = [group("schema", 1), leaf("text", FIXED, OPTIONAL, (2, I32, 4 * MIB))]
    return Groups(schema, [([Column([page], kind=FIXED)], 256)]).save(path)


def hidden_lengths(path: Path) -> Path:
    """Ten texts, in a page that declares 2^27 text lengths."""
    page = Page(delta_binary(0, 2**27, block=2**27, minis=1), 10, DELTA_LENGTH)
    return one_column(path, [page], 10, codec="snappy")


def claimed_size(path: Path) -> Path:
    """A page of a few bytes whose header claims 2 GiB."""
    return one_column(path, [Page(text(b"a"), 1, uncompressed=2**31 - 1)], 1, codec="snappy")


def large_dictionary(path: Path) -> Path:
    """A dictionary with one text whose header claims two billion."""
    pages = [Page(text(b"a"), 2**31 - 1, kind="dictionary")]
    return one_column(path, [*pages, Page(bytes([1]) + rle(0, 10, 1), 10, DICTIONARY)], 10)


def large_texts(path: Path) -> Path:
    """Rows that all refer to a dictionary entry of 20 MiB, and so must be read a few at a time."""
    dictionary = Page(text(b"a" * 20 * MIB), 1, kind="dictionary")
    choices = Page(bytes([1]) + rle(0, 256, 1), 256, DICTIONARY)
    return one_column(path, [dictionary, choices], 256, codec="snappy", total_uncompressed=100)


def rows_of_one_text(path: Path, count: int = 200_000, size: int = 8 * MIB) -> Path:
    """Rows that all refer to the same dictionary entry."""
    dictionary = Page(text(b"a" * size), 1, kind="dictionary")
    choices = Page(bytes([1]) + rle(0, count, 1), count, DICTIONARY)
    return one_column(path, [dictionary, choices], count, codec="zstd")


def rows_of_one_number(path: Path) -> Path:
    """Two billion rows with the same number, run-length encoded."""
    count = 2**31 - 1
    dictionary = Page(bytes(4), 1, kind="dictionary")
    choices = Page(bytes([1]) + rle(0, count, 1), count, DICTIONARY)
    return one_column(path, [dictionary, choices], count, kind=INT32)


PAGES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "zstd page": (large_page("zstd", 1500 * MIB), "memory_bytes"),
    "brotli page": (large_page("brotli", 1500 * MIB), "memory_bytes"),
    "gzip page": (large_page("gzip", 900 * MIB), "memory_bytes"),
    "lz4 page": (large_page("lz4_raw", 600 * MIB), "memory_bytes"),
    "snappy page": (large_page("snappy", 600 * MIB), "memory_bytes"),
    "list of 1 KB texts": (repeated_text(1000, 2_000_000, "snappy", True), "memory_bytes"),
    "list of 1 MiB texts": (repeated_text(MIB, 10_000, "snappy", True), "memory_bytes"),
    "hidden list of texts": (repeated_text(100_000, 100_000, "zstd", False), "memory_bytes"),
    "list of nulls": (null_values(2**31 - 1, "v1"), "memory_bytes"),
    "list of nulls, v2": (null_values(2**29, "v2"), "memory_bytes"),
    "list in pages": (null_values_in_pages, "memory_bytes"),
    "many columns": (many_columns, "memory_bytes"),
    "wide nulls": (wide_nulls, "read"),
    "hidden lengths": (hidden_lengths, "memory_bytes"),
    "claimed size": (claimed_size, "memory_bytes"),
    "large dictionary": (large_dictionary, "memory_bytes"),
    "large texts": (large_texts, "row"),
    "rows of one text": (rows_of_one_text, "seconds"),
    "rows of one number": (rows_of_one_number, "seconds"),
}
_DEFAULT = ("zstd page", "list of 1 MiB texts", "list of nulls", "many columns", "large texts")


@pytest.mark.parametrize("name", cases(list(_DEFAULT), nightly=sorted(set(PAGES) - {*_DEFAULT})))
def test_hostile_pages_are_refused_within_the_limits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write, expected = PAGES[name]
    result = open_measured("parquet", write(tmp_path / "a.parquet"))

    assert result.grown_bytes < MAX_GROWTH_BYTES, result

    # The rows are read, or each row is refused, or the file is refused by a limit that the message
    # names.
    if expected == "read":
        assert not result.error
        assert result.rows == 256
    elif expected == "row":
        assert not result.error
        assert result.bad_rows == 256
        assert "max_row_bytes" in result.last_bad_row
    else:
        assert "a.parquet" in result.error
        assert f"data.artefact_{expected}" in result.error
        assert "raise the limit" in result.error
        assert len(result.error.splitlines()) == 1


def test_only_rows_that_repeat_terabytes_of_text_are_tried_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    from shardtrain.data import sandbox, sources
    from shardtrain.utils.errors import DataError

    monkeypatch.setattr(sandbox, "_ask", lambda request: "takes too long")

    def first_row(path: Path) -> object:
        source = sources.find("parquet").open_source(sources.Request(path=str(path)))
        return next(iter(sources.every_row(source)))[1]

    # A system prompt of 10 KB in a million rows is 10 GB.
    prompt = rows_of_one_text(tmp_path / "prompt.parquet", 1_000_000, 10_000)
    assert first_row(prompt) == {"text": "a" * 10_000}
    for write in (rows_of_one_text, rows_of_one_number):
        with pytest.raises(DataError, match="takes too long"):
            first_row(write(tmp_path / "a.parquet"))


def footer(path: Path, content: bytes) -> Path:
    """Write a file that has only a footer."""
    return Groups([], [], footer_bytes=content).save(path)


def many_groups(num_groups: int, num_columns: int) -> Callable[[Path], Path]:
    chunk = thrift([(2, I64, 0)])
    chunks = (STRUCT, [chunk] * num_columns)
    row_group = thrift([(1, LIST, chunks), (2, I64, 0), (3, I64, 0)])
    schema = (STRUCT, [group("schema", 1), leaf("text", INT32)])
    groups = (STRUCT, [row_group] * num_groups)
    content = thrift([(1, I32, 1), (2, LIST, schema), (3, I64, 0), (4, LIST, groups)])
    return lambda path: footer(path, content)


def many_leaves(path: Path) -> Path:
    leaves = [leaf(f"c{number}", INT32) for number in range(900_000)]
    return Groups([group("schema", len(leaves)), *leaves], []).save(path)


def many_entries(path: Path) -> Path:
    entries = (STRUCT, [thrift([(1, 8, b"")])] * 1_000_000)
    schema = [group("schema", 1), leaf("text", INT32)]
    return Groups(schema, [], metadata=[(5, LIST, entries)]).save(path)


def claimed_lists(path: Path) -> Path:
    start = bytes([0x15, 2, 0x19]) + list_head(STRUCT, 1) + group("schema", 0)
    million = bytes([0x19]) + list_head(STRUCT, 1_000_000)
    return footer(path, start + bytes([0x16, 0]) + million + million + bytes(100))


def deep_schema(path: Path) -> Path:
    levels = [group("a", 1, OPTIONAL)] * 60_000
    return Groups([group("schema", 1), *levels, leaf("text", INT32)], []).save(path)


def deep_struct(path: Path) -> Path:
    return footer(path, bytes([0x15, 2, 0x0C, 0x9A, 1]) + b"\x1c" * 200_000)


FOOTERS: dict[str, Callable[[Path], Path]] = {
    "row groups": many_groups(1_500_000, 1),
    "columns of row groups": many_groups(1000, 1000),
    "leaves": many_leaves,
    "claimed lists": claimed_lists,
    "metadata": many_entries,
    "deep schema": deep_schema,
    "deep struct": deep_struct,
}


@pytest.mark.parametrize(
    "name",
    cases(
        ["claimed lists", "columns of row groups"],
        nightly=["row groups", "leaves", "metadata", "deep schema", "deep struct"],
    ),
)
def test_hostile_footer_is_refused_within_the_limits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    result = open_measured("parquet", FOOTERS[name](tmp_path / "a.parquet"))
    assert result.grown_bytes < MAX_GROWTH_BYTES, result
    assert "a.parquet" in result.error
    assert len(result.error.splitlines()) == 1


def test_list_rows_of_a_dictionary_are_read_without_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    from shardtrain.data import sandbox, sources

    monkeypatch.setattr(sandbox, "_ask", lambda request: pytest.fail("was tried in a child"))
    # unique texts that fill dictionaries, repeated roles, nulls, and an empty list
    roles = ("user", "assistant", None)
    turns = []
    for number in range(20_000):
        turns.append({"role": roles[number % 3], "content": f"{number} " * 40})
    rows = [turns[start : start + 5] for start in range(0, len(turns), 5)] + [[], None]
    table = pa.table({"messages": rows})
    for codec, version in itertools.product(("zstd", "snappy", "none"), ("1.0", "2.0")):
        path = tmp_path / f"{codec}-{version}.parquet"
        pq.write_table(
            table, path, compression=codec, data_page_version=version, data_page_size=50_000
        )
        source = sources.find("parquet").open_source(sources.Request(path=str(path)))
        assert [row["messages"] for _, row in sources.every_row(source)] == rows


def test_row_groups_of_one_footer_parse_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    from shardtrain.data import sources

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), path, row_group_size=1)
    source = sources.find("parquet").open_source(sources.Request(path=str(path)))
    passed_metadata = []
    plain = pq.ParquetFile

    def recorded_file(*arguments, **options):
        passed_metadata.append(options.get("metadata"))
        return plain(*arguments, **options)

    monkeypatch.setattr(pq, "ParquetFile", recorded_file)

    # Only the first row group parses the footer. The others receive its metadata.
    assert len(list(sources.every_row(source))) == 3
    assert [metadata is None for metadata in passed_metadata] == [True, False, False]
