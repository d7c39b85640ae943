"""Memory of parsing JSON files is bounded for each kind of file, and large files of real models are read.

``[],`` has 3 bytes and becomes a Python list of 72 bytes, so the size of a file does not limit its memory.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from measured import grown_in_fork
from tiers import cases

import shardtrain.config.rules  # noqa: F401 - it must be imported before frozen_models
from shardtrain.checkpoint import manifest
from shardtrain.config import frozen_models, machine_rules
from shardtrain.data import sources
from shardtrain.data.prepared.shard_index import read_index
from shardtrain.data.tokenizers.tokenizer_config import read_beside
from shardtrain.hf import listing, weights
from shardtrain.hub_formats.config_json import read_json
from shardtrain.launch.goodput import events
from shardtrain.metrics.sinks.metrics_jsonl import JsonlFile
from shardtrain.tools.runs import run_files
from shardtrain.tools.verify import recordings
from shardtrain.utils import checked_json

MIB = 2**20
SLACK_BYTES = 48 * MIB
"""Modules that a reader imports, and blocks of the check itself."""


def repeated(part: bytes) -> Callable[[int], Iterator[bytes]]:
    """Return a list that repeats one element."""

    def parts(size: int) -> Iterator[bytes]:
        yield b"["
        block = part * (MIB // len(part))
        for _ in range(size // len(block)):
            yield block
        yield b"0]"

    return parts


def one_object(value: bytes) -> Callable[[int], Iterator[bytes]]:
    """Return an object with many short keys."""

    def parts(size: int) -> Iterator[bytes]:
        yield b"{"
        for start in range(0, size // (len(value) + 12), 10_000):
            keys = [b'"%07x":%s,' % (start + number, value) for number in range(10_000)]
            yield b"".join(keys)
        yield b'"":0}'

    return parts


def one_text(start: bytes, part: bytes) -> Callable[[int], Iterator[bytes]]:
    """Return a JSON string with ``start`` and many repetitions of ``part``."""

    def parts(size: int) -> Iterator[bytes]:
        yield b'"' + start
        block = part * (MIB // len(part))
        for _ in range(size // len(block)):
            yield block
        yield b'"'

    return parts


SHAPES: dict[str, Callable[[int], Iterator[bytes]]] = {
    "objects": repeated(b'{"":0},'),
    "lists": repeated(b"[],"),
    "nested lists": repeated(b"[" * 100 + b"]" * 100 + b","),
    "nested objects": repeated(b'{"":' * 100 + b"0" + b"}" * 100 + b","),
    "numbers": repeated(b"999,"),
    "digits": repeated(b"1" * 4000 + b","),
    "texts": repeated(b'"\xf0\x9f\x98\x80",'),
    "keys": one_object(b"0"),
    "keys of lists": one_object(b"[]"),
    "punctuation": one_text(b"", b"[{,:"),
    "escaped quotes": one_text(b"", b'\\"[{,'),
    "long text": one_text(b"", b"a"),
    "wide text": one_text(b"\xf0\x9f\x98\x80", b"a"),
    "wide escapes": one_text(b"\\ud83d\\ude00", b"a"),
    # the last two are not JSON
    "broken text": lambda size: itertools.chain([b'"'], repeated(b"[],")(size)),
    "too deep": lambda size: iter([b"[" * size]),
}


@dataclass(frozen=True)
class Kind:
    """A kind of JSON file.

    Attributes:
        file: name of the file in its folder.
        read: function that opens the folder and reads the file.
        max_file_bytes: maximum size of the file.
        memory_bytes: maximum memory for parsing, in addition to the bytes of the file.
        start: bytes before the hostile JSON value.
        end: bytes after the hostile JSON value.
        prefix: function that returns the first bytes of the file, such as a checksum, from the other bytes.
    """

    file: str
    read: Callable[[Path], object]
    max_file_bytes: int
    memory_bytes: int = checked_json.MEMORY_BYTES
    start: bytes = b'{"a": '
    end: bytes = b"}"
    prefix: Callable[[Path], bytes] | None = None

    def write(self, folder: Path, shape: str, size: int) -> Path:
        """Write a hostile file of about ``size`` bytes."""
        path = folder / self.file
        with path.open("wb") as file:
            file.write(self.start)
            for part in SHAPES[shape](size):
                file.write(part)
            file.write(self.end)
        if self.prefix is not None:
            content = path.read_bytes()
            path.write_bytes(self.prefix(path) + content)
        return path


def header_length(path: Path) -> bytes:
    return path.stat().st_size.to_bytes(8, "little")


def manifest_hash(path: Path) -> bytes:
    return b'{"sha256": "%s",' % hashlib.sha256(path.read_bytes()).hexdigest().encode()


def read_manifest(folder: Path) -> None:
    manifest.parse((folder / manifest.MANIFEST).read_bytes(), folder)


def read_rows(kind: str) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        source = sources.find(kind).open_source(sources.Request(path=str(folder)))
        for _, row in sources.every_row(source):
            assert isinstance(row, sources.BadRow)

    return read


def read_safetensors(folder: Path) -> None:
    weights.HubWeights(folder)


LARGE = checked_json.LARGE_MEMORY_BYTES
KINDS = {
    "config.json": Kind("config.json", lambda f: read_json(f / "config.json"), 256 * MIB),
    "index of weights": Kind(
        weights.INDEX,
        lambda f: weights.read_index(f, weights.SINGLE, weights.INDEX),
        256 * MIB,
        LARGE,
    ),
    "header in a listing": Kind(
        "a.safetensors", lambda f: listing._types_of(f / "a.safetensors"), 95 * MIB, LARGE,
        prefix=header_length,
    ),
    "header of weights": Kind(
        weights.SINGLE, read_safetensors, 95 * MIB, LARGE, prefix=header_length
    ),
    "tokenizer.json": Kind(
        "tokenizer.json", lambda f: machine_rules._count_ids(f / "tokenizer.json"), 256 * MIB, LARGE
    ),
    "tokenizer of a teacher": Kind(
        "tokenizer.json", lambda f: frozen_models._tokens(f / "tokenizer.json"), 256 * MIB, LARGE
    ),
    "tokenizer_config.json": Kind(
        "tokenizer_config.json", lambda f: read_beside(f, "model.tokenizer_path"), 64 * MIB, LARGE
    ),
    "manifest": Kind(
        manifest.MANIFEST, read_manifest, 64 * MIB, manifest.MEMORY_BYTES,
        start=b'\n"a": ', prefix=manifest_hash,
    ),
    "index.json": Kind("index.json", read_index, 256 * MIB, LARGE),
    "events": Kind(events.FILE, events.read, 256 * MIB),
    "metrics.jsonl": Kind(
        "metrics.jsonl", lambda f: JsonlFile(f / "metrics.jsonl", 5), 256 * MIB, 128 * MIB,
        start=b'{"step": 1, "a": ', end=b"}\n",
    ),
    "exit.json": Kind("exit.json", lambda f: run_files.read_object(f / "exit.json"), 256 * MIB, MIB),
    "recording": Kind(
        "rank-0.jsonl", lambda f: list(recordings._lines(f / "rank-0.jsonl")), 255 * MIB, LARGE,
        end=b"}\n",
    ),
    "row": Kind(
        "a.jsonl", read_rows("jsonl"), 15 * MIB, checked_json.ROW_MEMORY_BYTES, end=b"}\n"
    ),
    "array of rows": Kind(
        "a.json", read_rows("jsonl"), 15 * MIB, checked_json.ROW_MEMORY_BYTES,
        start=b'[{"a": ', end=b"}]",
    ),
}  # fmt: skip
FIRST = {
    "config.json": "lists",
    "header in a listing": "objects",
    "header of weights": "objects",
    "row": "lists",
}
"""The shape of each kind in the default tier."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "shape"),
    cases(
        list(FIRST.items()),
        nightly=[case for case in itertools.product(KINDS, SHAPES) if case not in FIRST.items()],
    ),
)
def test_memory_of_a_hostile_file_is_bounded(kind: str, shape: str, tmp_path: Path) -> None:
    form = KINDS[kind]
    # These sizes suffice for most shapes to exceed the limit.
    most_bytes = 24 * MIB if FIRST.get(kind) == shape else 96 * MIB
    size = min(form.max_file_bytes, most_bytes)
    path = form.write(tmp_path, shape, size - MIB)
    grown_bytes, message = grown_in_fork(lambda: form.read(tmp_path), 60)
    file_bytes = path.stat().st_size

    assert grown_bytes < form.memory_bytes + file_bytes + SLACK_BYTES, message
    assert len(message.splitlines()) <= 1


# The counts below exceed those of the largest published models, to leave room for new ones.
def tokenizer(num_tokens: int, num_merges: int) -> Any:
    """A BPE tokenizer like that of Gemma 3, whose file has 33 MB."""
    vocab = {f"\u2581tok\U0001f600{number}": number for number in range(num_tokens)}
    merges = [[f"tok{number}", f"en{number}"] for number in range(num_merges)]
    return {"model": {"vocab": vocab, "merges": merges}, "added_tokens": []}


def index(num_tensors: int, num_files: int) -> Any:
    names = {}
    for number in range(num_tensors):
        name = f"model.layers.{number // 1000}.mlp.experts.{number % 1000}.down_proj.weight"
        names[name] = f"model-{number % num_files:05d}-of-{num_files:05d}.safetensors"
    return {"metadata": {"total_size": 1}, "weight_map": names}


def header(num_tensors: int) -> Any:
    tensor = {"dtype": "BF16", "shape": [7168, 2048], "data_offsets": [10**11, 10**11 + 2**25]}
    return {f"model.layers.{number}.mlp.weight": tensor for number in range(num_tensors)}


def prepared(num_shards: int) -> Any:
    file = {"name": "tokens-00000.bin", "bytes": 2**30, "sha256": "0" * 64, "ends": "0" * 64}
    return {"shards": [{"num_tokens": 2**29, "tokens": file}] * num_shards}


def pieces(num_ranks: int, num_tensors: int) -> Any:
    """A manifest of ``num_ranks`` files, whose tensors have 64 uneven pieces."""
    files = [[f"rank-{rank:05d}.bin", 2**30, "0" * 64] for rank in range(num_ranks)]
    grid = [[0, 0], [16384, 53248], 0, 123456789, [[64, 0, 1]]]
    tensors = {
        f"optimizer.exp_avg.model.layers.{number}.mlp": ["float32", [16384, 53248], [grid] * 64]
        for number in range(num_tensors)
    }
    return {"files": files, "tensors": tensors}


PUBLISHED: dict[str, tuple[Callable[[], Any], int, int]] = {
    "tokenizer": (lambda: tokenizer(262_144, 514_906), LARGE, 30 * 10**6),
    "index": (lambda: index(1_000_000, 1000), LARGE, 10**8),
    "header": (lambda: header(500_000), LARGE, 5 * 10**7),
    "prepared": (lambda: prepared(100_000), LARGE, 2 * 10**7),
    "manifest": (lambda: pieces(16_384, 3_500), manifest.MEMORY_BYTES, 10**7),
    "config": (lambda: {"a": list(range(100_000))}, checked_json.MEMORY_BYTES, 500_000),
}


@pytest.mark.parametrize(
    "name", cases(["config"], nightly=["tokenizer", "index", "header", "prepared", "manifest"])
)
def test_files_larger_than_those_of_published_models_are_read(name: str) -> None:
    build, memory_bytes, min_bytes = PUBLISHED[name]
    value = build()
    data = json.dumps(value).encode()
    assert len(data) > min_bytes
    assert checked_json.parse(data, memory_bytes=memory_bytes) == value


@pytest.mark.parametrize("shape", [*SHAPES][:-2])
def test_estimate_without_strings_is_that_of_the_parsed_text(shape: str) -> None:
    """A regular expression is the reference for the removal of strings in blocks."""
    text = b"".join(SHAPES[shape](MIB))
    expected = re.sub(rb'"(?:[^"\\]|\\.)*"', b'""', text)
    memory_bytes = sum(map(checked_json._memory_of, checked_json._without_strings(text)))
    assert memory_bytes == checked_json._memory_of(expected)


def test_punctuation_inside_strings_does_not_count() -> None:
    value = {"text": '[{,:\\"' * 300_000}
    assert checked_json.parse(json.dumps(value), memory_bytes=2**25) == value


def test_message_names_the_memory_and_the_limit() -> None:
    with pytest.raises(
        checked_json.TooLargeError, match=r"need 2\d\d\.\d+ MiB of memory, more than 256.00 MiB"
    ):
        checked_json.parse(b"[" + b"[]," * 2_000_000 + b"0]")


@pytest.mark.parametrize("data", ["\ufeff{}".encode("utf-16"), '"\u2234[[["'.encode("utf-16-le")])
def test_text_that_is_not_utf8_is_refused(data: bytes) -> None:
    """The estimate of memory searches the bytes for quotes, which requires UTF-8."""
    with pytest.raises(ValueError):
        checked_json.parse(data)
