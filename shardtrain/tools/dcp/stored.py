"""Read a folder of torch.distributed.checkpoint as data, without running its pickles: metadata, tensors and values."""

from __future__ import annotations

import contextlib
import io
import math
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain.checkpoint import torch_file
from shardtrain.checkpoint.manifest import MAX_DIMS, MAX_NAME, MAX_SIZE
from shardtrain.checkpoint.pickled import Made, Name, parse
from shardtrain.checkpoint.resharding import check_tiling
from shardtrain.checkpoint.torch_file import BYTES_PER_STEP, FREE_STEPS, damage
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.utils import atomic_io, bounded_reads
from shardtrain.utils.errors import CheckpointError

METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_TYPES = {f"torch.{name}" for name in ITEM_BYTES}
_UNREAD = {
    "torch.complex32",
    "torch.complex64",
    "torch.complex128",
    "torch.uint16",
    "torch.uint32",
    "torch.uint64",
    "torch.bits8",
    "torch.float8_e4m3fnuz",
    "torch.float8_e5m2fnuz",
    "torch.float8_e8m0fnu",
    "torch.float4_e2m1fn_x2",
    "torch.quint8",
    "torch.qint8",
    "torch.qint32",
}
"""Dtypes of tensors that a folder may contain but that are not read, such as a table of rotary angles."""
_NAMES = {
    *_TYPES,
    *_UNREAD,
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    f"{_DCP}.TensorStorageMetadata",
    f"{_DCP}.BytesStorageMetadata",
    f"{_DCP}.ChunkStorageMetadata",
    f"{_DCP}.Metadata",
    f"{_DCP}.TensorProperties",
    f"{_DCP}._MEM_FORMAT_ENCODING",
    f"{_DCP}.MetadataIndex",
    f"{_DCP}.StorageMeta",
    f"{_FILES}._StorageInfo",
    f"{_FILES}._StoragePrefix",
}
"""Classes and functions that the pickled metadata may name. Metadata with any other name are rejected."""
_FILE = re.compile(r"[A-Za-z0-9_.=-]{1,200}")
_MAX_VALUE = 2**20
"""Largest number of bytes of an item that ``value`` reads."""
_MAX_BYTES = 2**30
"""Largest size of metadata. A larger file is rejected without reading it."""


@dataclass(frozen=True)
class FileRange:
    """Byte range of one item in a file. The item is a file of torch.save."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor: offsets and sizes per dimension, and its place in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: FileRange


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the folder: dtype, full shape, and boxes that cover it exactly once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


Places = dict[tuple[str, tuple[int, ...] | None], FileRange]
"""Place of each item by its name, and its offsets if it is a part of a tensor."""


class DcpFolder:
    """A folder of torch.distributed.checkpoint.

    Attributes:
        tensors: Tensors by their name in the state dict.
        objects: Other items by their name.
        unread: Dtypes of tensors that are not read, by their name.
    """

    def __init__(self, folder: Path) -> None:
        """Read and check the metadata of a folder.

        Raises:
            CheckpointError: metadata is missing or invalid, or a file that it names is missing or too short.
        """
        self.folder = folder
        self._where = f"{folder / METADATA}"
        self.tensors: dict[str, DcpTensor] = {}
        self.objects: dict[str, FileRange] = {}
        self.unread: dict[str, str] = {}
        # A real part needs about 40 steps and a thousand bytes of a file. The work is bounded by the
        # bytes on disk.
        max_steps = FREE_STEPS + _disk_bytes(folder) // BYTES_PER_STEP
        with damage(self._where):
            metadata = parse(self._bytes(), _NAMES, self._where, max_steps=max_steps)
            self._read(metadata)
        self._check_files()

    def _check_files(self) -> None:
        """Raise CheckpointError unless every file that the metadata names exists and is long enough."""
        places = list(self.objects.values())
        for tensor in self.tensors.values():
            places += [chunk.place for chunk in tensor.chunks]
        # Many items share a file. Only the largest end of each file matters.
        ends: dict[str, int] = {}
        for place in places:
            end = place.begin + place.length
            ends[place.file] = max(ends.get(place.file, 0), end)
        for file, end in sorted(ends.items()):
            path = self.folder / file
            if not bounded_reads.is_present(path):
                raise CheckpointError(
                    f"{path} is missing but named in {METADATA}; copy the entire folder"
                )
            try:
                with open(path, "rb", opener=atomic_io.without_waiting) as opened:
                    size = opened.seek(0, io.SEEK_END)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be read ({error.strerror}); copy the entire folder"
                ) from None
            if size < end:
                raise CheckpointError(
                    f"{path} has {size} bytes but needs {end} according to {METADATA}: it is truncated"
                )

    def tensor(self, name: str) -> Tensor:
        """Read a full tensor to the CPU.

        Raises:
            CheckpointError: a part is damaged.
        """
        entry = self.tensors[name]
        # A storage may be larger than its tensor. The limit prevents small metadata from causing
        # huge reads.
        num_bytes = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        most = 2 * num_bytes + 2**20
        for chunk in entry.chunks:
            if chunk.place.length > most:
                raise self._bad(
                    f"has a part of {name} with {chunk.place.length} bytes, at most {most} are possible"
                )
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for chunk in entry.chunks:
            box = []
            for offset, size in zip(chunk.offsets, chunk.sizes, strict=True):
                box.append(slice(offset, offset + size))
            # Errors of the file become a CheckpointError that names the part.
            with damage(self._part(chunk.place, name)):
                part = self._tensor_of(chunk.place, name, entry.dtype, chunk.sizes)
                tensor[tuple(box)] = part
        return tensor

    def value(self, name: str) -> Any:
        """Return a number, text or short tuple of the state dict. None for any other object."""
        place = self.objects[name]
        # Counters of a run are small. A large object is something else, such as the state of a data loader.
        if place.length > _MAX_VALUE:
            return None
        try:
            described, _ = self._open(place, name)
        except CheckpointError:
            # For example the state of a data loader, which is not needed.
            return None
        elements = (described,)
        if isinstance(described, tuple) and len(described) < 100:
            elements = described
        for element in elements:
            if element is not None and not isinstance(element, bool | int | float | str):
                return None
        return described

    def _bytes(self) -> bytes:
        path = self.folder / METADATA
        try:
            if path.stat().st_size > _MAX_BYTES or not path.is_file():
                raise CheckpointError(
                    f"{path} is not a file of less than {_MAX_BYTES} bytes; use another checkpoint"
                )
            return path.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}): a folder that torch.distributed.checkpoint has finished "
                "has this file; name that folder, such as outputs/checkpoint/step-1000"
            ) from None

    def _read(self, metadata: Any) -> None:
        """Fill ``tensors``, ``objects`` and ``unread`` from parsed metadata, which may be malicious."""
        fields = _state(metadata, f"{_DCP}.Metadata", self._where)
        described = _dict(fields.get("state_dict_metadata"), self._where)
        places = self._places(_dict(fields.get("storage_data"), self._where))

        # Objects in a pickle may be shared, so a few bytes can describe many boxes. Their number is
        # therefore limited.
        budget = 10_000_000
        for name, entry in described.items():
            is_text = isinstance(name, str) and name.isprintable()
            if not is_text or not 0 < len(name) <= MAX_NAME:
                raise self._bad("has an invalid name of a tensor")
            if isinstance(entry, Made) and entry.name == Name(_DCP, "BytesStorageMetadata"):
                if (name, None) not in places:
                    raise self._bad(f"does not locate {name}")
                self.objects[name] = places[name, None]
                continue
            budget = self._read_tensor(name, entry, places, budget)

    def _read_tensor(self, name: str, entry: Any, places: Places, budget: int) -> int:
        """Add the tensor that an entry describes. Return how many of the ``budget`` boxes are left."""
        fields = _state(entry, f"{_DCP}.TensorStorageMetadata", self._where)
        dtype = self._dtype(fields.get("properties"))
        shape = _size(fields.get("size"), self._where)
        if dtype not in ITEM_BYTES:
            self.unread[name] = dtype
            return budget
        # ``tensor`` allocates the full shape, so limit it.
        numel = math.prod(shape)
        if numel * ITEM_BYTES[dtype] > MAX_SIZE:
            raise self._bad(f"has a shape of {name} that is too large")
        boxes = fields.get("chunks")
        if not isinstance(boxes, list):
            raise self._bad("has a tensor without a list of its parts")
        if len(boxes) > budget:
            raise self._bad(f"does not locate a part of {name}")
        chunks = self._chunks(name, boxes, places)
        # Gaps would leave elements uninitialized, and overlaps would depend on the order of reading.
        if numel:
            boxes_of_chunks = [(chunk.offsets, chunk.sizes) for chunk in chunks]
            problem = check_tiling(shape, boxes_of_chunks)
            if problem:
                raise self._bad(f"has parts of {name} that {problem}")
        self.tensors[name] = DcpTensor(dtype, shape, tuple(chunks))
        return budget - len(boxes)

    def _places(self, table: dict[Any, Any]) -> Places:
        """Return the place of each item by its name, and for a part of a tensor, its offsets."""
        places: Places = {}
        for index, info in table.items():
            fields = _state(index, f"{_DCP}.MetadataIndex", self._where)
            name = fields.get("fqn")
            if not isinstance(name, str):
                raise self._bad("has an invalid name of a tensor")
            offsets = None
            offset = fields.get("offset")
            if offset is not None:
                offsets = _size(offset, self._where)
            places[name, offsets] = self._place(info)
        return places

    def _dtype(self, properties: Any) -> str:
        """Return the dtype of a tensor's properties.

        PyTorch pickles TensorProperties as a tuple that starts with the dtype. A dict of fields is
        accepted too.
        """
        state = None
        if isinstance(properties, Made):
            state = properties.state
        dtype = None
        if isinstance(state, dict):
            dtype = state.get("dtype")
        elif isinstance(state, tuple):
            dtype = state[0]
        if not isinstance(dtype, Name) or str(dtype) not in _TYPES | _UNREAD:
            raise self._bad("has a tensor without a dtype")
        return dtype.name

    def _chunks(self, name: str, boxes: list[Any], places: Places) -> list[StoredChunk]:
        """Return the boxes of a tensor that are not empty, each with its place."""
        chunks = []
        for box in boxes:
            fields = _state(box, f"{_DCP}.ChunkStorageMetadata", self._where)
            offsets = _size(fields.get("offsets"), self._where)
            sizes = _size(fields.get("sizes"), self._where)
            place = places.get((name, offsets))
            if place is None:
                raise self._bad(f"does not locate a part of {name}")
            # A rank without a part of a tensor may have written an empty one.
            if math.prod(sizes):
                chunks.append(StoredChunk(offsets, sizes, place))
        return chunks

    def _place(self, info: Any) -> FileRange:
        fields = _state(info, f"{_FILES}._StorageInfo", self._where)
        file = fields.get("relative_path")
        begin = fields.get("offset")
        length = fields.get("length")
        # A name with a slash, or one that consists of dots, could be outside the folder.
        if not isinstance(file, str):
            raise self._bad("names a file that is not text, which is not in the same folder")
        if not _FILE.fullmatch(file) or set(file) == {"."}:
            raise self._bad(f"names a file {file[:100]!r}, which is not in the same folder")
        if not _is_count(begin) or not _is_count(length):
            raise self._bad("has an invalid place in a file")
        # A transformation, such as compression, is code of its extension, which is not run here.
        if fields.get("transform_descriptors"):
            raise self._bad("has tensors that an extension of the writer has transformed")
        return FileRange(file, begin, length)  # type: ignore[arg-type]

    def _tensor_of(self, place: FileRange, name: str, dtype: str, sizes: tuple[int, ...]) -> Tensor:
        """Read the tensor of one item, and check it against the metadata."""
        described, read = self._open(place, name)
        where = self._part(place, name)
        if not isinstance(described, Made) or str(described.name) not in torch_file.REBUILD:
            raise CheckpointError(f"{where} contains no tensor; use another checkpoint")
        try:
            stored = torch_file.stored(described)
        except ValueError:
            stored = None
        if stored is None or stored.dtype != dtype or stored.shape != sizes:
            raise CheckpointError(
                f"{where} is another tensor than {METADATA} describes; use another checkpoint"
            )
        data = read(stored.key)
        # A view beyond the end of its storage would read other memory.
        if stored.last_byte > len(data):
            raise CheckpointError(f"{where} is shorter than its tensor; use another checkpoint")
        return stored.of(data)

    def _open(self, place: FileRange, name: str) -> tuple[Any, Callable[[str], bytearray]]:
        """Parse one item. Return its description, and a function that reads one of its storages by key."""
        where = self._part(place, name)
        with damage(where):
            archive = zipfile.ZipFile(_Slice(self.folder / place.file, place))
            described, _ = torch_file.describe(archive, place.length, torch_file.NAMES, where)

        def read(key: str) -> bytearray:
            return torch_file.read_storage(archive, place.length, key, where)

        return described, read

    def _part(self, place: FileRange, name: str) -> str:
        end = place.begin + place.length
        return f"{self.folder / place.file}, bytes {place.begin} to {end}, {name}:"

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._where} {what}; use another checkpoint")


def _disk_bytes(folder: Path) -> int:
    """Return the size on disk of the data files of a folder, without holes of sparse files."""
    num_bytes = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name == METADATA or not path.is_file():
                continue
            status = path.stat()
            # A sparse file occupies less of the disk than its size. Count its blocks, if the system reports
            # them.
            num_blocks = getattr(status, "st_blocks", 2**62)
            num_bytes += min(status.st_size, num_blocks * 512)
    return num_bytes


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


class _Slice(io.RawIOBase):
    """File object for one item in a file, so an item is never read into memory completely."""

    def __init__(self, path: Path, place: FileRange) -> None:
        super().__init__()
        self._file = open(path, "rb", opener=atomic_io.without_waiting)  # noqa: SIM115
        self._begin = place.begin
        self._length = place.length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        start = 0
        if whence == io.SEEK_CUR:
            start = self._at
        elif whence == io.SEEK_END:
            start = self._length
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        # Stop at the end of the item, because the next item follows it in the file.
        num_left = self._length - self._at
        wanted = max(0, min(len(into), num_left))
        self._file.seek(self._begin + self._at)
        num_read = self._file.readinto(memoryview(into)[:wanted])  # type: ignore[attr-defined]
        self._at += num_read
        return num_read

    def close(self) -> None:
        self._file.close()
        super().close()


def _state(value: Any, name: str, where: str) -> Mapping[str, Any]:
    """Return the fields of a pickled dataclass with this name."""
    if not isinstance(value, Made) or str(value.name) != name:
        class_name = name.rpartition(".")[2]
        raise CheckpointError(
            f"{where} has something else instead of a {class_name}; use another checkpoint"
        )
    state = value.state
    # The state of a frozen dataclass with slots is a pair of its dict and its slots.
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = state[1]
    if not isinstance(state, dict):
        return {}
    return state


def _dict(value: Any, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} has no table of tensors; use another checkpoint")
    return value


def _size(value: Any, where: str) -> tuple[int, ...]:
    """Return the numbers of a pickled torch.Size."""
    if not isinstance(value, Made) or str(value.name) != "torch.Size":
        raise CheckpointError(
            f"{where} has something else instead of a shape; use another checkpoint"
        )
    # torch.Size is called with one tuple.
    counts: Any = None
    if len(value.arguments) == 1:
        counts = value.arguments[0]
    is_sequence = isinstance(counts, tuple | list)
    if not is_sequence or len(counts) > MAX_DIMS or not all(map(_is_count, counts)):
        raise CheckpointError(f"{where} has an invalid shape; use another checkpoint")
    return tuple(counts)
