"""Which row each document of a prepared dataset goes into, computed once and kept beside the shards.

Fitting documents into rows takes a second per million of them. ``shardtrain data prepare`` does it once and writes
``fit-KIND-SEQ_LEN-LONG.bin``; a run then reads the few bytes of a block of documents when it needs one of its rows.

The file is a header of 4 KiB (a checksum and one line of JSON), a table with a line per block, and the blocks. Each
block has a checksum, and the header has that of the table and the fingerprint of the tokens: a table of other tokens is
not used, a damaged one stops the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from shardtrain.data import shared_opening
from shardtrain.data.packing.packed_rows import Packing
from shardtrain.utils import atomic_io, bounded_reads, checked_json
from shardtrain.utils.errors import ConfigError, Problem

VERSION = 1
_HEADER_BYTES = 4096
_MAX_BLOCKS = 2**24
"""Of 8,192 documents each: 137 * 10^9 documents."""
_BLOCK = np.dtype([("rows_up_to", "<i8"), ("offset", "<i8"), ("bytes", "<u4"), ("checksum", "<u4")])

Order = npt.NDArray[np.uint16 | np.uint32]
NO_ORDER: Order = np.array([], np.uint16)


@dataclass(frozen=True)
class BlockFit:
    """How the pieces of a block of documents become rows.

    order: the pieces in the order of their rows; empty where each has a row of its own.
    ends:  pieces up to the end of each row; empty likewise.
    cut, dropped: documents that lost their end, or that were left out because they are too long.
    single: documents without a target, because they have one token.
    """

    num_rows: int
    num_targets: int
    cut: int
    dropped: int
    single: int
    order: Order
    ends: Order

    def to_bytes(self) -> bytes:
        """Order and ends, one after the other, little-endian."""
        return b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes() for part in (self.order, self.ends))


def table_name(packing: Packing) -> str:
    """File of a packing, within the folder of the shards.

    >>> table_name(Packing(4096, "first_fit"))
    'fit-first_fit-4096-split.bin'
    """
    return f"fit-{packing.kind}-{packing.seq_len}-{packing.long_documents}.bin"


class FitTable:
    """An opened table; ``order_of`` reads one block. Forked processes may share one.

    num_rows, num_targets, cut, dropped, single: of the entire dataset.
    rows_up_to: rows of all blocks before each, and of all, int64 (blocks + 1,).
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], blocks: npt.NDArray[Any], option: str) -> None:
        self._path = path
        self._blocks = blocks
        self._option = option
        self.num_rows = int(facts["num_rows"])
        self.num_targets = int(facts["num_targets"])
        self.cut = int(facts["cut"])
        self.dropped = int(facts["dropped"])
        self.single = int(facts["single"])
        self.rows_up_to = np.concatenate([np.zeros(1, np.int64), blocks["rows_up_to"].astype(np.int64)])
        self._descriptor: int | None = None

    def order_of(self, block: int, num_pieces: int) -> tuple[Order, Order]:
        """``order`` and ``ends`` of a block that has ``num_pieces`` pieces; see ``BlockFit``.

        Raises:
            ConfigError: when the bytes are not those that were written.
        """
        entry = self._blocks[block]
        num_rows = int(self.rows_up_to[block + 1] - self.rows_up_to[block])
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        # Read by position: forked processes share the descriptor. How many numbers there are follows from what is
        # known of the block, and the bytes of each (2 or 4) from that.
        content = os.pread(self._descriptor, int(entry["bytes"]), int(entry["offset"]))
        count = num_pieces + num_rows
        size = len(content) // count if count else 0
        if len(content) != entry["bytes"] or zlib.crc32(content) != entry["checksum"] or size * count != len(content):
            raise damaged(self._path, self._option, f"does not hold the bytes of block {block} that were written")
        if not content:
            return NO_ORDER, NO_ORDER
        numbers = np.frombuffer(content, np.dtype(f"<u{size}"))
        return numbers[:num_pieces], numbers[num_pieces:]

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


def open_table(
    folder: Path, packing: Packing, *, fingerprint: str, num_documents: int, block_documents: int, option: str
) -> FitTable | None:
    """The table of a packing in a folder of shards; None where it has none for these tokens.

    Raises:
        ConfigError: when the file is damaged.
    """
    path = folder / table_name(packing)
    num_blocks = -(-num_documents // block_documents)

    def look() -> dict[str, Any] | None:
        try:
            with open(path, "rb", opener=atomic_io.without_waiting) as file:
                facts = _facts(file, path, option)
                # Of other tokens, or of another version: those that are there now are fitted again.
                if facts["fingerprint"] != fingerprint or facts["block_documents"] != block_documents:
                    return None
                if facts["num_blocks"] != num_blocks or num_blocks > _MAX_BLOCKS:
                    raise damaged(
                        path, option, f"says that it has {facts['num_blocks']} blocks, and there are {num_blocks}"
                    )
                content = file.read(num_blocks * _BLOCK.itemsize)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise bounded_reads.unreadable(option, path, error, "make the file readable, or remove it") from error
        if hashlib.sha256(content).hexdigest() != facts["table_sha256"]:
            raise damaged(path, option, "does not hold the table that was written")
        return {"facts": dict(facts), "blocks": np.frombuffer(content, np.uint8)}

    table = shared_opening.once(str(folder), look)
    return None if table is None else FitTable(path, table["facts"], table["blocks"].view(_BLOCK), option)


def _facts(file: BinaryIO, path: Path, option: str) -> Mapping[str, Any]:
    """The header, whose first 64 characters are the SHA-256 of what follows them."""
    digest = file.read(64)
    text = file.read(_HEADER_BYTES - 64)
    try:
        if digest != hashlib.sha256(text).hexdigest().encode():
            raise ValueError("its checksum differs")
        facts = {"single": 0, **checked_json.parse(text)}  # tables of earlier versions do not count them
        numbers = ("block_documents", "num_blocks", "num_rows", "num_targets", "cut", "dropped", "single")
        whole = all(checked_json.is_count(facts[name]) for name in numbers)
        if facts["format_version"] != VERSION or not whole or not isinstance(facts["table_sha256"], str):
            raise ValueError("another version, or counts that are not whole numbers")
        return {"fingerprint": "", **facts}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, option, f"has no header of this version ({error})") from error


def damaged(path: Path, option: str, rule: str) -> ConfigError:
    """The error of a table that cannot be used; it may be removed at any time."""
    return ConfigError(Problem(option, str(path), rule, 'remove the file, or run "shardtrain data prepare" again'))


class FitTableWriter:
    """Writes a table block by block; it is there whole, or not at all."""

    def __init__(self, folder: Path, packing: Packing, fingerprint: str, block_documents: int, num_blocks: int) -> None:
        self._path = folder / table_name(packing)
        self._packing = packing
        self._fingerprint = fingerprint
        self._block_documents = block_documents
        self._temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        self._blocks = np.zeros(num_blocks, _BLOCK)
        self._next = self._num_targets = self._cut = self._dropped = self._single = 0
        self._file = open(self._temporary, "wb", opener=atomic_io.open_file)  # noqa: SIM115
        self._offset = _HEADER_BYTES + self._blocks.nbytes
        self._file.seek(self._offset)

    def add(self, fits: Iterable[tuple[Mapping[str, int], bytes]]) -> None:
        """The next blocks: counts (num_rows, num_targets, cut, dropped, single) and what ``BlockFit.to_bytes`` gave."""
        for counts, content in fits:
            before = int(self._blocks[self._next - 1]["rows_up_to"]) if self._next else 0
            self._blocks[self._next] = (before + counts["num_rows"], self._offset, len(content), zlib.crc32(content))
            self._file.write(content)
            self._offset += len(content)
            self._num_targets += counts["num_targets"]
            self._cut += counts["cut"]
            self._dropped += counts["dropped"]
            self._single += counts["single"]
            self._next += 1

    def finish(self) -> int:
        """Write header and table, and give the file its name; returns the number of rows."""
        num_rows = int(self._blocks[-1]["rows_up_to"]) if len(self._blocks) else 0
        content = self._blocks.tobytes()
        facts = {
            "format_version": VERSION, "kind": self._packing.kind, "seq_len": self._packing.seq_len,
            "long_documents": self._packing.long_documents, "fingerprint": self._fingerprint,
            "block_documents": self._block_documents, "num_blocks": len(self._blocks), "num_rows": num_rows,
            "num_targets": self._num_targets, "cut": self._cut, "dropped": self._dropped, "single": self._single,
            "table_sha256": hashlib.sha256(content).hexdigest(),
        }  # fmt: skip
        # The name comes last, when all is on disk: a table that was cut short has another one.
        text = json.dumps(facts).encode().ljust(_HEADER_BYTES - 65) + b"\n"
        self._file.seek(0)
        self._file.write(hashlib.sha256(text).hexdigest().encode() + text + content)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)
        return num_rows

    def close(self) -> None:
        """Remove what was not finished."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)
