"""Files that expand when read stay within limits of memory and time. Ordinary text is not limited."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tiny import tiny_config

from shardtrain.config.schema import Config
from shardtrain.data import build_dataset, sandbox
from shardtrain.data.documents import growth
from shardtrain.data.documents.encoded import Document
from shardtrain.data.documents.growth import Growth
from shardtrain.data.documents.read_documents import BadRows, RowStats
from shardtrain.data.packing.token_buffer import MemoryTokenBuffer
from shardtrain.data.sources import BadRow, Request, _compressed, _records, every_row, jsonl, tsv
from shardtrain.data.streaming import stream
from shardtrain.utils.errors import DataError


def zstd_frames(data: bytes) -> bytes:
    """Compress in small frames. One read of a large frame could return 32 MiB."""
    return b"".join(zstandard.compress(data[at : at + 2**16]) for at in range(0, len(data), 2**16))


PACK = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
    "zst": zstd_frames,
}


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    yield
    sandbox.set_limits(sandbox.Limits())


def tick_on_each_call(monkeypatch: pytest.MonkeyPatch, module: object, clock: str) -> None:
    """Advance the clock by a second per call, to make tests independent of the speed of the machine."""
    seconds = itertools.count()
    monkeypatch.setattr(
        module, "time", type("Time", (), {clock: staticmethod(lambda: float(next(seconds)))})
    )


def open_training(path: Path, **data: object) -> None:
    config: Config = tiny_config(
        training={"dataset": "jsonl", "dataset_path": str(path)}, data=data
    )
    build_dataset.open_data(config, config.training, shuffle=True, loop=True)


def test_rows_that_expand_a_thousandfold_hit_the_memory_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "%s"}\n' % (b"ab " * 400_000) * 120))
    with pytest.raises(
        DataError, match="dataset jsonl takes more than data.artefact_memory_bytes=67108864"
    ) as refused:
        open_training(path, artefact_memory_bytes=2**26)
    assert len(str(refused.value).splitlines()) == 1
    assert 'data.mode to "stream"' in str(refused.value)

    open_training(path, artefact_memory_bytes=2**26, mode="memory")


def test_rows_that_expand_without_documents_hit_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growth, "FREE_BYTES", 1000)
    tick_on_each_call(monkeypatch, growth, "process_time")
    sandbox.set_limits(sandbox.Limits(seconds=3))
    empty = (((0, number), {"text": ""}) for number in itertools.count())

    with pytest.raises(
        DataError, match=r"seconds=3 to read: it expanded from 10 bytes to 1\d{3} so far"
    ):
        list(Growth("a", 10).rows(empty))


def test_ordinary_text_has_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "FREE_BYTES", 1000)
    tick_on_each_call(monkeypatch, growth, "process_time")
    sandbox.set_limits(sandbox.Limits(seconds=3))
    rows = [((0, number), {"text": "word " * 100}) for number in range(1000)]

    assert list(Growth("a", 1000 * 500 // 15).rows(rows)) == rows
    assert list(Growth("on a hub", None).rows(rows)) == rows


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("size", [10, 10_000])
def test_buffer_is_never_in_memory_twice(size: int, has_mask: bool) -> None:
    """Memory is at most the bytes counted by Growth plus an eighth, by which a bytearray over-allocates."""
    count = 2**19 // size
    counted_bytes = 0

    class Counted(Growth):
        def keep(self, num_bytes: int) -> None:
            nonlocal counted_bytes
            counted_bytes += num_bytes

    def documents() -> Iterator[Document]:
        for _ in range(count):
            yield Document(np.ones(size, np.int32), np.ones(size, np.bool_) if has_mask else None)

    growth = Counted("a", 10)
    tracemalloc.start()
    MemoryTokenBuffer(documents(), 100, growth)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1.25 * counted_bytes


def test_buffer_keeps_and_counts_its_documents() -> None:
    documents = [Document(np.arange(size, dtype=np.int32), None) for size in (3, 0, 5)]
    buffer = MemoryTokenBuffer(documents, 100, Growth("a", 10))
    assert buffer.tokens(0, 8).tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert buffer.num_documents == 3

    sandbox.set_limits(sandbox.Limits(memory_bytes=700))
    with pytest.raises(
        DataError, match="data.artefact_memory_bytes=700 of memory when it is read completely"
    ):
        MemoryTokenBuffer(documents, 100, Growth("a", 10))


@pytest.mark.parametrize("kind", ["empty members", "blank lines", "one line"])
def test_decompression_of_one_row_has_a_time_limit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compressed, "BLOCK_BYTES", 64)
    nothing = {
        "empty members": gzip.compress(b"") * 1000,
        "blank lines": gzip.compress(b"\n" * 2**24),
    }
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(
        gzip.compress(b'{"text": "a"}\n') + nothing.get(kind, gzip.compress(b"a" * 2**24))
    )
    tick_on_each_call(monkeypatch, _compressed, "thread_time")
    sandbox.set_limits(sandbox.Limits(seconds=20))
    rows = every_row(jsonl.open_source(Request(str(path))))

    assert next(rows)[1] == {"text": "a"}
    with pytest.raises(
        DataError, match=r"a.jsonl.gz\" takes more than data.artefact_seconds=20 of decompression"
    ):
        next(rows)


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", ["a line", "an open quote", "blank lines"])
def test_compressed_row_is_not_read_beyond_the_size_limit(
    ending: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The row has at least 8 MiB, of which the reader may read 1 MiB. Count the bytes it reads.
    monkeypatch.setattr(_records, "SKIPPED_BYTES", 2**20)
    bytes_read = 0
    read = _compressed._Stream.read

    def counted(stream: _compressed._Stream, size: int) -> bytes:
        nonlocal bytes_read
        block = read(stream, size)
        bytes_read += len(block)
        return block

    monkeypatch.setattr(_compressed._Stream, "read", counted)
    is_csv = kind == "an open quote"
    first_row = b"text\na\n" if is_csv else b'{"text": "a"}\n'
    long_rows = {
        "a line": b"a" * 2**23,
        "an open quote": b'"' + (b"a" * 1023 + b"\n") * 2**13,
        "blank lines": b" \n" * 2**22,
    }
    path = tmp_path / f"a.{'csv' if is_csv else 'jsonl'}.{ending}"
    path.write_bytes(PACK[ending](first_row + long_rows[kind]))
    reader = tsv if is_csv else jsonl
    source = reader.open_source(Request(str(path), max_row_bytes=1000))
    rows = [row for _, row in every_row(source)]

    assert rows[0] == {"text": "a"}
    assert "contains more than 1.00 MiB without the end of a row" in str(rows[1])
    assert len(rows) == 2
    assert bytes_read < 2**22


def test_long_row_of_a_compressed_file_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "%s"}\n{"text": "b"}\n' % (b"a" * 10_000)))
    rows = [row for _, row in every_row(jsonl.open_source(Request(str(path), max_row_bytes=1000)))]

    assert "is longer than data.max_row_bytes" in str(rows[0])
    assert rows[1:] == [{"text": "b"}]


def test_compressed_file_with_many_rows_has_no_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compressed, "BLOCK_BYTES", 64)
    path = tmp_path / "a.jsonl.bz2"
    path.write_bytes(
        bz2.compress(b"".join(b'{"text": "%d"}\n\n\n' % number for number in range(3000)))
    )
    tick_on_each_call(monkeypatch, _compressed, "thread_time")
    sandbox.set_limits(sandbox.Limits(seconds=20))

    assert len(list(every_row(jsonl.open_source(Request(str(path)))))) == 3000


def test_json_array_is_read_by_element_within_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardtrain.data.sources import _json_array

    path = tmp_path / "a.json"
    elements = ['{"text": "é"}', *["{}"] * 100, json.dumps({"text": "b" * 60})]
    path.write_text("[" + elements[0] + ",\n" + ",".join(elements[1:]) + "]")
    # Advance the parsed window after each character, within elements, or never: the rows are equal.
    for move in (1, 7, 50, 10**6):
        monkeypatch.setattr(_json_array, "_MOVE_CHARACTERS", move)
        monkeypatch.setattr(_json_array, "_ELEMENT_CHARACTERS", 80)
        monkeypatch.setattr(_json_array, "_PART_CHARACTERS", 80)
        source = jsonl.open_source(Request(str(path), max_row_bytes=80))
        rows = [row for _, row in every_row(source)]
        assert len(rows) == 102
        assert rows[0] == {"text": "é"}
        assert rows[-1] == {"text": "b" * 60}

    # An element longer than the limit of 80 characters is rejected.
    monkeypatch.setattr(_json_array, "_MOVE_CHARACTERS", 1)
    path.write_text('[{"text": "a"},\n[' + "[]," * 100 + "[]], {}]")
    with pytest.raises(
        DataError, match="a.json:2: is not a JSON array: an element is longer than 80 characters"
    ):
        jsonl.open_source(Request(str(path), max_row_bytes=80))

    # Parsing all elements takes longer than the time limit.
    path.write_text("[" + "{}," * 50 + "{}]")
    monkeypatch.setattr(_json_array, "_LOOK_EVERY", 1)
    tick_on_each_call(monkeypatch, _json_array, "thread_time")
    sandbox.set_limits(sandbox.Limits(seconds=20))
    with pytest.raises(
        DataError, match="a.json:1: takes more than data.artefact_seconds=20 to read"
    ):
        jsonl.open_source(Request(str(path)))


def test_stream_without_documents_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tick_on_each_call(monkeypatch, stream, "thread_time")
    sandbox.set_limits(sandbox.Limits(seconds=2))

    class Walk:
        parts_per_epoch = 1

        def rows(self, start: stream.Place) -> Iterator[tuple[stream.Place, BadRow]]:
            return (
                ((0, number), BadRow("the text is empty", harmless=True))
                for number in itertools.count()
            )

        def where(self, place: stream.Place) -> str:
            return f"a.jsonl:{place[1] + 1}"

    # The parts of a reader that the loop over documents needs, without its processes.
    reader = object.__new__(stream._Reader)
    encoder = type("E", (), {"encode": staticmethod(list)})
    reader._feed = type(
        "Feed", (), {"encoder": encoder, "num_readers": 1, "lost": stream.LostDocuments("a")}
    )()
    reader._walk, reader._index = Walk(), 0

    with pytest.raises(
        DataError,
        match=r"a.jsonl:\d+: found no document in \d+ rows and data.artefact_seconds=2 of",
    ):
        list(reader._documents((0, 0)))
    assert BadRows().skip is False
    assert RowStats().rows == 0
