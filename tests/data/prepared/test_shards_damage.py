"""A damaged or changed prepared folder is rejected with the name of the wrong file."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtrain.data.prepared.shard_index import INDEX, UNFINISHED
from shardtrain.data.prepared.shard_writer import ShardWriter
from shardtrain.data.prepared.shards import ShardTokenBuffer, verify
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ConfigError, StorageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three documents with 30,000 tokens in three shards. The first shard has a mask."""
    writer = ShardWriter(tmp_path / "x", 300, 10_000)
    tokens = np.random.default_rng(0).integers(0, 300, 30_000)
    writer.add_documents(np.array([9_000, 1_000, 20_000]))
    writer.add_tokens(tokens[:9_000], np.arange(9_000) % 2 == 0)
    writer.add_tokens(tokens[9_000:])
    writer.finish()
    return tmp_path / "x"


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = json.loads((folder / INDEX).read_text())
    change(table)
    (folder / INDEX).write_text(json.dumps(table))


def swap(folder: Path) -> None:
    (folder / "tokens-00000.bin").rename(folder / "kept")
    (folder / "tokens-00001.bin").rename(folder / "tokens-00000.bin")
    (folder / "kept").rename(folder / "tokens-00001.bin")


FILE_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed tokens": (
        lambda f: (f / "tokens-00001.bin").unlink(),
        r"tokens-00001\.bin\" is missing",
    ),
    "removed mask": (
        lambda f: (f / "learned-00000.bin").unlink(),
        r"learned-00000\.bin\" is missing",
    ),
    "removed starts": (lambda f: (f / "starts.bin").unlink(), r"starts\.bin\" is missing"),
    "cut tokens": (
        lambda f: os.truncate(f / "tokens-00002.bin", 19_999),
        r"has 19999 bytes, but index\.json says 20000",
    ),
    "swapped shards": (swap, r"tokens-00000\.bin\" is not the file that index\.json describes"),
    "cut index": (lambda f: os.truncate(f / INDEX, 100), r"index\.json\" is not JSON"),
    "empty index": (lambda f: (f / INDEX).write_text(""), r"index\.json\" is not JSON"),
    "a list": (lambda f: (f / INDEX).write_text("[]"), r"index\.json\" is not a JSON object"),
    "deep index": (lambda f: (f / INDEX).write_text("[" * 100_000), r"index\.json\" is not JSON"),
    "binary index": (lambda f: (f / INDEX).write_bytes(b"\xff\x00"), r"index\.json\" is not JSON"),
}

INDEX_DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer version": (
        lambda t: t.update(format_version=2),
        "has format_version 2, but this version of shardtrain reads only 1",
    ),
    "no version": (lambda t: t.pop("format_version"), "has format_version None"),
    "wrong dtype": (
        lambda t: t.update(dtype="float64"),
        "dtype 'float64' is not one of uint16, int32",
    ),
    "missing key": (lambda t: t.pop("num_tokens"), "is damaged \\('num_tokens'\\)"),
    "text for a number": (lambda t: t.update(num_tokens="30000"), "num_tokens is '30000'"),
    "true for a number": (lambda t: t.update(vocab_size=True), "vocab_size is True"),
    "negative": (lambda t: t.update(num_documents=-3), "num_documents is -3"),
    "shards no list": (lambda t: t.update(shards={}), "shards is not a list"),
    "shard no object": (lambda t: t.update(shards=[1]), "is damaged"),
    "a name outside the folder": (
        lambda t: t["shards"][0]["tokens"].update(name="../../secret"),
        r"file name '\.\./\.\./secret' should be tokens-00000\.bin",
    ),
    "wrong sum of tokens": (
        lambda t: t.update(num_tokens=29_999),
        "contradicts itself on the number of tokens",
    ),
    "one shard less": (lambda t: t["shards"].pop(), "contradicts itself on the number of tokens"),
    "size of a shard": (
        lambda t: t["shards"][1].update(num_tokens=7),
        r"on the size of tokens-00001\.bin",
    ),
    "size of starts": (lambda t: t.update(num_documents=4), r"on the size of starts\.bin"),
    "documents of a shard": (
        lambda t: t["shards"][1].update(num_documents=5),
        "on the number of documents",
    ),
    "id beyond": (lambda t: t.update(max_id=300), "has id 300 beyond its vocabulary of 300"),
}


def assert_rejected(folder: Path, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        ShardTokenBuffer(folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith('training.dataset_path="')


@pytest.mark.parametrize("name", FILE_DAMAGE)
def test_damaged_file_is_named(folder: Path, name: str) -> None:
    damage, match = FILE_DAMAGE[name]
    damage(folder)
    assert_rejected(folder, match)


@pytest.mark.parametrize("name", INDEX_DAMAGE)
def test_inconsistent_index_is_rejected(folder: Path, name: str) -> None:
    damage, match = INDEX_DAMAGE[name]
    edit(folder, damage)
    assert_rejected(folder, match)


def test_path_that_is_not_a_prepared_folder_is_rejected(folder: Path, tmp_path: Path) -> None:
    assert_rejected(tmp_path / "none", "does not exist")
    assert_rejected(folder / INDEX, "is a file, not a folder of prepared tokens")
    assert_rejected(tmp_path, "has no index.json; name one of its folders: x")

    (tmp_path / "y" / UNFINISHED).mkdir(parents=True)
    assert_rejected(tmp_path / "y", "is not completely prepared; start the same")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read every file")
def test_unreadable_file_is_named(folder: Path) -> None:
    (folder / "tokens-00000.bin").chmod(0)
    assert_rejected(folder, "cannot be read")


def test_document_starts_outside_the_tokens_are_rejected(folder: Path) -> None:
    """The ends of the file are hashed, so the test changes the index too."""
    starts = np.array([0, 9_000, 31_000], dtype="<i8")
    (folder / "starts.bin").write_bytes(starts.tobytes())
    import hashlib

    ends = hashlib.sha256(starts.tobytes() * 2).hexdigest()
    edit(folder, lambda t: t["starts"].update(ends_sha256=ends))
    assert_rejected(folder, "contains starts of documents outside the 30000 tokens")


@pytest.mark.parametrize(
    ("name", "offset", "value", "match"),
    [
        ("tokens-00001.bin", 10_000, b"\x01\x00", "differs from its SHA-256 in index.json"),
        ("tokens-00001.bin", 10_000, b"\xff\xff", "has the id 65535, outside the vocabulary of 300"),
        ("learned-00000.bin", 5_000, b"\x07", "has a mask of 7, not 0 or 1"),
        ("starts.bin", 8, b"\xff" * 7 + b"\x00", "has starts of documents that do not ascend"),
    ],
)  # fmt: skip
def test_verification_detects_a_changed_byte_that_opening_misses(
    folder: Path, name: str, offset: int, value: bytes, match: str
) -> None:
    if name == "starts.bin":
        # a file of 24 bytes is hashed entirely on opening, so damage it afterwards
        line = ShardTokenBuffer(folder)
    with (folder / name).open("r+b") as file:
        file.seek(offset)
        file.write(value)
    if name != "starts.bin":
        line = ShardTokenBuffer(folder)
    problems = []
    for _, problems_of_file in verify(line):
        problems += problems_of_file

    assert all(text.startswith(str(folder / name)) for text in problems)
    assert any(match in text for text in problems)
    assert any("differs from its SHA-256" in text for text in problems)


@pytest.mark.parametrize("name", ["tokens-00001.bin", "learned-00000.bin", "starts.bin"])
def test_file_changed_during_a_run_is_named(folder: Path, name: str) -> None:
    line = ShardTokenBuffer(folder)
    line.check_unchanged()
    os.utime(folder / name, ns=(1, 1))

    with pytest.raises(
        ConfigError, match=f"{name}.* was changed, moved or removed since the run opened it"
    ):
        line.check_unchanged()


def test_file_truncated_or_deleted_during_a_run_is_an_error_without_a_crash(folder: Path) -> None:
    line = ShardTokenBuffer(folder)
    assert len(line.tokens(10_000, 20_000)) == 10_000

    os.truncate(folder / "tokens-00001.bin", 100)
    (folder / "tokens-00002.bin").unlink()
    os.truncate(folder / "starts.bin", 0)

    for read in (
        lambda: line.tokens(10_000, 20_000),
        lambda: line.tokens(20_000, 20_001),
        lambda: line.starts(0, 100),
        line.document_starts,
        line.check_unchanged,
    ):
        with pytest.raises(ConfigError, match="was changed, moved or removed"):
            read()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_storage_errors_are_not_reported_as_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Not at the start and not during a run: a retry may succeed."""
    line = ShardTokenBuffer(folder)

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    # A read during a run.
    with monkeypatch.context() as patch:
        for name in ("preadv", "stat", "open"):
            patch.setattr(os, name, fails)
        for read in (lambda: line.tokens(0, 100), line.check_unchanged):
            with pytest.raises(
                StorageError, match=rf"cannot read {folder}/.*{os.strerror(number)}"
            ):
                read()

    # The read of the index at the start.
    with monkeypatch.context() as patch:
        patch.setattr(bounded_reads, "read_all", fails)
        with pytest.raises(StorageError, match=rf"cannot read {folder}/{INDEX}"):
            ShardTokenBuffer(folder)

    # The same reader works again once the storage does.
    line.check_unchanged()
    assert len(line.tokens(0, 100)) == 100
