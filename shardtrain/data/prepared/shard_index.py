"""The index of prepared shards: what a folder of tokens holds, read and checked without reading the tokens.

A prepared folder has four kinds of files, all little-endian:

- ``tokens-00000.bin`` ...: ids of all documents end to end, uint16 where the vocabulary allows it, else int32.
- ``learned-00000.bin``: one byte per token of that shard, 1 where it counts in the loss; only where some do not.
- ``starts.bin``: int64, the token number at which each document begins, counted over the whole folder.
- ``index.json``: sizes, hashes, vocabulary, tokenizer and sources; it is written last, so that a folder with one is
  whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.data import shared_opening
from shardtrain.data.shared_opening import Listing, Witness
from shardtrain.utils import atomic_io, bounded_reads, checked_json
from shardtrain.utils.errors import ConfigError, Problem

VERSION = 1
INDEX = "index.json"
STARTS = "starts.bin"
UNFINISHED = "unfinished"
"""Folder inside, of what ``shardtrain data prepare`` needs to continue."""
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "int32": np.dtype("<i4")}
MAX_INDEX_BYTES = 2**28
"""A larger index is refused unread: one of 100,000 shards has 64 MiB."""
MOST_CHECKED = 1000
"""Of more files than these each is checked when it is first read: all ranks opening all files would stop a storage."""
_ENDS_BYTES = 4096
_START_BYTES = 8


@dataclass(frozen=True)
class ShardFile:
    """One file of the folder; ``ends_sha256`` is of its first and last 4 KiB, which cost nothing to read at opening."""

    name: str
    bytes: int
    sha256: str
    ends_sha256: str


@dataclass(frozen=True)
class StoredShard:
    """One shard: its tokens, and their mask where some are not learned. Documents are those that begin in it."""

    num_tokens: int
    num_documents: int
    tokens: ShardFile
    learned: ShardFile | None = None


@dataclass(frozen=True)
class ShardIndex:
    """What ``index.json`` says.

    vocab_size, max_id:   ids are in 0..vocab_size-1; the largest that occurs (-1 without tokens).
    tokenizer:            its fingerprint, SHA-256 in hex; ``tokenizer_name`` is the option's value at the time.
    encoder:              fingerprint of all that decides the documents of a row.
    format:               data.format, what a row was.
    sources:              name of each input file -> its fingerprint.
    tally:                rows, documents, tokens, learned tokens, and bad and harmless rows by reason.
    """

    dtype: str
    vocab_size: int
    max_id: int
    num_tokens: int
    num_documents: int
    shards: tuple[StoredShard, ...]
    starts: ShardFile
    tokenizer: str = ""
    tokenizer_name: str = ""
    encoder: str = ""
    format: str = "text"
    source_bytes: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    tally: Mapping[str, Any] = field(default_factory=dict)
    prepared_from: Mapping[str, Any] = field(default_factory=dict)
    created_by: str = ""

    def files(self) -> list[ShardFile]:
        """All files but the index."""
        return [self.starts, *(f for shard in self.shards for f in (shard.tokens, shard.learned) if f is not None)]

    def to_json(self) -> str:
        """The text of ``index.json``."""
        return json.dumps({"format_version": VERSION, **asdict(self)}, indent=1) + "\n"


def tokens_name(number: int) -> str:
    """File of the tokens of a shard.

    >>> tokens_name(7), learned_name(7)
    ('tokens-00007.bin', 'learned-00007.bin')
    """
    return f"tokens-{number:05d}.bin"


def learned_name(number: int) -> str:
    """File of the mask of a shard."""
    return f"learned-{number:05d}.bin"


def dtype_for(vocab_size: int) -> str:
    """Name of the smallest type that holds all ids of a vocabulary.

    >>> dtype_for(65536), dtype_for(65537)
    ('uint16', 'int32')
    """
    return "uint16" if vocab_size <= 2**16 else "int32"


def ends_sha256(path: Path) -> str:
    """SHA-256 in hex of the first and last 4 KiB of a file."""
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        digest = hashlib.sha256(file.read(_ENDS_BYTES))
        file.seek(max(0, os.fstat(file.fileno()).st_size - _ENDS_BYTES))
        digest.update(file.read(_ENDS_BYTES))
    return digest.hexdigest()


def read_index(folder: Path, option: str = "training.dataset_path", checks_files: bool = True) -> ShardIndex:
    """Read ``index.json`` of a folder and check it against itself and against the sizes and ends of the files.

    Of more than MOST_CHECKED files, or without ``checks_files``, only that of the starts is looked at; who reads one
    of the others calls ``check_file``.

    Raises:
        ConfigError: naming the file that is missing, torn, swapped, of another version, or of another size.
    """
    path = folder / INDEX

    # The bytes, of all ranks by one; a node that has a folder of its own there compares its index with them.
    def look() -> dict[str, Any]:
        content, status = _read(folder, path, option)
        return {"content": np.frombuffer(content, np.uint8), "identity": list(status)}

    def witnesses(raw: dict[str, Any]) -> list[Witness]:
        return [Witness(option, str(path), *raw["identity"])]

    def difference(raw: dict[str, Any], own: dict[str, Any]) -> str:
        return "" if np.array_equal(raw["content"], own["content"]) else f"has another {INDEX} than that of rank 0"

    raw = shared_opening.once(str(folder), look, Listing(witnesses, difference))

    # What they say: of this version, complete, and in agreement with itself.
    table = _load(bytes(raw["content"].data), path, option)
    version = table.get("format_version")
    if version != VERSION:
        fix = 'run "shardtrain data prepare" again with this version'
        rule = f"has format_version {version!r}, and this version reads {VERSION}"
        raise ConfigError(Problem(option, str(path), rule, fix))
    try:
        index = _parse(table)
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, option, f"is damaged ({str(error) or type(error).__name__})") from error
    _check_sums(index, path, option)

    # And what is there.
    files = index.files()
    looked_at = files if checks_files and len(files) <= MOST_CHECKED else [index.starts]

    def check() -> None:
        for stored in looked_at:
            check_file(folder, stored, option)

    shared_opening.once(str(folder), check)
    return index


def _read(folder: Path, path: Path, option: str) -> tuple[bytes, tuple[int, int, int]]:
    """The bytes of an index with its size, time and inode, or an error that says what was found in its place."""
    if not folder.is_dir():
        rule = "is a file, and not a folder of prepared tokens" if folder.exists() else "does not exist"
        raise ConfigError(Problem(option, str(folder), rule, 'name a folder made by "shardtrain data prepare"'))
    if not path.is_file():
        if (folder / UNFINISHED).is_dir():
            fix = 'start the same "shardtrain data prepare" again: it continues where it stopped'
            raise ConfigError(Problem(option, str(folder), "is not prepared to its end", fix))
        inner = sorted(f.parent.name for f in folder.glob(f"*/{INDEX}"))
        rule = f"has no {INDEX}"
        fix = f"name one of its folders: {', '.join(inner)}" if inner else 'run "shardtrain data prepare" first'
        raise ConfigError(Problem(option, str(folder), rule, fix))
    try:
        status = path.stat()
        if status.st_size > MAX_INDEX_BYTES:
            raise _broken(path, option, f"has more than {MAX_INDEX_BYTES} bytes")
        return bounded_reads.whole(path, MAX_INDEX_BYTES), (status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError as error:
        raise bounded_reads.unreadable(option, path, error) from error


def _load(content: bytes, path: Path, option: str) -> dict[str, Any]:
    """The JSON object of an index."""
    try:
        table = checked_json.parse(content)
    except (ValueError, RecursionError) as error:
        raise _broken(path, option, f"is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise _broken(path, option, "is not a JSON object")
    return table


def _parse(table: Mapping[str, Any]) -> ShardIndex:
    """Build the index; a missing key, a wrong type or a value out of range raises."""
    shards = tuple(
        StoredShard(
            _count(shard["num_tokens"], "num_tokens"),
            _count(shard["num_documents"], "num_documents"),
            _stored(shard["tokens"], tokens_name(number)),
            None if shard["learned"] is None else _stored(shard["learned"], learned_name(number)),
        )
        for number, shard in enumerate(_list(table["shards"]))
    )
    if table["dtype"] not in DTYPES:
        raise ValueError(f"dtype {table['dtype']!r} is not one of {', '.join(DTYPES)}")
    source_bytes = table["source_bytes"]
    return ShardIndex(
        dtype=table["dtype"],
        vocab_size=_count(table["vocab_size"], "vocab_size"),
        max_id=_count(table["max_id"], "max_id", least=-1),
        num_tokens=_count(table["num_tokens"], "num_tokens"),
        num_documents=_count(table["num_documents"], "num_documents"),
        shards=shards,
        starts=_stored(table["starts"], STARTS),
        source_bytes=None if source_bytes is None else _count(source_bytes, "source_bytes"),
        tokenizer=str(table["tokenizer"]),
        tokenizer_name=str(table["tokenizer_name"]),
        encoder=str(table["encoder"]),
        format=str(table["format"]),
        sources=dict(table["sources"]),
        tally=dict(table["tally"]),
        prepared_from=dict(table["prepared_from"]),
        created_by=str(table["created_by"]),
    )


def _check_sums(index: ShardIndex, path: Path, option: str) -> None:
    """Sizes must follow from counts, and the parts must add up to the whole."""
    size = DTYPES[index.dtype].itemsize
    wrong = [s.tokens.name for s in index.shards if s.tokens.bytes != s.num_tokens * size]
    wrong += [s.learned.name for s in index.shards if s.learned and s.learned.bytes != s.num_tokens]
    if index.starts.bytes != index.num_documents * _START_BYTES:
        wrong.append(STARTS)
    if wrong:
        raise _broken(path, option, f"contradicts itself on the size of {wrong[0]}")
    if sum(s.num_tokens for s in index.shards) != index.num_tokens:
        raise _broken(path, option, "contradicts itself on the number of tokens")
    if sum(s.num_documents for s in index.shards) != index.num_documents:
        raise _broken(path, option, "contradicts itself on the number of documents")
    if index.max_id >= index.vocab_size:
        raise _broken(path, option, f"has id {index.max_id} beyond its vocabulary of {index.vocab_size}")


def check_file(folder: Path, stored: ShardFile, option: str) -> None:
    """Compare a file's size and ends with the index; raises ConfigError."""
    path = folder / stored.name
    try:
        size = path.stat().st_size
        ends = ends_sha256(path) if size == stored.bytes else ""
    except FileNotFoundError:
        raise _broken(path, option, "is missing") from None
    except OSError as error:
        raise bounded_reads.unreadable(option, path, error) from error
    if size != stored.bytes:
        raise _broken(path, option, f"has {size} bytes, and {INDEX} says {stored.bytes}")
    if ends != stored.ends_sha256:
        raise _broken(path, option, f"is not the file that {INDEX} describes: other bytes at its ends")


def _broken(path: Path, option: str, rule: str) -> ConfigError:
    return ConfigError(Problem(option, str(path), rule, 'restore the file, or run "shardtrain data prepare" again'))


def _stored(table: Mapping[str, Any], name: str) -> ShardFile:
    # A name inside an artefact is not a path to follow: it must be the one that this format gives.
    if table["name"] != name:
        raise ValueError(f"file name {table['name']!r} should be {name}")
    return ShardFile(name, _count(table["bytes"], "bytes"), str(table["sha256"]), str(table["ends_sha256"]))


def _count(value: Any, name: str, least: int = 0) -> int:
    if not checked_json.is_count(value, least):
        raise ValueError(f"{name} is {value!r}")
    return value


def _list(value: object) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise ValueError("shards is not a list")
    return value
