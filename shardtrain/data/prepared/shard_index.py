"""The index of prepared shards. It can be read and checked without reading the tokens.

A folder of prepared shards has four types of files. All numbers are little-endian.

- ``tokens-00000.bin``, ...: the token ids of all documents, concatenated. uint16 if the vocabulary is small
  enough, else int32.
- ``learned-00000.bin``, ...: one byte per token of the shard with the same number, 1 if the token counts in
  the loss. The file exists only if some tokens of the shard do not count.
- ``starts.bin``: for each document the index of its first token, counted over the entire folder. int64.
- ``index.json``: sizes, hashes, vocabulary, tokenizer and sources. It is written last, so a folder that has
  an index is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
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
"""Subfolder with the state that ``shardtrain data prepare`` needs to continue after an interruption."""
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "int32": np.dtype("<i4")}
MAX_INDEX_BYTES = 2**28
"""A larger index is rejected without reading it. The index of 100,000 shards has 64 MiB."""
MAX_CHECKED = 1000
"""If there are more files, each is checked only when it is first read.

Opening so many files on all ranks when a run starts would overload the storage.
"""
_ENDS_BYTES = 4096
_START_BYTES = 8
"""Bytes of the start of a document."""


@dataclass(frozen=True)
class ShardFile:
    """One file of the folder.

    ``ends_sha256`` is the hash of its first and last 4 KiB. It is checked when the folder is opened.
    """

    name: str
    bytes: int
    sha256: str
    ends_sha256: str


@dataclass(frozen=True)
class StoredShard:
    """One shard: the file of its tokens, and the file of its mask if some tokens are not learned.

    ``num_documents`` is the number of documents that begin in the shard.
    """

    num_tokens: int
    num_documents: int
    tokens: ShardFile
    learned: ShardFile | None = None


@dataclass(frozen=True)
class ShardIndex:
    """Contents of ``index.json``.

    Attributes:
        vocab_size: token ids are in 0..vocab_size-1.
        max_id: the largest id that occurs. -1 if there are no tokens.
        tokenizer: fingerprint of the tokenizer, SHA-256 in hex.
        tokenizer_name: value of the option that names the tokenizer.
        encoder: fingerprint of everything that determines how a row is converted to a document.
        format: data.format of the rows.
        sources: maps each input file to its fingerprint.
        tally: number of rows, documents, tokens and learned tokens, and for each reason the number of bad and
            harmless rows.
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
        """Return all files except the index."""
        files = [self.starts]
        for shard in self.shards:
            files.append(shard.tokens)
            if shard.learned is not None:
                files.append(shard.learned)
        return files

    def to_json(self) -> str:
        """Return the text of ``index.json``."""
        return json.dumps({"format_version": VERSION, **asdict(self)}, indent=1) + "\n"


def tokens_name(number: int) -> str:
    """Return the name of a shard's token file.

    >>> tokens_name(7), learned_name(7)
    ('tokens-00007.bin', 'learned-00007.bin')
    """
    return f"tokens-{number:05d}.bin"


def learned_name(number: int) -> str:
    """Return the name of a shard's mask file."""
    return f"learned-{number:05d}.bin"


def dtype_for(vocab_size: int) -> str:
    """Return the name of the smallest dtype that can represent all ids of a vocabulary.

    >>> dtype_for(65536), dtype_for(65537)
    ('uint16', 'int32')
    """
    return "uint16" if vocab_size <= 2**16 else "int32"


def ends_sha256(path: Path) -> str:
    """Return the SHA-256, in hex, of the first and last 4 KiB of a file."""
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        digest = hashlib.sha256(file.read(_ENDS_BYTES))
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _ENDS_BYTES))
        digest.update(file.read(_ENDS_BYTES))
    return digest.hexdigest()


def read_index(
    folder: Path, option: str = "training.dataset_path", checks_files: bool = True
) -> ShardIndex:
    """Read ``index.json`` of a folder, and check that it is consistent and describes the files.

    Files are checked by their size and their first and last bytes. If there are more than MAX_CHECKED
    files, or ``checks_files`` is False, only the file of document starts is checked. The caller must then
    call ``check_file`` before it reads another file.

    Raises:
        ConfigError: a file is missing, truncated or swapped, or the index has a different version. The
            message names the file.
    """
    path = folder / INDEX

    # One rank reads the index for all ranks. A node with a separate copy of the folder compares its own
    # index.
    def look() -> dict[str, Any]:
        content, status = _read(folder, path, option)
        # Arrays are sent as bytes. As text, an index of many shards would be large.
        return {"content": np.frombuffer(content, np.uint8), "identity": list(status)}

    def witnesses(raw: dict[str, Any]) -> list[Witness]:
        return [Witness(option, str(path), *raw["identity"])]

    def content(raw: dict[str, Any]) -> str:
        return hashlib.sha256(raw["content"].data).hexdigest()

    def difference(raw: dict[str, Any], other_raw: dict[str, Any]) -> str:
        return f"has another {INDEX}"

    raw = shared_opening.once(str(folder), look, Listing(witnesses, content, difference))

    # Check the index itself: its version, whether it is complete, and whether it is consistent.
    table = _load(bytes(raw["content"].data), path, option)
    version = table.get("format_version")
    if version != VERSION:
        raise ConfigError(
            Problem(
                option,
                str(path),
                rule=f"has format_version {version!r}, but this version of shardtrain reads only {VERSION}",
                fix='run "shardtrain data prepare" again with this version',
            )
        )
    try:
        index = _parse(table)
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, option, f"is damaged ({str(error) or type(error).__name__})") from error
    _check_sums(index, path, option)

    # With many files, each is checked when it is first read instead.
    checked_files = [index.starts]
    files = index.files()
    if checks_files and len(files) <= MAX_CHECKED:
        checked_files = files

    def check() -> None:
        for stored in checked_files:
            check_file(folder, stored, option)

    shared_opening.once(str(folder), check)
    return index


def _read(folder: Path, path: Path, option: str) -> tuple[bytes, tuple[int, int, int]]:
    """Return the bytes of an index, and its size, time and inode.

    Raises:
        ConfigError: the index does not exist. The message describes the actual content of the folder.
    """
    if not folder.is_dir():
        rule = "does not exist"
        if folder.exists():
            rule = "is a file, not a folder of prepared tokens"
        raise ConfigError(
            Problem(
                option,
                str(folder),
                rule=rule,
                fix='name a folder made by "shardtrain data prepare"',
            )
        )
    if not path.is_file():
        # The index is written last, so an interrupted preparation has none.
        if (folder / UNFINISHED).is_dir():
            raise ConfigError(
                Problem(
                    option,
                    str(folder),
                    rule="is not completely prepared",
                    fix='start the same "shardtrain data prepare" again: it continues where it stopped',
                )
            )
        # The user may have named the parent folder of several prepared datasets.
        inner = sorted(file.parent.name for file in folder.glob(f"*/{INDEX}"))
        fix = 'run "shardtrain data prepare" first'
        if inner:
            fix = f"name one of its folders: {', '.join(inner)}"
        raise ConfigError(Problem(option, str(folder), f"has no {INDEX}", fix))
    try:
        status = path.stat()
        if status.st_size > MAX_INDEX_BYTES:
            raise _broken(path, option, f"has more than {MAX_INDEX_BYTES} bytes")
        content = bounded_reads.read_all(path, MAX_INDEX_BYTES)
        return content, (status.st_size, status.st_mtime_ns, status.st_ino)
    except OSError as error:
        raise bounded_reads.unreadable(option, path, error) from error


def _load(content: bytes, path: Path, option: str) -> dict[str, Any]:
    """Parse the JSON object of an index."""
    try:
        table = checked_json.parse(content, memory_bytes=checked_json.LARGE_MEMORY_BYTES)
    except (ValueError, RecursionError) as error:
        raise _broken(path, option, f"is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise _broken(path, option, "is not a JSON object")
    return table


def _parse(table: Mapping[str, Any]) -> ShardIndex:
    """Convert the JSON object to an index.

    Raises:
        KeyError, TypeError, ValueError: a key is missing, or a value has a wrong type or is out of range.
    """
    if not isinstance(table["shards"], list):
        raise ValueError("shards is not a list")
    # The file may be damaged or hostile, so check every value that is used as a size or as a name of a file.
    shards = []
    for number, shard in enumerate(table["shards"]):
        num_tokens = _count(shard["num_tokens"], "num_tokens")
        num_documents = _count(shard["num_documents"], "num_documents")
        tokens = _stored(shard["tokens"], tokens_name(number))
        learned = None
        if shard["learned"] is not None:
            learned = _stored(shard["learned"], learned_name(number))
        shards.append(StoredShard(num_tokens, num_documents, tokens, learned))
    if table["dtype"] not in DTYPES:
        raise ValueError(f"dtype {table['dtype']!r} is not one of {', '.join(DTYPES)}")
    source_bytes = table["source_bytes"]
    if source_bytes is not None:
        source_bytes = _count(source_bytes, "source_bytes")
    return ShardIndex(
        dtype=table["dtype"],
        vocab_size=_count(table["vocab_size"], "vocab_size"),
        max_id=_count(table["max_id"], "max_id", least=-1),
        num_tokens=_count(table["num_tokens"], "num_tokens"),
        num_documents=_count(table["num_documents"], "num_documents"),
        shards=tuple(shards),
        starts=_stored(table["starts"], STARTS),
        source_bytes=source_bytes,
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
    """Raise ConfigError unless file sizes match the counts, and the counts of shards match the totals."""
    size = DTYPES[index.dtype].itemsize
    wrong = []
    for shard in index.shards:
        if shard.tokens.bytes != shard.num_tokens * size:
            wrong.append(shard.tokens.name)
        if shard.learned and shard.learned.bytes != shard.num_tokens:
            wrong.append(shard.learned.name)
    if index.starts.bytes != index.num_documents * _START_BYTES:
        wrong.append(STARTS)
    if wrong:
        raise _broken(path, option, f"contradicts itself on the size of {wrong[0]}")
    if sum(shard.num_tokens for shard in index.shards) != index.num_tokens:
        raise _broken(path, option, "contradicts itself on the number of tokens")
    if sum(shard.num_documents for shard in index.shards) != index.num_documents:
        raise _broken(path, option, "contradicts itself on the number of documents")
    if index.max_id >= index.vocab_size:
        raise _broken(
            path, option, f"has id {index.max_id} beyond its vocabulary of {index.vocab_size}"
        )


def check_file(folder: Path, stored: ShardFile, option: str) -> None:
    """Raise ConfigError unless a file's size and its first and last bytes match the index."""
    path = folder / stored.name
    try:
        size = path.stat().st_size
        # A wrong size already proves the difference.
        ends = ""
        if size == stored.bytes:
            ends = ends_sha256(path)
    except FileNotFoundError:
        raise _broken(path, option, "is missing") from None
    except OSError as error:
        raise bounded_reads.unreadable(option, path, error) from error
    if size != stored.bytes:
        raise _broken(path, option, f"has {size} bytes, but {INDEX} says {stored.bytes}")
    if ends != stored.ends_sha256:
        raise _broken(
            path, option, f"is not the file that {INDEX} describes: its first or last bytes differ"
        )


def _broken(path: Path, option: str, rule: str) -> ConfigError:
    fix = 'restore the file, or run "shardtrain data prepare" again'
    return ConfigError(Problem(option, str(path), rule, fix))


def _stored(table: Mapping[str, Any], name: str) -> ShardFile:
    # Accept only the name that this format defines. Any other name could be a path out of the folder.
    if table["name"] != name:
        raise ValueError(f"file name {table['name']!r} should be {name}")
    num_bytes = _count(table["bytes"], "bytes")
    return ShardFile(name, num_bytes, str(table["sha256"]), str(table["ends_sha256"]))


def _count(value: Any, name: str, least: int = 0) -> int:
    if not checked_json.is_count(value, least):
        raise ValueError(f"{name} is {value!r}")
    return value
