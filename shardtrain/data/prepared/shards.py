"""Prepared shards as a token buffer, which can read any range of tokens from files of any size.

Opening a folder reads only its index and 8 KiB of each file, so 10^9 tokens open in milliseconds. (With
more than 1,000 files, each file is checked when it is first read.) Files of tokens are read by position and
not memory-mapped. A mapped file that shrinks would kill the process without a message,
and it counts as memory of the process.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain.data import shared_opening
from shardtrain.data.file_hashes import FileToHash
from shardtrain.data.packing.token_buffer import Mask, Tokens
from shardtrain.data.prepared import shard_index
from shardtrain.data.prepared.shard_index import (
    DTYPES,
    INDEX,
    STARTS,
    ShardFile,
    ShardIndex,
    check_file,
    read_index,
)
from shardtrain.data.shared_opening import Listing, Witness
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer
from shardtrain.utils import atomic_io, bounded_reads
from shardtrain.utils.errors import ConfigError, Problem

Stamp = tuple[int, int, int]
_MAX_OPEN_FILES = 64
_BLOCK_BYTES = 16 * 2**20


class ShardTokenBuffer:
    """A ``TokenBuffer`` over a folder made by ``shardtrain data prepare``. Forked processes may share one.

    Raises:
        ConfigError: a file is missing, damaged, swapped or changed, when opening or reading. The message
            names it.
    """

    def __init__(self, folder: str | Path, option: str = "training.dataset_path") -> None:
        self.folder = Path(folder)
        self.option = option
        self.index: ShardIndex = read_index(self.folder, option)
        self.num_tokens = self.index.num_tokens
        self.num_documents = self.index.num_documents
        self.has_mask = any(shard.learned is not None for shard in self.index.shards)
        self._dtype = DTYPES[self.index.dtype]
        tokens_of_shards = [shard.num_tokens for shard in self.index.shards]
        self._ends = np.cumsum(tokens_of_shards, dtype=np.int64).tolist()

        # Record size, time and inode of each file now, to detect changes later. If there are more than
        # ``MAX_CHECKED`` files, do this for each file when it is first read.
        files = self.index.files()
        checks_at_first_read = len(files) > shard_index.MAX_CHECKED
        names = []
        check_before_read = None
        if checks_at_first_read:
            check_before_read = self._check_first_read
        else:
            names = [file.name for file in files]
        self._stamps = dict(zip(names, self._stamps_of(names), strict=True))
        self._open = _OpenFiles(self.folder, option, check_before_read)
        self._mapped: npt.NDArray[np.int64] | None = None

        # Compute the fingerprint from the hashes in the index. file_hashes.py checks these during training.
        facts = [self.index.dtype]
        for file in files:
            facts.append(f"{file.name} {file.sha256}")
        text = "\n".join(facts)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    @property
    def files(self) -> Mapping[str, str]:
        """Maps each file to the SHA-256 of its content, from the index."""
        return {file.name: file.sha256 for file in self.index.files()}

    def files_to_hash(self) -> list[FileToHash]:
        """Return the files to hash completely and compare with the index."""
        files_to_hash = []
        for file in self.index.files():
            path = str(self.folder / file.name)
            files_to_hash.append(FileToHash(file.name, path, self.option, file.sha256))
        return files_to_hash

    def tokens(self, start: int, stop: int) -> Tokens:
        self._check_range(start, stop)
        out = np.empty(stop - start, dtype=np.int64)
        itemsize = self._dtype.itemsize
        for number, first, last, at in self._parts(start, stop):
            stored = self.index.shards[number].tokens
            content = self._open.read(stored, first * itemsize, last * itemsize)
            out[at : at + last - first] = np.frombuffer(content, dtype=self._dtype)
        return out

    def learned(self, start: int, stop: int) -> Mask:
        self._check_range(start, stop)
        # Without a mask file, every token is learned.
        out = np.ones(stop - start, dtype=np.bool_)
        for number, first, last, at in self._parts(start, stop):
            stored = self.index.shards[number].learned
            if stored is not None:
                content = self._open.read(stored, first, last)
                mask = np.frombuffer(content, dtype=np.uint8)
                out[at : at + last - first] = mask != 0
        return out

    def starts(self, start: int, stop: int) -> Tokens:
        starts = self.document_starts()
        first, last = np.searchsorted(starts, (start, stop))
        return np.array(starts[first:last], dtype=np.int64)

    def document_starts(self) -> npt.NDArray[np.int64]:
        """Return the starts of all documents, as a memory-mapped file."""
        # Check the size of the file first. If it has shrunk, reading beyond its end would kill the process
        # (SIGBUS).
        stamp = _stamp(self.folder / STARTS)
        if stamp is None or stamp[0] < self.index.starts.bytes:
            raise _changed(self.folder / STARTS, self.option)
        if self._mapped is None:
            self._mapped = self._map_starts()
        return self._mapped

    def check_unchanged(self) -> None:
        for name, stamp in self._stamps.items():
            if _stamp(self.folder / name) != stamp:
                raise _changed(self.folder / name, self.option)

    def _stamps_of(self, names: list[str]) -> list[Stamp | None]:
        """Return size, time and inode of each file, or None if it does not exist.

        One rank reads them for all ranks.
        """

        def look() -> list[Stamp | None]:
            self._map_starts()
            return [_stamp(self.folder / name) for name in names]

        def witnesses(stamps: list[Stamp | None]) -> list[Witness]:
            chosen = []
            for number in shared_opening.spread(len(names)):
                stamp = stamps[number]
                if stamp:
                    chosen.append(Witness(self.option, str(self.folder / names[number]), *stamp))
            return chosen

        # read_index has already compared the index of a node's own copy, so compare no content here.
        received = shared_opening.once(str(self.folder), look, Listing(witnesses))
        # Other ranks receive lists, because JSON has no tuples.
        stamps: list[Stamp | None] = []
        for stamp in received:
            if stamp is None:
                stamps.append(None)
            else:
                size, mtime_ns, inode = stamp
                stamps.append((size, mtime_ns, inode))
        return stamps

    def _map_starts(self) -> npt.NDArray[np.int64]:
        """Memory-map the file of document starts, and check its first and last entry."""
        # An empty file cannot be mapped.
        if not self.num_documents:
            return np.array([], dtype=np.int64)
        mapped = np.memmap(self.folder / STARTS, dtype="<i8", mode="r")
        # Read only the two ends, because reading all starts would delay the run. ``verify`` checks every
        # start.
        if mapped[0] != 0 or mapped[-1] > self.num_tokens:
            raise ConfigError(
                Problem(
                    self.option,
                    str(self.folder / STARTS),
                    rule=f"contains starts of documents outside the {self.num_tokens} tokens",
                    fix='run "shardtrain data prepare" again',
                )
            )
        return np.asarray(mapped)

    def _check_first_read(self, stored: ShardFile) -> None:
        """Check a file against the index before it is read for the first time."""
        if stored.name not in self._stamps:
            check_file(self.folder, stored, self.option)
            self._stamps[stored.name] = _stamp(self.folder / stored.name)

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(f"tokens {start}..{stop} of {self.num_tokens}")

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (number, first, last, offset) for each shard in a range of tokens.

        ``first`` and ``last`` are the range within the shard. It starts at ``offset`` in the result.
        """
        at = start
        while at < stop:
            # bisect_right finds the shard with this token, and skips shards without tokens.
            number = bisect_right(self._ends, at)
            end = self._ends[number]
            base = end - self.index.shards[number].num_tokens
            last = min(stop, end)
            yield number, at - base, last - base, at - start
            at = last


class _OpenFiles:
    """Keeps the most recently used files open.

    Processes may share the descriptors, because files are read by position.
    """

    def __init__(
        self, folder: Path, option: str, look: Callable[[ShardFile], None] | None = None
    ) -> None:
        """Start without open files. ``look`` is called with each file before it is opened."""
        self._folder = folder
        self._option = option
        self._look = look
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def read(self, stored: ShardFile, start: int, stop: int) -> bytearray:
        """Return the bytes start..stop-1 of a file."""
        buffer = bytearray(stop - start)
        view = memoryview(buffer)
        at = 0
        try:
            descriptor = self._descriptor(stored)
            while at < len(buffer):
                count = os.preadv(descriptor, [view[at:]], start + at)
                # Nothing was read, so the file has become shorter than the index says.
                if count == 0:
                    raise _changed(self._folder / stored.name, self._option)
                at += count
        except OSError as error:
            # A storage failure can be retried. Other errors mean that the file has changed.
            path = self._folder / stored.name
            trouble = bounded_reads.trouble(path, error)
            raise trouble or _changed(path, self._option, error.strerror) from error
        return buffer

    def _descriptor(self, stored: ShardFile) -> int:
        name = stored.name
        if name in self._descriptors:
            self._descriptors.move_to_end(name)
            return self._descriptors[name]
        while len(self._descriptors) >= _MAX_OPEN_FILES:
            _, oldest = self._descriptors.popitem(last=False)
            os.close(oldest)
        if self._look is not None:
            self._look(stored)
        descriptor = atomic_io.without_waiting(self._folder / name, os.O_RDONLY)
        self._descriptors[name] = descriptor
        return descriptor

    def __del__(self) -> None:
        while self._descriptors:
            _, descriptor = self._descriptors.popitem()
            os.close(descriptor)


def check_tokenizer(
    buffer: ShardTokenBuffer, tokenizer: Tokenizer, option: str = "model.hf_assets_path"
) -> None:
    """Raise ConfigError unless the tokens were made with this tokenizer.

    The message contains the vocabulary sizes and fingerprints of both tokenizers.
    """
    index = buffer.index
    if index.tokenizer != tokenizer.fingerprint:
        rule = (
            f"has {tokenizer.vocab_size} ids and fingerprint {tokenizer.fingerprint[:12]}, but {buffer.folder} was "
            f'prepared with "{index.tokenizer_name}", which has {index.vocab_size} ids and fingerprint '
            f"{index.tokenizer[:12]}"
        )
        raise ConfigError(
            Problem(
                option,
                None,
                rule=rule,
                fix="use that tokenizer, or prepare the data with this one",
            )
        )
    check_vocabulary(buffer, tokenizer.vocab_size, option)


def check_vocabulary(
    buffer: ShardTokenBuffer, vocab_size: int, option: str = "model.flavor"
) -> None:
    """Raise ConfigError if shards contain ids that are not in the vocabulary of a model or tokenizer."""
    if buffer.index.max_id >= vocab_size:
        rule = (
            f"has a vocabulary of {vocab_size}, but {buffer.folder} contains ids up to "
            f"{buffer.index.max_id} from a vocabulary of {buffer.index.vocab_size}"
        )
        raise ConfigError(
            Problem(
                option,
                None,
                rule=rule,
                fix=(
                    f"use a vocabulary of {buffer.index.max_id + 1} or more, "
                    "or prepare the data with the right tokenizer"
                ),
            )
        )


def verify(buffer: ShardTokenBuffer) -> Iterator[tuple[str, list[str]]]:
    """Read every byte of every file. Yield each file's name and a list of its problems.

    Problems are hashes that differ from the index, ids outside the vocabulary or above the index's maximum,
    document starts that do not ascend, and masks other than 0 or 1.
    """
    index = buffer.index
    token_files = {shard.tokens.name for shard in index.shards}
    for stored in index.files():
        path = buffer.folder / stored.name
        dtype: np.dtype[Any] = np.dtype("u1")
        if stored.name in token_files:
            dtype = DTYPES[index.dtype]
        elif stored.name == STARTS:
            dtype = np.dtype("<i8")
        digest = hashlib.sha256()
        previous = -1
        problems = set[str]()
        try:
            with open(path, "rb", opener=atomic_io.without_waiting) as file:
                while content := file.read(_BLOCK_BYTES):
                    digest.update(content)
                    # A truncated file may end within a number, so use only complete numbers.
                    num_complete = len(content) // dtype.itemsize
                    values = np.frombuffer(content[: num_complete * dtype.itemsize], dtype=dtype)
                    problems |= _wrong_values(stored.name, values, index, previous)
                    if len(values):
                        previous = int(values[-1])
        except OSError as error:
            problems.add(f"cannot be read ({error.strerror})")
        # The hash of a file that could not be read completely is meaningless.
        computed = digest.hexdigest()
        was_read = not any("read" in problem for problem in problems)
        if computed != stored.sha256 and was_read:
            problems.add(
                f"differs from its SHA-256 in {INDEX} ({computed[:12]}, not {stored.sha256[:12]})"
            )
        yield stored.name, [f"{path} {problem}" for problem in sorted(problems)]


def _wrong_values(
    name: str, values: npt.NDArray[Any], index: ShardIndex, previous: int
) -> set[str]:
    """Return the problems with a block of values of a file."""
    if not len(values):
        return set()
    low = int(values.min())
    high = int(values.max())
    if name == STARTS:
        # The first start of a block follows the last start of the previous block.
        continues = low >= max(previous, 0)
        is_ascending = continues and bool((np.diff(values) >= 0).all())
        if is_ascending and high <= index.num_tokens:
            return set()
        return {"has starts of documents that do not ascend"}
    if name.startswith("learned"):
        if high > 1:
            return {f"has a mask of {high}, not 0 or 1"}
        return set()
    if high >= index.vocab_size:
        return {f"has the id {high}, outside the vocabulary of {index.vocab_size}"}
    if low < 0:
        return {f"has the id {low}, outside the vocabulary of {index.vocab_size}"}
    if high > index.max_id:
        return {f"has the id {high}, above the largest id of the index, {index.max_id}"}
    return set()


def _stamp(path: Path) -> Stamp | None:
    """Return the size, time and inode of a file, or None if it does not exist or cannot be read."""
    try:
        facts = path.stat()
    except OSError as error:
        trouble = bounded_reads.trouble(path, error)
        if trouble is not None:
            raise trouble from error
        return None
    return facts.st_size, facts.st_mtime_ns, facts.st_ino


def _changed(path: Path, option: str, reason: str | None = None) -> ConfigError:
    rule = "was changed, moved or removed since the run opened it"
    if reason:
        rule += f" ({reason})"
    fix = "restore the file and continue from the last checkpoint"
    return ConfigError(Problem(option, str(path), rule, fix))
