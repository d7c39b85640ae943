"""The manifest of a checkpoint: the location of each tensor's bytes, as JSON that is checked before
it is used.

``manifest.json`` is one JSON object. Its first line contains the SHA-256 of all bytes after that
line. The body has the size and SHA-256 of every file, and the location of every piece of every
tensor. Any changed bit of a checkpoint, including the manifest, is therefore detected. The manifest
contains no paths, and all numbers are checked.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardtrain.checkpoint.grids import Axis, Chunk, Grid, file_numbers
from shardtrain.checkpoint.resharding import Box, check_tiling
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.utils import checked_json, garbage_collection
from shardtrain.utils.errors import CheckpointError
from shardtrain.utils.units import format_bytes

if TYPE_CHECKING:
    from shardtrain.checkpoint.objects import ObjectPath

MANIFEST = "manifest.json"
FORMAT = "shardtrain checkpoint"
VERSION = 2
MAX_BYTES = 2**26
"""Largest manifest that is read. A save of 405B on 16,384 ranks writes 3 MB."""
MEMORY_BYTES = 2**31
"""Memory for parsing a manifest. A piece of 24 characters takes 576 bytes."""

WEIGHTS_PREFIX = "model."
"""Prefix of the names of weights, and of no other tensors."""
AVERAGES_PREFIX = "ema."
"""Prefix of the names of averages of trained weights (``training.ema_decay``)."""

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.bin")
_HEX = re.compile(r"[0-9a-f]{64}")
_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",')
MAX_DIMS = 16
MAX_SIZE = 2**48
"""Bytes of a tensor, and elements of a dimension."""
MAX_NAME = 1000
"""Characters of a tensor's name."""
_MAX_PLACES = 30_000_000
"""Largest number of pieces that are checked for overlaps. It limits the time for a hostile manifest."""


@dataclass(frozen=True)
class TensorFile:
    """A file with the bytes of tensors. ``bytes`` is its size."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor: dtype, unsharded shape, and grids of boxes that cover it exactly once."""

    dtype: str
    shape: tuple[int, ...]
    grids: tuple[Grid, ...]

    def chunks(self) -> Iterator[Chunk]:
        """Yield all boxes. There may be one per rank."""
        for grid in self.grids:
            yield from grid.chunks()

    def overlapping(self, box: Box) -> Iterator[tuple[Chunk, Box]]:
        """Yield each box that overlaps ``box``, with the overlap."""
        for grid in self.grids:
            yield from grid.overlapping(box)


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``.

    Attributes:
        run: ID of the process that saved the checkpoint: the nonce of its lease.
        origin: ID of the run: the lease nonce of its first process. It stays the same when the run
            is resumed. Empty in checkpoints of earlier versions, and in runs that continue from such a
            checkpoint.
        facts: Counters of the run, written by ``resume.py``.
    """

    step: int
    world_size: int
    run: str
    created_by: str
    files: tuple[TensorFile, ...]
    tensors: Mapping[str, StoredTensor]
    facts: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

    @property
    def has_averages(self) -> bool:
        """True if the checkpoint has averages of the trained weights."""
        return any(name.startswith(AVERAGES_PREFIX) for name in self.tensors)

    def with_averages(self, folder: Path | ObjectPath) -> Manifest:
        """Return the manifest with the averages in place of the trained weights, under their names.

        Frozen weights and buffers have no averages and stay.

        Raises:
            CheckpointError: there are no averages. ``folder`` is named in the message.
        """
        if not self.has_averages:
            raise CheckpointError(
                f"checkpoint {folder} has no averages of the weights; remove use_ema, "
                "or train with training.ema_decay"
            )
        tensors = dict(self.tensors)
        for name in self.tensors:
            if name.startswith(AVERAGES_PREFIX):
                trained = WEIGHTS_PREFIX + name.removeprefix(AVERAGES_PREFIX)
                tensors[trained] = tensors.pop(name)
        return replace(self, tensors=tensors)

    @property
    def total_bytes(self) -> int:
        """Total size of all tensor files."""
        return sum(file.bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """Return the content of ``manifest.json``. Raises CheckpointError if it is too large to be
        read again.
        """
        # Write the oldest version that can represent the content: version 1 has no grids of several boxes.
        version = 1
        tensors = {}
        for name, tensor in self.tensors.items():
            grids = [_fields(grid) for grid in tensor.grids]
            tensors[name] = [tensor.dtype, tensor.shape, grids]
            if any(grid.axes for grid in tensor.grids):
                version = 2
        body = {
            "format": FORMAT,
            "version": version,
            "created_by": self.created_by,
            "run": self.run,
            "origin": self.origin,
            "step": self.step,
            "world_size": self.world_size,
            "files": [[file.name, file.bytes, file.sha256] for file in self.files],
            "tensors": tensors,
            "facts": dict(self.facts),
        }
        # The first line replaces the opening brace of the body.
        text = json.dumps(body, allow_nan=False)
        rest = f"\n{text[1:]}\n".encode()
        # The first line needs less than 100 bytes.
        if len(rest) > MAX_BYTES - 100:
            raise CheckpointError(too_large(len(rest)))
        digest = hashlib.sha256(rest).hexdigest().encode()
        return b'{"sha256": "%s",' % digest + rest


def _fields(grid: Grid) -> list[Any]:
    """Return the JSON list that stores a grid. ``_grid`` parses it."""
    fields: list[Any] = [grid.offsets, grid.sizes, grid.file, grid.begin]
    if grid.axes:
        fields.append(grid.axes)
    return fields


def least_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """Return a lower bound of the manifest's size: brackets, commas and one digit per number."""
    num_bytes = 0
    for name, tensor in tensors.items():
        num_bytes += len(name)
        for grid in tensor.grids:
            num_bytes += 10 + 6 * len(grid.sizes)
    return num_bytes


def too_large(num_bytes: int) -> str:
    """Return the message for a manifest of ``num_bytes``, which is too large."""
    return (
        f"a checkpoint of this run would have a {MANIFEST} of {format_bytes(num_bytes)}, "
        f"but the limit is {format_bytes(MAX_BYTES)}; split the tensors into fewer pieces, "
        "for example with a larger parallelism.data_parallel_replicate_degree"
    )


def read(path: Path | ObjectPath) -> Manifest:
    """Read and check the manifest of the checkpoint in the folder ``path``. Raises CheckpointError
    if it is invalid.
    """
    return parse(read_bytes(path), path)


def read_bytes(path: Path | ObjectPath) -> bytes:
    """Read the bytes of a manifest, up to ``MAX_BYTES``. Raises CheckpointError."""
    file = path / MANIFEST
    try:
        if file.stat().st_size > MAX_BYTES or not file.is_file():
            raise CheckpointError(
                f"checkpoint {path}: {MANIFEST} is not a file of less than {MAX_BYTES} bytes",
            )
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}{_why_unreadable(path, error)}") from error


def _why_unreadable(path: Path | ObjectPath, error: OSError) -> str:
    """Return the reason why a manifest cannot be read, and the fix, as the text after the checkpoint's path."""
    way = way_from_dcp(path)
    if way:
        return f": {way}"
    # Folders that users confuse with checkpoints get a message with the right option.
    if isinstance(path, Path):
        if (path / "config.json").is_file():
            return ": it is a Hugging Face folder; to start from its weights, set checkpoint.initial_load_in_hf = true"
        if path.is_symlink() or path.is_file():
            return f" {why_not_one(path)}; use another checkpoint"
        if not path.exists():
            return (
                " does not exist; use an existing checkpoint, such as outputs/checkpoint/step-100"
            )
    reason = error.strerror or str(error)
    return f": {MANIFEST} cannot be read: {reason}; use another checkpoint"


def why_not_one(path: Path) -> str:
    """Return why an entry is not a checkpoint, as the predicate of a sentence (``is not a folder``)."""
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}, which is not a checkpoint"
    if not path.is_dir():
        return "is not a folder"
    way = way_from_dcp(path)
    if way:
        return f"has no {MANIFEST}: {way}"
    return f"has no {MANIFEST}"


def way_from_dcp(path: Path | ObjectPath) -> str:
    """Return how to convert a folder of torch.distributed.checkpoint, which torchtitan writes.

    Return "" for other folders.
    """
    if not isinstance(path, Path) or not (path / ".metadata").is_file():
        return ""
    command = f"shardtrain checkpoint from-dcp {path} NEW"
    return f"it was written by torch.distributed.checkpoint; convert it with `{command}`"


def parse(data: bytes, path: Path | ObjectPath) -> Manifest:
    """Parse and check the bytes of a manifest. Raises CheckpointError with one line that names ``path``."""
    try:
        # Parsing creates millions of lists without cycles, which the collector would traverse again and
        # again.
        with garbage_collection.paused():
            return _parse(data)
    except _Refused as error:
        raise CheckpointError(
            f"checkpoint {path}: {MANIFEST} {error}; use another checkpoint"
        ) from None


class _Refused(Exception):
    pass


def _refuse(reason: str) -> NoReturn:
    raise _Refused(reason)


def _parse(data: bytes) -> Manifest:
    body = _verified_body(data)
    version = _count(body.get("version"), "version")
    if not 1 <= version <= VERSION:
        writer = _text(body.get("created_by"), "created_by")
        _refuse(
            f"has format version {version}, written by {writer}; this program reads up to {VERSION}"
        )

    # A hash protects against damage, not against intent, so check every value.
    file_entries = _list(body.get("files"), "files")
    files = tuple(_file(entry) for entry in file_entries)
    distinct_names = {file.name for file in files}
    if len(distinct_names) != len(files):
        _refuse("names a file twice")
    tensors = {}
    for name, entry in _dict(body.get("tensors"), "tensors").items():
        tensors[name] = _tensor(name, entry, version, len(files))
    _check_places(files, tensors)
    # Readers of the facts check their values. Only the counters must exist, because every resume needs them.
    facts = _dict(body.get("facts"), "facts")
    if not isinstance(facts.get("state"), dict):
        _refuse("has no counters of a run")
    return Manifest(
        step=_count(body.get("step"), "step"),
        world_size=_count(body.get("world_size"), "world_size"),
        run=_text(body.get("run"), "run"),
        created_by=_text(body.get("created_by"), "created_by"),
        files=files,
        tensors=tensors,
        facts=facts,
        origin=_text(body.get("origin", ""), "origin"),
    )


def _verified_body(data: bytes) -> dict[str, Any]:
    """Return the JSON object of a manifest whose hash and format are right."""
    first_line = _FIRST_LINE.match(data)
    if not first_line:
        _refuse("is damaged: its bytes are not those that were written")
    rest = data[first_line.end() :]
    digest = hashlib.sha256(rest).hexdigest()
    if digest.encode() != first_line.group(1):
        _refuse("is damaged: its bytes are not those that were written")
    # A hostile manifest can have a correct hash, so limit the memory of the parser.
    try:
        body = checked_json.parse(data, unique_keys=True, memory_bytes=MEMORY_BYTES)
    except ValueError as error:
        _refuse(f"is not a manifest's JSON: {str(error)[:100]}")
    if body.get("format") != FORMAT:
        _refuse("was not written by shardtrain")
    return body


def _file(entry: Any) -> TensorFile:
    name, size, digest = _list(entry, "files", 3)
    # The pattern allows no slash and no "..", so the file is in the checkpoint's folder.
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        _refuse("names a file that does not belong to a checkpoint")
    if not isinstance(digest, str) or not _HEX.fullmatch(digest):
        _refuse("has an invalid hash")
    return TensorFile(name, _count(size, "files"), digest)


def _tensor(name: str, entry: Any, version: int, num_files: int) -> StoredTensor:
    dtype, shape, grid_entries = _list(entry, "tensors", 3)
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        _refuse("has an invalid tensor name")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _refuse(f"has a dtype of {name} that is not one of {', '.join(ITEM_BYTES)}")
    # A load allocates the tensor, so limit its size.
    full_shape = _counts(shape, name)
    num_bytes = math.prod(full_shape) * ITEM_BYTES[dtype]
    if num_bytes > MAX_SIZE:
        _refuse(f"has a shape of {name} that is too large")
    grids = []
    for grid_entry in _list(grid_entries, name):
        grids.append(_grid(name, grid_entry, version, len(full_shape), num_files))
    problem = check_tiling(full_shape, [grid.box for grid in grids])
    if problem:
        _refuse(f"has pieces of {name} that {problem}")
    return StoredTensor(dtype, full_shape, tuple(grids))


def _grid(name: str, entry: Any, version: int, dims: int, num_files: int) -> Grid:
    fields = _list(entry, name)
    # the fifth field, the axes, exists since version 2
    if len(fields) != 4 and not (len(fields) == 5 and version > 1):
        _refuse(f"has an entry of {name} that is not a list of the right length")
    axes: list[Axis] = []
    if len(fields) == 5:
        for axis_entry in _list(fields[4], name):
            axes.append(_axis(name, axis_entry, dims, num_files))
    offsets, sizes, file, begin = fields[:4]
    grid = Grid(
        offsets=_counts(offsets, name),
        sizes=_counts(sizes, name),
        file=_count(file, name),
        begin=_count(begin, name),
        axes=tuple(axes),
    )
    has_right_dims = len(grid.sizes) == dims and len(axes) <= MAX_DIMS
    # A grid has one box per file. ``count`` is a product of untrusted numbers, and may be huge.
    if not has_right_dims or not 1 <= grid.count <= max(1, num_files):
        _refuse(
            f"has pieces of {name} with a wrong number of dimensions, or more pieces than files"
        )
    return grid


def _axis(name: str, entry: Any, dims: int, num_files: int) -> Axis:
    repeats, dim, step = _list(entry, name, 3)
    # A step may be negative, so it is not checked by ``_count``. In Python, booleans are integers.
    is_int = isinstance(step, int) and not isinstance(step, bool)
    if not is_int or abs(step) > num_files or _count(dim, name) >= dims:
        _refuse(f"has pieces of {name} with an invalid repetition")
    return Axis(_count(repeats, name), dim, step)


def _check_places(files: tuple[TensorFile, ...], tensors: Mapping[str, StoredTensor]) -> None:
    """Check that every piece is inside its file, and that no two pieces share a byte.

    Files that contain boxes of the same grids are of one kind, and only one file of each kind is
    checked. The files of ranks with equal shards of all tensors are of one kind, so this is fast
    for many ranks.
    """
    # The spans (first byte, end, name) that a grid occupies in each of its files, by first file and axes.
    spans: dict[tuple[int, tuple[Axis, ...]], list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        for grid in tensor.grids:
            end = grid.begin + grid.numel * ITEM_BYTES[tensor.dtype]
            span = (grid.begin, end, name)
            spans.setdefault((grid.file, grid.axes), []).append(span)
    num_places = 0
    for _, axes in spans:
        num_places += math.prod(axis.repeats for axis in axes)
    if num_places > _MAX_PLACES:
        _refuse("has pieces that are too many to check")

    # The kind of a file identifies the grids that it contains boxes of. It is the exclusive or of a
    # random number per grid, so an attacker cannot construct two kinds that look equal.
    files_of_grids: list[list[int]] = []
    kinds = [0] * len(files)
    for (first_file, axes), spans_of_grid in spans.items():
        numbers = file_numbers(first_file, axes)
        files_of_grids.append(numbers)
        name = spans_of_grid[0][2]
        last_end = max(end for _, end, _ in spans_of_grid)
        _check_files_of_grid(name, numbers, last_end, files)
        token = secrets.randbits(128)
        for number in numbers:
            kinds[number] ^= token

    # Sort the pieces in a file of each kind by their offset.
    # No piece may begin before the previous piece ends.
    spans_by_kind: dict[int, list[tuple[int, int, str]]] = {}
    num_left = _MAX_PLACES
    for spans_of_grid, numbers in zip(spans.values(), files_of_grids, strict=True):
        kinds_of_grid = {kinds[number] for number in numbers}
        for kind in kinds_of_grid:
            num_left -= len(spans_of_grid)
            if num_left < 0:
                _refuse("has pieces that are too many to check")
            spans_by_kind.setdefault(kind, []).extend(spans_of_grid)
    for spans_of_kind in spans_by_kind.values():
        spans_of_kind.sort()
        for (_, end, _), (begin, _, _) in itertools.pairwise(spans_of_kind):
            if begin < end:
                _refuse("has two pieces that share bytes")


def _check_files_of_grid(
    name: str, numbers: list[int], end: int, files: tuple[TensorFile, ...]
) -> None:
    """Check that the files ``numbers`` exist, are distinct, and have at least ``end`` bytes."""
    # Steps may be negative, so the numbers of files may be negative, too.
    if min(numbers) < 0 or max(numbers) >= len(files):
        _refuse(f"has a piece of {name} outside its file")
    if any(end > files[number].bytes for number in numbers):
        _refuse(f"has a piece of {name} outside its file")
    if len(set(numbers)) != len(numbers):
        _refuse(f"has pieces of {name} that share bytes")


def _dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(f"has {what} that are not a table")
    return value


def _list(value: Any, what: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or (length is not None and len(value) != length):
        _refuse(f"has an entry of {what} that is not a list of the right length")
    return value


def _counts(value: Any, what: str) -> tuple[int, ...]:
    if len(_list(value, what)) > MAX_DIMS:
        _refuse(f"has too many dimensions in {what}")
    for number in value:  # like _count, without a call for each of 100,000 numbers
        if type(number) is not int or not 0 <= number <= MAX_SIZE:
            _refuse(f"has a number in {what} that is not a count")
    return tuple(value)


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
        _refuse(f"has a number in {what} that is not a count")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME or not value.isprintable():
        _refuse(f"has a {what} that is not a short text")
    return value
