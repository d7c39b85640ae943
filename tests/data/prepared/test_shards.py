"""Prepared shards contain exactly the tokens of the documents, for any size of files and parts."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data.documents.encoded import Document
from shardtrain.data.packing.token_buffer import MemoryTokenBuffer, TokenBuffer
from shardtrain.data.prepared import shard_index, shards
from shardtrain.data.prepared.shard_index import INDEX
from shardtrain.data.prepared.shard_writer import ShardWriter, default_shard_tokens
from shardtrain.data.prepared.shards import (
    ShardTokenBuffer,
    check_tokenizer,
    check_vocabulary,
    verify,
)
from shardtrain.data.sources import Request, tokens
from shardtrain.data.tokenizers.open_tokenizer import ByteTokenizer
from shardtrain.utils.errors import ConfigError


def write(
    folder: Path, documents: list[Document], vocab_size: int = 300, shard_tokens: int = 7
) -> Path:
    writer = ShardWriter(folder, vocab_size, shard_tokens)
    for document in documents:
        writer.add_documents(np.array([len(document.tokens)]))
        writer.add_tokens(document.tokens, document.learned)
    writer.finish(tokenizer=ByteTokenizer.fingerprint, tokenizer_name="bytes")
    return folder


@st.composite
def documents(draw: st.DrawFn, vocab_size: int) -> list[Document]:
    result = []
    for length in draw(st.lists(st.integers(0, 20), max_size=12)):
        tokens = np.array(
            draw(st.lists(st.integers(0, vocab_size - 1), min_size=length, max_size=length)),
            np.int32,
        )
        mask = draw(st.none() | st.lists(st.booleans(), min_size=length, max_size=length))
        result.append(Document(tokens, None if mask is None else np.array(mask, dtype=np.bool_)))
    return result


def assert_same(line: ShardTokenBuffer, memory: TokenBuffer, ranges: list[tuple[int, int]]) -> None:
    assert (line.num_tokens, line.num_documents) == (memory.num_tokens, memory.num_documents)
    assert np.array_equal(line.document_starts(), memory.document_starts())
    size = memory.num_tokens + 1
    for first_edge, second_edge in [(0, memory.num_tokens), *ranges]:
        start, stop = sorted((first_edge % size, second_edge % size))
        assert line.tokens(start, stop).dtype == np.int64
        assert np.array_equal(line.tokens(start, stop), memory.tokens(start, stop))
        assert np.array_equal(line.learned(start, stop), memory.learned(start, stop))
        assert np.array_equal(line.starts(start, stop), memory.starts(start, stop))


@settings(max_examples=60)
@given(
    data=st.data(),
    vocab_size=st.sampled_from([300, 65536, 65537, 200_000]),
    shard_tokens=st.integers(1, 30),
)
def test_shards_match_documents_in_memory(
    data: st.DataObject, vocab_size: int, shard_tokens: int
) -> None:
    given_documents = data.draw(documents(vocab_size))
    ranges = data.draw(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=5))
    has_mask = any(d.learned is not None and not d.learned.all() for d in given_documents)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "x", given_documents, vocab_size, shard_tokens)
        line = ShardTokenBuffer(path)

        assert_same(line, MemoryTokenBuffer(given_documents, vocab_size), ranges)
        assert line.has_mask == has_mask
        for _, problems in verify(line):
            assert problems == []


@settings(max_examples=40)
@given(data=st.data(), shard_tokens=st.integers(1, 30))
def test_writer_resumed_from_a_position_writes_the_same_bytes(
    data: st.DataObject, shard_tokens: int
) -> None:
    given_documents = data.draw(documents(300))
    with tempfile.TemporaryDirectory() as name:
        uninterrupted = write(
            Path(name) / "uninterrupted", given_documents, shard_tokens=shard_tokens
        )
        folder = Path(name) / "parts"
        writer = ShardWriter(folder, 300, shard_tokens)
        for document in given_documents:
            writer.add_documents(np.array([len(document.tokens)]))
            writer.add_tokens(document.tokens, document.learned)
            has_crash = data.draw(st.booleans())
            if has_crash:
                # Tokens that are written after the position are lost.
                position = writer.position()
                extra = data.draw(st.integers(0, 40))
                writer.add_documents(np.array([extra]))
                writer.add_tokens(np.arange(extra), np.arange(extra) % 2 == 0)
                writer.close()
                writer = ShardWriter(folder, 300, shard_tokens, position)
        writer.finish(tokenizer=ByteTokenizer.fingerprint, tokenizer_name="bytes")

        assert contents(folder) == contents(uninterrupted)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def two_documents() -> list[Document]:
    return [
        Document(np.arange(20, dtype=np.int32)),
        Document(np.arange(100, 110, dtype=np.int32), np.arange(10) > 4),
    ]


def test_folder_without_index_is_rejected(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", 300, 7)
    writer.add_documents(np.array([3]))
    writer.add_tokens(np.arange(3))
    writer.position()

    with pytest.raises(
        ConfigError, match=r"has no index\.json; run .shardtrain data prepare. first"
    ):
        ShardTokenBuffer(tmp_path / "x")


def test_opening_reads_only_the_ends_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening is O(1) in tokens: no file is read entirely."""
    folder = write(
        tmp_path / "x", [Document(np.zeros(100_000, np.int32))] * 3, shard_tokens=200_000
    )
    sizes = [path.stat().st_size for path in folder.glob("tokens-*")]
    before = read_bytes()
    ShardTokenBuffer(folder)

    assert read_bytes() - before < 40_000 < sum(sizes)


def read_bytes() -> int:
    return (
        int(Path("/proc/self/io").read_text().split()[1]) if os.path.exists("/proc/self/io") else 0
    )


def test_fingerprint_covers_tokens_masks_and_boundaries(tmp_path: Path) -> None:
    first, second = two_documents()
    marks = {
        "same": [first, second],
        "tokens": [dataclasses.replace(first, tokens=first.tokens + 1), second],
        "mask": [first, dataclasses.replace(second, learned=None)],
        "boundaries": [
            Document(np.arange(10, dtype=np.int32)),
            Document(np.arange(10, 20, dtype=np.int32)),
            second,
        ],
    }
    fingerprints = {
        name: ShardTokenBuffer(write(tmp_path / name, variant)).fingerprint
        for name, variant in marks.items()
    }

    assert len(set(fingerprints.values())) == 4
    assert (
        ShardTokenBuffer(write(tmp_path / "again", [first, second])).fingerprint
        == fingerprints["same"]
    )


def test_default_shard_size_is_512_megabytes() -> None:
    assert default_shard_tokens(300) * 2 == default_shard_tokens(100_000) * 4 == 512 * 10**6


def test_id_outside_the_vocabulary_is_not_written(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", 300, 7)
    for wrong in (300, -1):
        writer.add_documents(np.array([1]))
        with pytest.raises(
            ConfigError, match=f"returns the id {wrong}, outside its vocabulary of 300"
        ):
            writer.add_tokens(np.array([wrong]))


def test_different_tokenizer_is_rejected_with_both_vocabulary_sizes(tmp_path: Path) -> None:
    line = ShardTokenBuffer(write(tmp_path / "x", two_documents(), vocab_size=258))
    check_tokenizer(line, ByteTokenizer())
    tokenizer = ByteTokenizer()
    tokenizer.fingerprint, tokenizer.vocab_size = "f" * 64, 50257

    with pytest.raises(ConfigError) as caught:
        check_tokenizer(line, tokenizer, "model.tokenizer_path")

    text = str(caught.value)
    assert text.startswith("model.tokenizer_path has 50257 ids and fingerprint ffffffffffff, but")
    assert "use that tokenizer, or prepare the data with this one" in text
    assert "\n" not in text
    for part in ('prepared with "bytes"', "258 ids", ByteTokenizer.fingerprint[:12]):
        assert part in text


def test_ids_outside_the_vocabulary_of_the_model_are_rejected(tmp_path: Path) -> None:
    line = ShardTokenBuffer(write(tmp_path / "x", two_documents()))
    check_vocabulary(line, 110)
    with pytest.raises(
        ConfigError, match=r"has a vocabulary of 109, but .* ids up to 109 from a vocabulary of 300"
    ):
        check_vocabulary(line, 109)


def test_dataset_tokens_opens_a_prepared_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", two_documents())
    assert tokens.open_line(Request(path=str(folder)), ByteTokenizer()).num_documents == 2
    with pytest.raises(ConfigError, match=r"training\.dataset_path is not set"):
        tokens.open_line(Request(path=None), ByteTokenizer())

    tokenizer = ByteTokenizer()
    tokenizer.fingerprint = "0" * 64
    with pytest.raises(ConfigError, match="which has 300 ids and fingerprint"):
        tokens.open_line(Request(path=str(folder)), tokenizer)


def test_positions_outside_the_buffer_are_rejected(tmp_path: Path) -> None:
    line = ShardTokenBuffer(write(tmp_path / "x", two_documents()))
    for start, stop in ((-1, 3), (0, 31), (5, 4)):
        with pytest.raises(ValueError, match="of 30"):
            line.tokens(start, stop)


def test_many_shards_need_few_open_files(tmp_path: Path) -> None:
    line = ShardTokenBuffer(
        write(tmp_path / "x", [Document(np.arange(250, dtype=np.int32))], shard_tokens=1)
    )
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    assert np.array_equal(line.tokens(0, 250), np.arange(250))

    if before:
        assert len(os.listdir("/proc/self/fd")) - before <= 64


def test_index_records_the_origin_of_the_tokens(tmp_path: Path) -> None:
    index = ShardTokenBuffer(write(tmp_path / "x", two_documents())).index
    assert (index.dtype, index.vocab_size, index.max_id) == ("uint16", 300, 109)
    # documents that begin in each shard of 7 tokens
    assert [shard.num_documents for shard in index.shards] == [
        1,
        0,
        1,
        0,
        0,
    ]
    assert index.created_by.startswith("shardtrain ")
    assert index.tokenizer_name == "bytes"
    assert sorted(p.name for p in (tmp_path / "x").iterdir() if p.name.endswith(".tmp")) == []
    assert (tmp_path / "x" / INDEX).stat().st_size > 100


def test_many_files_are_checked_when_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """15T tokens have 117,000 files, of which each rank reads a few."""
    documents_of_50 = [Document(np.arange(50, dtype=np.int32) + 7 * n) for n in range(4)]
    write(tmp_path / "shards", documents_of_50)
    all_shards = ShardTokenBuffer(tmp_path / "shards")
    checked: list[str] = []
    check = shard_index.check_file

    def recorded_check(*arguments: Any) -> Any:
        checked.append(arguments[1].name)
        return check(*arguments)

    monkeypatch.setattr(shard_index, "MAX_CHECKED", 3)
    monkeypatch.setattr(shard_index, "check_file", recorded_check)
    monkeypatch.setattr(shards, "check_file", recorded_check)
    late = ShardTokenBuffer(tmp_path / "shards")

    assert checked == ["starts.bin"]
    assert late.fingerprint == all_shards.fingerprint
    assert (late.tokens(0, 200) == all_shards.tokens(0, 200)).all()
    other_files = [file.name for file in late.index.files() if file.name != "starts.bin"]
    assert sorted(checked[1:]) == sorted(other_files)

    # A second read checks no file again.
    late.tokens(0, 200)
    assert len(checked) == len(set(checked))

    late.check_unchanged()

    # Damage the third file. Reading the first two does not detect it.
    damaged = ShardTokenBuffer(tmp_path / "shards")
    path = tmp_path / "shards" / damaged.index.shards[2].tokens.name
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    damaged.tokens(0, 14)

    with pytest.raises(
        ConfigError, match=r"tokens-00002.bin.* is not the file that index.json describes"
    ):
        damaged.tokens(14, 21)
    with pytest.raises(ConfigError, match="was changed, moved or removed since the run opened it"):
        late.check_unchanged()
