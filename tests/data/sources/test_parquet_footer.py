"""Footers on which pyarrow aborts the process with SIGABRT are detected before pyarrow describes columns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardtrain.data import sources
from shardtrain.data.sources import _parquet_footer
from shardtrain.utils.errors import DataError

DESCRIBE = """
import io, sys
import pyarrow.parquet as pq
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        content = file.read()
    length = int(path.rpartition("-")[2])
    for begin in range(0, len(content), length):
        metadata = pq.ParquetFile(io.BytesIO(content[begin : begin + length])).metadata
        for group in range(metadata.num_row_groups):
            for column in range(metadata.num_columns):
                metadata.row_group(group).column(column)
"""
"""Describe all columns of the files of one length that a file contains one after the other."""


def damaged_files(path: Path) -> tuple[list[bytes], list[bytes]]:
    """Flip each bit of the footer. Of the files that pyarrow opens, return those found safe and the others."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"text": ["a", "b", None], "number": [1, 2, 3], "tags": [["x"], [], ["y"]]})
    # Without the Arrow schema, the footer is a third as long.
    pq.write_table(table, path, store_schema=False)
    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    sound = []
    others = []
    for place in range(len(content) - 8 - length, len(content) - 8):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            try:
                schema = pq.ParquetFile(pa.BufferReader(bytes(damaged))).schema
            except (OSError, pa.ArrowException, UnicodeDecodeError):
                continue
            footer = bytes(damaged[-8 - length : -8])
            files = sound if _parquet_footer.can_describe(footer, schema) else others
            files.append(bytes(damaged))
    return sound, others


def test_no_bit_of_a_footer_ends_the_process(tmp_path: Path) -> None:
    """One flipped bit in the length of a histogram can crash pyarrow 26 when it describes a column."""
    path = tmp_path / "a.parquet"
    sound, others = damaged_files(path)
    assert len(sound) > 10 * len(others) > 0
    files = tmp_path / f"files-{path.stat().st_size}"
    files.write_bytes(b"".join(sound))
    subprocess.run([sys.executable, "-P", "-c", DESCRIBE, files], check=True)

    # The others are opened in a child process first. They are read only if the child survives.
    refused = []
    for number in (0, len(others) // 2, len(others) - 1):
        path.write_bytes(others[number])
        try:
            source = sources.find("parquet").open_source(sources.Request(path=str(path)))
            list(sources.every_row(source))
        except DataError as error:
            refused.append(str(error))
    assert all(str(path) in error and len(error.splitlines()) == 1 for error in refused)


def test_histogram_of_another_length_is_refused_with_its_file(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), path, store_schema=False)
    content = path.read_bytes()
    # Field 3 of SizeStatistics after field 2: a list of 2 numbers (0x26), the numbers 0 and 3, and the end.
    histogram = bytes((0x19, 0x26, 0, 6, 0))
    assert content.count(histogram) == 1
    # A list of 1 number, and field 4 with the number 0.
    path.write_bytes(content.replace(histogram, bytes((0x19, 0x16, 6, 0x16, 0))))
    with pytest.raises(DataError, match=r"a\.parquet") as refused:
        sources.find("parquet").open_source(sources.Request(path=str(path)))
    assert len(str(refused.value).splitlines()) == 1


def test_column_name_that_is_not_text_is_refused_with_its_file(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"text", b"t\xf4xt"))
    with pytest.raises(DataError, match=r"a\.parquet.* is not UTF-8 text"):
        sources.find("parquet").open_source(sources.Request(path=str(path)))
