"""Compressed text that grows, never ends or needs a large window is read or refused within the limits.

Each format of ``facts.file_kinds.COMPRESSIONS`` meets each kind of bomb that it can express.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from measured import open_measured
from tiers import cases
from tiny import tiny_config

from shardtrain.data import build_dataset, sandbox
from shardtrain.facts.file_kinds import COMPRESSIONS
from shardtrain.utils.errors import DataError

MIB = 2**20
MAX_GROWTH_BYTES = 300 * MIB
"""A compressed file ends after 64 MiB without a row, and a block of it may have 32 MiB."""
MAX_SECONDS = 40
"""data.artefact_seconds is 30."""
ROW = b'{"text": "hello"}\n'
SKIPPABLE = b"\x50\x2a\x4d\x18"

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
    "zst": zstandard.compress,
}


def one_row(pack: Callable[[bytes], bytes]) -> bytes:
    """Return a row of 4 GiB, in parts of 16 MiB."""
    return pack(ROW + b'{"text": "') + pack(b"a" * 16 * MIB) * 256


def blank_lines(pack: Callable[[bytes], bytes]) -> bytes:
    return pack(ROW) + pack(b"\n" * 16 * MIB) * 256


def empty_parts(pack: Callable[[bytes], bytes]) -> bytes:
    return pack(ROW) + pack(b"") * 100_000 + pack(ROW)


def many_parts(pack: Callable[[bytes], bytes]) -> bytes:
    return pack(ROW) * 1000


def truncated(pack: Callable[[bytes], bytes]) -> bytes:
    return pack(ROW) + pack(ROW * 100)[:-10]


def damaged(pack: Callable[[bytes], bytes]) -> bytes:
    return pack(ROW) + b"x" * 1000


KINDS: dict[str, tuple[Callable[[Callable[[bytes], bytes]], bytes], int, str]] = {
    "one row": (one_row, 1, "contains more than 64.00 MiB without the end of a row"),
    "blank lines": (blank_lines, 1, "contains more than 64.00 MiB without the end of a row"),
    "empty parts": (empty_parts, 2, ""),
    "many parts": (many_parts, 1000, ""),
    "truncated": (truncated, 1, "the file ends in the middle of its compressed data"),
    "damaged": (damaged, 1, "the compressed data is damaged"),
}
"""Each kind with the number of its good rows, and the reason at its end. An empty reason means no bad row."""
TABLE = [(ending, kind) for ending in PACK for kind in KINDS]
_DEFAULT = [("gz", "blank lines"), ("bz2", "one row"), ("xz", "empty parts"), ("zst", "one row")]


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    yield
    sandbox.set_limits(sandbox.Limits())


def test_table_has_every_format() -> None:
    assert {f".{ending}" for ending in PACK} == set(COMPRESSIONS)


@pytest.mark.parametrize(
    ("ending", "kind"), cases(_DEFAULT, nightly=[case for case in TABLE if case not in _DEFAULT])
)
def test_bomb_ends_within_the_limits(ending: str, kind: str, tmp_path: Path) -> None:
    make, good_rows, reason = KINDS[kind]
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(make(PACK[ending]))
    result = open_measured("jsonl", path)

    assert not result.error
    assert result.rows - result.bad_rows >= good_rows
    assert result.bad_rows == bool(reason)
    assert reason in result.last_bad_row
    assert result.grown_bytes < MAX_GROWTH_BYTES, result
    assert result.seconds < MAX_SECONDS, result


@pytest.mark.parametrize("ending", PACK)
def test_many_rows_hit_the_memory_limit(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl.{ending}"
    rows = b'{"text": "%s"}\n' % (b"ab " * 40_000) * 10
    path.write_bytes(PACK[ending](rows) * 120)
    config = tiny_config(
        training={"dataset": "jsonl", "dataset_path": str(path)},
        data={"artefact_memory_bytes": 2**26},
    )

    with pytest.raises(DataError, match="more than data.artefact_memory_bytes=67108864"):
        build_dataset.open_data(config, config.training, shuffle=True, loop=True)


def zst_window(rows: bytes, window_log: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(rows) + compressor.flush()


def xz_window(rows: bytes, size: int) -> bytes:
    """Return an xz stream that claims another dictionary size: 40 means 4 GiB."""
    data = bytearray(lzma.compress(rows, preset=0, check=lzma.CHECK_NONE))
    header_bytes = (data[12] + 1) * 4
    data[16] = size
    checksum = zlib.crc32(bytes(data[12 : 12 + header_bytes - 4]))
    data[12 + header_bytes - 4 : 12 + header_bytes] = checksum.to_bytes(4, "little")
    return bytes(data)


WINDOWS = {
    "zst": (zst_window(ROW, 31), zst_window(ROW, 29)),
    "xz": (xz_window(ROW, 40), xz_window(ROW, 32)),
}
"""A window that is too large (2 and 4 GiB), and one of 512 MiB (256 MiB for xz)."""


@pytest.mark.parametrize("ending", WINDOWS)
def test_large_window_is_refused(ending: str, tmp_path: Path) -> None:
    large, allowed = WINDOWS[ending]
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(large)
    result = open_measured("jsonl", path)

    assert "half of data.artefact_memory_bytes=1073741824 for its window" in result.error
    assert f"a.jsonl.{ending}" in result.error
    assert "raise it, or compress" in result.error
    assert len(result.error.splitlines()) == 1
    assert result.grown_bytes < 32 * MIB

    path.write_bytes(allowed)
    assert open_measured("jsonl", path).rows == 1


def test_skippable_frames_of_zstandard(tmp_path: Path) -> None:
    """Skippable frames cost bounded time. A frame that extends past the end of the file is an error."""
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes((SKIPPABLE + bytes(4)) * 100_000 + zstandard.compress(ROW))
    result = open_measured("jsonl", path)

    assert result.rows == 1
    assert not result.bad_rows

    path.write_bytes(zstandard.compress(ROW) + SKIPPABLE + b"\xff" * 4 + b"x")
    result = open_measured("jsonl", path)
    assert result.rows == 2
    assert "ends in the middle" in result.last_bad_row


def test_zeros_after_a_stream_of_xz_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(lzma.compress(ROW) + bytes(MIB) + lzma.compress(ROW) + bytes(4))
    result = open_measured("jsonl", path)

    assert result.rows == 2
    assert not result.bad_rows
