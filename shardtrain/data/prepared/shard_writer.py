"""Write prepared shards: files with a fixed number of tokens each, and the index last.

A folder counts as a dataset only if ``index.json`` exists. The index is written atomically, so the result
of an interrupted write is never read. ``position`` makes everything durable and returns the writer's state.
Another writer that starts from this state continues exactly at this position, and writes the same bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain import __version__
from shardtrain.data.packing.token_buffer import Mask
from shardtrain.data.prepared.shard_index import (
    DTYPES,
    INDEX,
    STARTS,
    ShardFile,
    ShardIndex,
    StoredShard,
    dtype_for,
    ends_sha256,
    learned_name,
    tokens_name,
)
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.errors import ConfigError, DataError

SHARD_BYTES = 512 * 10**6
"""Maximum size of a shard's token file, unless the user sets the number of tokens per shard."""
_BLOCK_BYTES = 4 * 2**20


def default_shard_tokens(vocab_size: int) -> int:
    """Return the number of tokens per shard for files of 512 MB.

    >>> default_shard_tokens(50_000), default_shard_tokens(128_000)
    (256000000, 128000000)
    """
    return SHARD_BYTES // DTYPES[dtype_for(vocab_size)].itemsize


class ShardWriter:
    """Appends documents to the files of a folder.

    Call ``add_documents`` with the lengths of some documents. Then call ``add_tokens`` with the tokens of
    these documents, in parts of any size. ``position`` returns a state from which to continue after a
    crash. ``finish`` writes the index.

    Raises:
        StorageError: a file cannot be written.
        DataError: a file of the position from which to continue does not exist or is too short.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        shard_tokens: int,
        position: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.vocab_size = vocab_size
        self.shard_tokens = shard_tokens
        self.dtype = DTYPES[dtype_for(vocab_size)]
        position = position or {
            "tokens": 0,
            "documents": 0,
            "max_id": -1,
            "shards": [],
            "learned": False,
        }
        self.num_tokens: int = position["tokens"]
        self.num_documents: int = position["documents"]
        self.max_id: int = position["max_id"]
        self._shards = [_shard(table) for table in position["shards"]]
        # the token number at which the next document begins
        self._due = self.num_tokens
        self._before = sum(shard.num_tokens for shard in self._shards)
        self._documents_before = sum(shard.num_documents for shard in self._shards)
        self._learned: _GrowingFile | None = None
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)

            # Remove files of shards that a killed writer had begun after the position was saved.
            known = {tokens_name(len(self._shards))}
            if position["learned"]:
                known.add(learned_name(len(self._shards)))
            for shard in self._shards:
                known |= {file.name for file in (shard.tokens, shard.learned) if file is not None}
            for path in [*self.folder.glob("tokens-*.bin"), *self.folder.glob("learned-*.bin")]:
                if path.name not in known:
                    path.unlink()

            # Opening the current files truncates them to their size at the position.
            self._starts = _GrowingFile(folder / STARTS, 8 * self.num_documents)
            self._tokens = self._open(tokens_name, self._in_shard * self.dtype.itemsize)
            if position["learned"]:
                self._learned = self._open(learned_name, self._in_shard)

    @property
    def _in_shard(self) -> int:
        return self.num_tokens - self._before

    def add_documents(self, lengths: npt.NDArray[np.integer]) -> None:
        """Add the lengths of the next documents, in tokens."""
        ends = np.cumsum(lengths, dtype=np.int64) + self._due
        starts = (ends - lengths).astype("<i8")
        with storing(self.folder):
            self._starts.write(starts)
        self.num_documents += len(lengths)
        if len(ends):
            self._due = int(ends[-1])

    def add_tokens(self, tokens: npt.NDArray[np.integer], learned: Mask | None = None) -> None:
        """Write tokens, and a mask of the learned tokens. None means that all tokens are learned."""
        if not len(tokens):
            return
        low = int(tokens.min())
        high = int(tokens.max())
        if low < 0:
            raise beyond_vocabulary(low, self.vocab_size)
        if high >= self.vocab_size:
            raise beyond_vocabulary(high, self.vocab_size)
        self.max_id = max(self.max_id, high)
        at = 0
        with storing(self.folder):
            while at < len(tokens):
                if self._in_shard == self.shard_tokens:
                    # The shard is full. Count its documents: ``starts`` also contains documents of later
                    # shards, because lengths are written before tokens.
                    self._starts.flush()
                    starts = np.memmap(self._starts.path, dtype="<i8", mode="r")
                    num_documents = int(np.searchsorted(np.asarray(starts), self.num_tokens))
                    self._close_shard(num_documents)
                    self._tokens = self._open(tokens_name)
                count = min(len(tokens) - at, self.shard_tokens - self._in_shard)
                part = None if learned is None else learned[at : at + count]
                self._write_mask(part, count)
                self._tokens.write(tokens[at : at + count].astype(self.dtype, copy=False))
                self.num_tokens += count
                at += count

    def position(self) -> dict[str, Any]:
        """Make everything durable, and return the state as JSON values. Call it only between documents."""
        if self._due != self.num_tokens:
            raise ValueError(
                f"the documents have {self._due} tokens, but {self.num_tokens} were written"
            )
        with storing(self.folder):
            for file in (self._starts, self._tokens, self._learned):
                if file is not None:
                    file.sync()
        return {
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "max_id": self.max_id,
            "shards": [asdict(shard) for shard in self._shards],
            "learned": self._learned is not None,
        }

    def finish(self, **facts: Any) -> ShardIndex:
        """Close the files, and write the index with additional ``facts`` (fields of ``ShardIndex``)."""
        self.position()
        with storing(self.folder):
            self._close_shard(self.num_documents)
            index = ShardIndex(
                dtype=dtype_for(self.vocab_size),
                vocab_size=self.vocab_size,
                max_id=self.max_id,
                num_tokens=self.num_tokens,
                num_documents=self.num_documents,
                shards=tuple(self._shards),
                starts=self._starts.close(),
                created_by=f"shardtrain {__version__}",
                **facts,
            )
            atomic_io.write(self.folder / INDEX, index.to_json(), durable=True)
        return index

    def close(self) -> None:
        """Close the files without writing an index. Another writer can continue from the last position."""
        for file in (self._starts, self._tokens, self._learned):
            if file is not None:
                file.abandon()

    def _open(self, name: Any, keep_bytes: int = 0) -> _GrowingFile:
        return _GrowingFile(self.folder / name(len(self._shards)), keep_bytes)

    def _write_mask(self, learned: Mask | None, count: int) -> None:
        """Write the mask of the next ``count`` tokens.

        A shard gets a mask file only when the first token that is not learned is written. The file then also
        covers all earlier tokens of the shard.
        """
        if self._learned is None:
            if learned is None or learned.all():
                return
            self._learned = self._open(learned_name)
            # All earlier tokens of the shard are learned.
            for start in range(0, self._in_shard, _BLOCK_BYTES):
                size = min(_BLOCK_BYTES, self._in_shard - start)
                self._learned.write(np.ones(size, dtype=np.uint8))
        mask = np.ones(count, np.uint8) if learned is None else learned.astype(np.uint8)
        self._learned.write(mask)

    def _close_shard(self, documents_begun: int) -> None:
        """Close and record the current shard.

        ``documents_begun`` is the number of documents, in all shards,
        that begin before the end of this shard.
        """
        learned = None if self._learned is None else self._learned.close()
        num_documents = documents_begun - self._documents_before
        self._shards.append(
            StoredShard(self._in_shard, num_documents, self._tokens.close(), learned)
        )
        self._learned = None
        self._before = self.num_tokens
        self._documents_before = documents_begun


class _GrowingFile:
    """A file for appending that also computes the SHA-256 of its complete content."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self.path = path
        self.bytes = keep_bytes
        # The state of a hash cannot be saved, so read the existing part of the file again.
        self._digest = hashlib.sha256()
        remaining = keep_bytes
        if keep_bytes:
            with suppress(FileNotFoundError), self.path.open("rb") as file:
                while remaining and (content := file.read(min(remaining, _BLOCK_BYTES))):
                    self._digest.update(content)
                    remaining -= len(content)
        if remaining:
            raise DataError(
                f"{self.path} was truncated and cannot be continued; remove the folder and prepare again"
            )
        mode = "r+b" if keep_bytes else "wb"
        self._file = open(path, mode, buffering=2**20, opener=atomic_io.open_file)  # noqa: SIM115
        self._file.truncate(keep_bytes)
        self._file.seek(keep_bytes)

    def write(self, values: npt.NDArray[Any]) -> None:
        content = np.ascontiguousarray(values).data.cast("B") if len(values) else b""
        self._file.write(content)
        self._digest.update(content)
        self.bytes += len(content)

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> ShardFile:
        self.sync()
        self._file.close()
        return ShardFile(
            self.path.name, self.bytes, self._digest.hexdigest(), ends_sha256(self.path)
        )

    def abandon(self) -> None:
        try:
            self._file.close()
        # The disk is full, which the failed write has already reported.
        # The second call has nothing left to write.
        except OSError:
            self._file.close()


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Context manager that converts an OSError to StorageError."""
    with storage_errors.writing(
        folder,
        "name another --output; the command continues where it stopped when it is repeated",
    ):
        yield


def beyond_vocabulary(token: int, vocab_size: int) -> ConfigError:
    """Return the error for a tokenizer that returns an id outside its vocabulary."""
    return ConfigError(
        f"the tokenizer returns the id {token}, outside its vocabulary of {vocab_size}; correct its added tokens"
    )


def _shard(table: Mapping[str, Any]) -> StoredShard:
    tokens = ShardFile(**table["tokens"])
    learned = None
    if table["learned"] is not None:
        learned = ShardFile(**table["learned"])
    return StoredShard(table["num_tokens"], table["num_documents"], tokens, learned)
