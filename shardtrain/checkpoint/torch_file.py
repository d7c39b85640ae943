"""Files of ``torch.save``, read as data: what the pickle in one describes, and its tensors, one by one.

The file is an archive of zip: ``data.pkl`` describes a value whose tensors name storages, and each storage is a member
of the archive, not compressed. Before PyTorch 1.6 it was several pickles in a row, and the bytes of the storages after
them. Pickles are followed by ``pickled.parse``, which makes no object of a name in them.
"""

from __future__ import annotations

import contextlib
import io
import math
import zipfile
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor

from shardtrain.checkpoint.manifest import MAX_DIMS, MAX_NAME, MAX_SIZE
from shardtrain.checkpoint.pickled import Made, Name, parse
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import CheckpointError

_TYPES = {f"torch.{name}" for name in ITEM_BYTES}
_STORAGES = {
    f"torch.{kind}Storage": dtype
    for kind, dtype in {
        "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
        "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    }.items()
}  # fmt: skip
_UNTYPED = "torch.storage.UntypedStorage"
REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER = "torch._utils._rebuild_parameter"
NAMES = frozenset({*_STORAGES, *_TYPES, *REBUILD, _UNTYPED, "collections.OrderedDict"})
"""What a tensor needs."""
_NAMES = NAMES | {
    *(_PARAMETER, "torch.Size", "torch.device", "collections.defaultdict", "_codecs.encode", "_io.BytesIO"),
    # a number of NumPy's, such as a metric, which nothing here needs
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype"),
    *("builtins.dict", "builtins.list", "builtins.set", "__builtin__.dict", "__builtin__.list", "__builtin__.set"),
}
_OLD_BEGINNING = b"\x80\x02"
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_MOST_OLD_PICKLES = 64 * 2**20
"""Bytes before the storages of a file of before PyTorch 1.6."""
_MAX_DEPTH = 60
_MAX_NAMES = 1_000_000
_FREE_STEPS = 1_000_000
_BYTES_PER_STEP = 16
_VIEWS_OF_A_STORAGE = 1024
"""A storage may be so many times larger than a tensor that is a part of it, as the parts of a divided one are."""


class TorchStorage(tuple[str, str]):
    """The name of a storage in its archive, and its type; empty where the tensor says it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the file: its type and shape, and where in which storage its elements lie."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    key: str

    @property
    def last_byte(self) -> int:
        """How long the storage has to be."""
        reach = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return (self.offset + reach + 1) * ITEM_BYTES[self.dtype] if math.prod(self.shape) else 0

    def of(self, data: bytearray) -> Tensor:
        """The tensor in the bytes of its storage, as a view of them."""
        dtype = getattr(torch, self.dtype)
        if not data:
            return torch.empty(self.shape, dtype=dtype)
        flat = torch.frombuffer(data, dtype=dtype, count=len(data) // ITEM_BYTES[self.dtype])
        return flat.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class Other:
    """What else the pickle would make, and nothing here makes: such as a device."""

    name: str


class TorchFile:
    """A file; ``value`` is what was saved: tables, lists and plain values, and a ``Stored`` for each tensor."""

    def __init__(self, path: Path) -> None:
        """Read what a file describes, and none of its tensors.

        Raises:
            CheckpointError: for a file that cannot be read, is damaged, or describes more than plain values and
                tensors; nothing in it has been run.
        """
        self.path = path
        self._old_places: dict[str, int] = {}
        with self._opened() as (file, length), damage(str(path)):
            steps = _FREE_STEPS + length // _BYTES_PER_STEP
            if file.read(2) == _OLD_BEGINNING:
                described, self._sizes, self._old_places = _describe_old(file, length, str(path), steps)
            else:
                described, self._sizes = describe(zipfile.ZipFile(file), length, _NAMES, str(path), steps)
            self.value = _Plain(self._sizes, str(path)).of(described)

    def tensor(self, stored: Stored) -> Tensor:
        """One tensor, on the CPU, with memory of its own; raises CheckpointError where its bytes are damaged."""
        with self._opened() as (file, length), damage(str(self.path)):
            if stored.key in self._old_places:
                file.seek(self._old_places[stored.key])
                data = bytearray(file.read(self._sizes[stored.key]))
            else:
                data = read_storage(zipfile.ZipFile(file), length, stored.key, str(self.path))
            return stored.of(data).clone(memory_format=torch.contiguous_format)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[BinaryIO, int]]:
        try:
            with open(self.path, "rb", opener=atomic_io.without_waiting) as file:
                length = file.seek(0, 2)
                file.seek(0)
                yield file, length
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from None


class FlatFile:
    """A file of one state dict, its tensors by dotted names, such as ``dcp_to_torch`` or ``torch.save`` writes.

    It answers as a ``DcpFolder`` does.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError as ``TorchFile``, and where the file holds no table."""
        self._file = TorchFile(path)
        self.folder = path
        self.tensors: dict[str, Stored] = {}
        self.objects: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        if not isinstance(self._file.value, dict):
            raise CheckpointError(f"{path} holds no table of tensors; use another checkpoint")
        self._add("", self._file.value, _MAX_NAMES)

    def _add(self, start: str, table: Any, budget: int) -> int:
        for key, value in table.items() if isinstance(table, dict) else enumerate(table):
            budget -= 1
            name = f"{start}{key}"
            if budget < 0 or len(name) > MAX_NAME or not name.isprintable():
                raise CheckpointError(f"{self.folder} has more names, or longer ones, than a model; use another one")
            if isinstance(value, dict | list) and value:
                budget = self._add(f"{name}.", value, budget)
            elif name in self.tensors or name in self.objects:
                raise CheckpointError(f"{self.folder} has {name} twice; use another checkpoint")
            elif isinstance(value, Stored):
                self.tensors[name] = value
            else:
                self.objects[name] = value
        return budget

    def tensor(self, name: str) -> Tensor:
        """One tensor, whole, on the CPU."""
        return self._file.tensor(self.tensors[name])

    def value(self, name: str) -> Any:
        """A number, text, or short tuple of them; None for others."""
        value = self.objects[name]
        plain = value if isinstance(value, tuple) and len(value) < 100 else (value,)
        return value if all(one is None or isinstance(one, bool | int | float | str) for one in plain) else None


def describe(
    archive: zipfile.ZipFile, length: int, names: Set[str], where: str, max_steps: int = 10_000
) -> tuple[Any, dict[str, int]]:
    """What the pickle of an archive of ``length`` bytes describes, and the bytes of each of its storages.

    Raises:
        CheckpointError: it begins with ``where``.
    """
    with damage(where):
        top, members = _members(archive, length, where)
        if f"{top}/byteorder" in archive.NameToInfo and archive.read(f"{top}/byteorder") != b"little":
            raise CheckpointError(f"{where} was written big-endian; convert it on the machine that wrote it")

        value = parse(archive.read(f"{top}/data.pkl"), names, where, _storage, max_steps=max_steps)
        return value, {key: member.file_size for key, member in members.items()}


def _describe_old(
    file: BinaryIO, length: int, where: str, max_steps: int
) -> tuple[Any, dict[str, int], dict[str, int]]:
    """Describe a file of before PyTorch 1.6: the value, and of each storage its bytes and its first byte.

    There is no checksum: damage shows only where the sizes do not add up.
    """
    types: dict[str, str] = {}

    def storage(said: Any) -> TorchStorage:
        if not isinstance(said, tuple) or len(said) != 6 or said[5] is not None:
            raise ValueError("a storage is invalid")
        found = _storage(said[:5])
        types[found[0]] = found[1]
        return found

    file.seek(0)
    pickles = io.BytesIO(file.read(_MOST_OLD_PICKLES))
    magic, version, system = (parse(pickles, NAMES, where) for _ in range(3))
    if (magic, version) != (_OLD_MAGIC, 1001):
        raise ValueError("it is not in the format of torch.save")
    if system.get("little_endian") is not True:
        raise ValueError("it was not written on a little-endian machine")
    value = parse(pickles, _NAMES, where, storage, max_steps=max_steps)
    keys = parse(pickles, NAMES, where, max_steps=max_steps)

    # After the pickles each storage: its number of elements in eight bytes, and the elements
    sizes, places = {}, {}
    end = pickles.tell()
    for key in keys:
        file.seek(end)
        sizes[key] = int.from_bytes(file.read(8), "little") * ITEM_BYTES[types[key]]
        places[key] = end + 8
        end = places[key] + sizes[key]
    if end != length:
        raise ValueError(f"its storages end at byte {end}, and it has {length}")
    return value, sizes, places


def _storage(said: Any) -> TorchStorage:
    """The storage of a persistent id; raises ValueError where it is none."""
    if not isinstance(said, tuple) or len(said) != 5:
        raise ValueError("a storage is invalid")
    word, kind, key = said[:3]
    if word != "storage" or not isinstance(kind, Name) or not isinstance(key, str):
        raise ValueError("a storage is invalid")
    if str(kind) not in _STORAGES and str(kind) != _UNTYPED:
        raise ValueError("a storage is of no known type")
    return TorchStorage((key, _STORAGES.get(str(kind), "")))


def read_storage(archive: zipfile.ZipFile, length: int, key: str, where: str) -> bytearray:
    """The bytes of one storage, compared with their CRC-32."""
    return _bytes_of(archive, _members(archive, length, where)[1][key])


def stored(made: Any) -> Stored:
    """The tensor that a pickle would make; raises ValueError where it is none."""
    while isinstance(made, Made) and str(made.name) == _PARAMETER and made.arguments:
        made = made.arguments[0]
    if not isinstance(made, Made) or str(made.name) not in REBUILD or len(made.arguments) < 4:
        raise ValueError("it holds no tensor")
    storage, offset, shape, strides = made.arguments[:4]
    if isinstance(shape, Made) and str(shape.name) == "torch.Size":
        shape = shape.arguments[0] if len(shape.arguments) == 1 else None
    # An untyped storage says no type: the tensor's own is the seventh argument then (_rebuild_tensor_v3).
    key, dtype = storage if isinstance(storage, TorchStorage) else ("", None)
    if dtype == "":
        last = made.arguments[6] if len(made.arguments) > 6 else None
        dtype = last.name if isinstance(last, Name) and last.module == "torch" else ""
    tables = isinstance(shape, tuple) and isinstance(strides, tuple)
    counts = [*shape, *strides, offset] if tables else [-1]
    if dtype not in ITEM_BYTES or not all(type(n) is int and 0 <= n <= MAX_SIZE for n in counts):
        raise ValueError("a tensor is invalid")
    if len(shape) != len(strides) or len(shape) > MAX_DIMS or math.prod(shape) > MAX_SIZE:
        raise ValueError("a tensor is invalid")
    return Stored(str(dtype), shape, strides, offset, key)


class _Plain:
    """From what a pickle describes to plain values; parts may be shared, and a part of itself is refused."""

    def __init__(self, sizes: dict[str, int], where: str) -> None:
        self._sizes = sizes
        self._where = where
        self._done: dict[int, tuple[Any, Any]] = {}
        self._within: set[int] = set()

    def of(self, value: Any) -> Any:
        if not isinstance(value, Made | dict | list | tuple) or isinstance(value, TorchStorage):
            return Other(str(value)) if isinstance(value, Name | TorchStorage) else value
        if id(value) in self._done:
            return self._done[id(value)][1]
        if id(value) in self._within or len(self._within) > _MAX_DEPTH:
            raise ValueError("its values are nested too deeply")
        self._within.add(id(value))
        plain = self._of(value)
        self._within.discard(id(value))
        # With the value itself, which would else be freed, and its id be that of another.
        self._done[id(value)] = (value, plain)
        return plain

    def _of(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._key(key): self.of(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.of(one) for one in value]
        if isinstance(value, tuple):
            return tuple(self.of(one) for one in value)
        kind = str(value.name)
        # A tensor must lie in its storage, and a storage may not be much larger than what is in it: whoever reads a
        # tensor reads all of it.
        if kind in REBUILD or kind == _PARAMETER:
            tensor = stored(value)
            size = self._sizes.get(tensor.key)
            if size is None:
                raise ValueError(f"the storage {tensor.key[:40]!r} of a tensor is missing")
            if tensor.last_byte > size:
                raise ValueError("a tensor is longer than its storage")
            own = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
            if own > size:
                raise ValueError("a tensor repeats its storage (expanded, and not contiguous)")
            if size > _VIEWS_OF_A_STORAGE * own + 2**20:
                raise ValueError(f"a tensor of {own} bytes lies in a storage of {size}")
            return tensor
        if kind in ("collections.OrderedDict", "collections.defaultdict"):
            # Filled after it was made or, as older Pythons wrote it, made of a list of pairs.
            pairs = value.items
            if not pairs and value.arguments and isinstance(value.arguments[0], list):
                pairs = [one for pair in value.arguments[0] for one in pair]
            return {self._key(k): self.of(v) for k, v in zip(pairs[::2], pairs[1::2], strict=True)}
        if kind == "torch.Size" and len(value.arguments) == 1:
            return self.of(value.arguments[0])
        return Other(kind)

    def _key(self, key: Any) -> Any:
        return key if isinstance(key, str | int) else str(Other("a key"))


def _members(archive: zipfile.ZipFile, length: int, where: str) -> tuple[str, dict[str, zipfile.ZipInfo]]:
    """The name of an archive, and its storages."""
    every = archive.infolist()
    if any(m.compress_type != zipfile.ZIP_STORED or m.file_size > length for m in every):
        raise CheckpointError(f"{where} is compressed, which torch.save does not do; use another checkpoint")
    tops = {m.filename.partition("/")[0] for m in every}
    if len(tops) != 1:
        raise ValueError("it is not an archive of torch.save")
    (top,) = tops
    start = f"{top}/data/"
    return top, {m.filename.removeprefix(start): m for m in every if m.filename.startswith(start)}


def _bytes_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytearray:
    data = bytearray(member.file_size)
    with archive.open(member) as file:
        view: memoryview = memoryview(data)
        opened: IO[bytes] = file
        while view and (count := opened.readinto(view)):  # type: ignore[attr-defined]
            view = view[count:]
        # The CRC-32 is compared when the end of the member is read.
        opened.read(1)
    return data


@contextlib.contextmanager
def damage(where: str) -> Iterator[None]:
    """Whatever goes wrong with what a stranger has written is one line that says where."""
    try:
        yield
    except zipfile.BadZipFile as error:
        reason = str(error)[:150]
        if "CRC" in reason:
            reason += ", or written with torch.serialization.set_crc32_options(False), which leaves nothing to compare"
        if "not a zip" in reason:
            reason += ": no item of torch.save (files of safetensors are read by `shardtrain import`)"
        raise CheckpointError(f"{where} is damaged: {reason}; use another checkpoint") from None
    except (
        *(ValueError, TypeError, IndexError, KeyError, AttributeError, ArithmeticError, RuntimeError, MemoryError),
        *(EOFError, OSError),
    ) as error:
        reason = " ".join(str(error).split())[:150] or type(error).__name__
        raise CheckpointError(f"{where} is damaged: {reason}; use another checkpoint") from None
