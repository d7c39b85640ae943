"""Fit table: which row each document of a prepared dataset belongs to, stored next to the shards.

Fitting documents into rows takes a second per million documents. ``shardtrain data prepare`` does it once and
writes ``fit-KIND-SEQ_LEN-LONG.bin``. When a run needs a row, it reads only the few bytes of the row's block of
documents.

The file consists of a header of 4 KiB (a checksum and one line of JSON), a table with one entry per block, and the
blocks. Each block has a checksum. The header contains the checksum of the table, and the fingerprint of the tokens.
A fit table for other tokens is ignored, and a damaged one stops the run.
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
"""Maximum number of blocks of 8,192 documents: 137 * 10^9 documents."""
_BLOCK = np.dtype([("rows_up_to", "<i8"), ("offset", "<i8"), ("bytes", "<u4"), ("checksum", "<u4")])

Order = npt.NDArray[np.uint16 | np.uint32]
NO_ORDER: Order = np.array([], np.uint16)


@dataclass(frozen=True)
class BlockFit:
    """How the pieces of a block of documents are fitted into rows. (A long document has several pieces.)

    Attributes:
        num_rows: number of rows.
        num_targets: number of targets.
        cut: number of documents that are truncated because they are too long.
        dropped: number of documents that are skipped because they are too long.
        single: number of documents without a target, because they have only one token.
        order: the pieces, in the order of their rows. Empty if each row has one piece.
        ends: for each row, the number of pieces up to its end. Empty if each row has one piece.
    """

    num_rows: int
    num_targets: int
    cut: int
    dropped: int
    single: int
    order: Order
    ends: Order

    def to_bytes(self) -> bytes:
        """Return the bytes of ``order`` and ``ends``, little-endian."""
        content = b""
        for part in (self.order, self.ends):
            little_endian = part.dtype.newbyteorder("<")
            content += part.astype(little_endian).tobytes()
        return content


def table_name(packing: Packing) -> str:
    """Return the file name of a packing's table, in the folder of the shards.

    >>> table_name(Packing(4096, "first_fit"))
    'fit-first_fit-4096-split.bin'
    """
    return f"fit-{packing.kind}-{packing.seq_len}-{packing.long_documents}.bin"


class FitTable:
    """An open fit table. ``order_of`` reads one block. Forked processes may share the table.

    Attributes:
        num_rows, num_targets, cut, dropped, single: totals over the dataset, see ``BlockFit``.
        rows_up_to: number of rows before each block, and the total number of rows. int64 (blocks + 1,).
    """

    def __init__(
        self, path: Path, facts: Mapping[str, Any], blocks: npt.NDArray[Any], option: str
    ) -> None:
        self._path = path
        self._blocks = blocks
        self._option = option
        self.num_rows = int(facts["num_rows"])
        self.num_targets = int(facts["num_targets"])
        self.cut = int(facts["cut"])
        self.dropped = int(facts["dropped"])
        self.single = int(facts["single"])
        self.rows_up_to = np.concatenate(
            [np.zeros(1, np.int64), blocks["rows_up_to"].astype(np.int64)]
        )
        self._descriptor: int | None = None

    def order_of(self, block: int, num_pieces: int) -> tuple[Order, Order]:
        """Return ``order`` and ``ends`` of a block with ``num_pieces`` pieces, see ``BlockFit``.

        Raises:
            ConfigError: the bytes have changed since they were written.
        """
        entry = self._blocks[block]
        num_rows = int(self.rows_up_to[block + 1] - self.rows_up_to[block])
        if self._descriptor is None:
            self._descriptor = atomic_io.without_waiting(self._path, os.O_RDONLY)
        # Use pread, because forked processes share the descriptor and its file position. The number of entries is
        # known, so the size of the content shows whether each has 2 or 4 bytes.
        content = os.pread(self._descriptor, int(entry["bytes"]), int(entry["offset"]))
        count = num_pieces + num_rows
        size = len(content) // count if count else 0
        is_complete = len(content) == entry["bytes"] and size * count == len(content)
        if not is_complete or zlib.crc32(content) != entry["checksum"]:
            rule = f"is damaged in block {block} (the checksum differs)"
            raise damaged(self._path, self._option, rule)
        if not content:
            return NO_ORDER, NO_ORDER
        numbers = np.frombuffer(content, np.dtype(f"<u{size}"))
        return numbers[:num_pieces], numbers[num_pieces:]

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


def open_table(
    folder: Path,
    packing: Packing,
    *,
    fingerprint: str,
    num_documents: int,
    block_documents: int,
    option: str,
) -> FitTable | None:
    """Open the fit table for a packing in a folder of shards. None if there is none for these tokens.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / table_name(packing)
    num_blocks = -(-num_documents // block_documents)

    # One rank reads the file and sends its content to the others.
    def look() -> dict[str, Any] | None:
        try:
            with open(path, "rb", opener=atomic_io.without_waiting) as file:
                facts = _facts(file, path, option)
                # Ignore a table that was written for other tokens. The documents are then fitted again.
                is_of_tokens = facts["fingerprint"] == fingerprint
                if not is_of_tokens or facts["block_documents"] != block_documents:
                    return None
                if facts["num_blocks"] != num_blocks or num_blocks > _MAX_BLOCKS:
                    rule = f"has {facts['num_blocks']} blocks instead of {num_blocks}"
                    raise damaged(path, option, rule)
                content = file.read(num_blocks * _BLOCK.itemsize)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise bounded_reads.unreadable(
                option, path, error, "make the file readable, or remove it"
            ) from error
        if hashlib.sha256(content).hexdigest() != facts["table_sha256"]:
            raise damaged(path, option, "has a damaged table (its checksum differs)")
        return {"facts": dict(facts), "blocks": np.frombuffer(content, np.uint8)}

    table = shared_opening.once(str(folder), look)
    if table is None:
        return None
    return FitTable(path, table["facts"], table["blocks"].view(_BLOCK), option)


def _facts(file: BinaryIO, path: Path, option: str) -> Mapping[str, Any]:
    """Read and check the header. Its first 64 characters are the SHA-256 of the rest."""
    digest = file.read(64)
    text = file.read(_HEADER_BYTES - 64)
    try:
        if digest != hashlib.sha256(text).hexdigest().encode():
            raise ValueError("its checksum differs")
        # Tables of earlier versions do not contain the number of single documents.
        facts = {"single": 0, **checked_json.parse(text)}
        numbers = (
            "block_documents",
            "num_blocks",
            "num_rows",
            "num_targets",
            "cut",
            "dropped",
            "single",
        )
        has_counts = all(checked_json.is_count(facts[name]) for name in numbers)
        if (
            facts["format_version"] != VERSION
            or not has_counts
            or not isinstance(facts["table_sha256"], str)
        ):
            raise ValueError("another version, or invalid counts")
        return {"fingerprint": "", **facts}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, option, f"has no header of this version ({error})") from error


def damaged(path: Path, option: str, rule: str) -> ConfigError:
    """Return the error for a table that cannot be used. Its fix is safe, because a table may be removed anytime."""
    fix = 'remove the file, or run "shardtrain data prepare" again'
    return ConfigError(Problem(option, str(path), rule, fix))


class FitTableWriter:
    """Writes a fit table block by block. The file gets its final name only when it is complete."""

    def __init__(
        self,
        folder: Path,
        packing: Packing,
        fingerprint: str,
        block_documents: int,
        num_blocks: int,
    ) -> None:
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
        """Add the next blocks.

        Each consists of its counts (num_rows, num_targets, cut, dropped, single) and the result of
        ``BlockFit.to_bytes``.
        """
        for counts, content in fits:
            rows_before = 0
            if self._next:
                rows_before = int(self._blocks[self._next - 1]["rows_up_to"])
            rows_up_to = rows_before + counts["num_rows"]
            self._blocks[self._next] = (rows_up_to, self._offset, len(content), zlib.crc32(content))
            self._file.write(content)
            self._offset += len(content)
            self._num_targets += counts["num_targets"]
            self._cut += counts["cut"]
            self._dropped += counts["dropped"]
            self._single += counts["single"]
            self._next += 1

    def finish(self) -> int:
        """Write the header and the table, and rename the file. Return the number of rows."""
        num_rows = int(self._blocks[-1]["rows_up_to"]) if len(self._blocks) else 0
        content = self._blocks.tobytes()
        facts = {
            "format_version": VERSION,
            "kind": self._packing.kind,
            "seq_len": self._packing.seq_len,
            "long_documents": self._packing.long_documents,
            "fingerprint": self._fingerprint,
            "block_documents": self._block_documents,
            "num_blocks": len(self._blocks),
            "num_rows": num_rows,
            "num_targets": self._num_targets,
            "cut": self._cut,
            "dropped": self._dropped,
            "single": self._single,
            "table_sha256": hashlib.sha256(content).hexdigest(),
        }
        # The header is its own hash, 64 characters, followed by the facts and a newline.
        text = json.dumps(facts).encode().ljust(_HEADER_BYTES - 65) + b"\n"
        checksum = hashlib.sha256(text).hexdigest().encode()
        # Rename the file only after everything is on disk, so that an incomplete file never has the final name.
        self._file.seek(0)
        self._file.write(checksum + text + content)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)
        return num_rows

    def close(self) -> None:
        """Remove an unfinished file."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)
