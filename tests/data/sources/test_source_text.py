"""Text files as a dataset: each file is one row with its exact text."""

from __future__ import annotations

import gzip
import lzma

import pytest

from shardtrain.data.sources import BadRow, Request, Table, every_row, text
from shardtrain.utils.errors import ConfigError, DataError


def opened(path, **options):
    return text.open_source(Request(str(path), **options))


def rows(path, **options):
    return [row for _, row in every_row(opened(path, **options))]


def test_text_file_is_one_row_with_its_line_ends_and_without_byte_order_mark(tmp_path):
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo \xc3\xa9\0\n")
    source = opened(tmp_path / "a.md")
    assert isinstance(source, Table)
    assert source.row(0) == {"text": "one\r\n\r\ntwo é\0\n"}
    assert source.place(0) == f"{tmp_path}/a.md"


def test_folder_yields_its_text_files_sorted_by_path(tmp_path):
    (tmp_path / "b").mkdir()
    for path in ("c.txt", "a.txt", "b/x.txt", "ignored.md"):
        (tmp_path / path).write_text(path)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"d.txt.gz"))
    (tmp_path / "e.txt.xz").write_bytes(lzma.compress("\ufeffe.txt.xz".encode()))

    assert [row["text"] for row in rows(tmp_path)] == [
        "a.txt",
        "b/x.txt",
        "c.txt",
        "d.txt.gz",
        "e.txt.xz",
    ]
    assert list(opened(tmp_path).files()) == ["a.txt", "b/x.txt", "c.txt", "d.txt.gz", "e.txt.xz"]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_invalid_byte_is_reported_with_its_position(tmp_path, mark):
    (tmp_path / "a.txt").write_bytes(mark + b"ab\xff")
    assert rows(tmp_path) == [BadRow("is not UTF-8", detail=f"byte {len(mark) + 3} is 0xff")]


def test_empty_text_is_a_row_and_a_missing_path_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("")
    assert rows(tmp_path) == [{"text": ""}]
    with pytest.raises(
        ConfigError, match=r'training.dataset_path is not set, and the dataset "text" requires it'
    ):
        text.open_source(Request(None))
    with pytest.raises(ConfigError, match=r"validation.dataset_path=.* does not exist"):
        opened(tmp_path / "no", option="validation.dataset_path")

    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match=r"folder without \*.txt"):
        opened(tmp_path / "b")


def test_text_above_max_row_bytes_is_skipped_even_if_its_compressed_file_is_small(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 101)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"x" * 10**7))
    (tmp_path / "c.txt").write_text("x" * 100)
    first, second, third = rows(tmp_path, max_row_bytes=100)

    assert first == BadRow("is longer than data.max_row_bytes", detail="101 bytes")
    assert second.reason == first.reason
    assert third == {"text": "x" * 100}


def test_truncated_compressed_text_is_a_bad_row(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text" * 100)[:-9])
    assert rows(tmp_path) == [BadRow("the file ends in the middle of its compressed data")]


def test_utf_16_is_rejected(tmp_path):
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(DataError, match=r'a.txt" is UTF-16'):
        opened(tmp_path)
