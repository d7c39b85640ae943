"""Read files of ``torch.save`` as data: the values described by the pickle, and tensors one at a time.

The file is a zip archive. ``data.pkl`` describes a value whose tensors refer to storages. Each storage is an
uncompressed member. Before PyTorch 1.6, the file consisted of consecutive pickles, followed by the storages.
``pickled.parse`` interprets the pickles and creates no objects of named classes.
"""

from __future__ import annotations

import contextlib
import io
import itertools
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
"""Names that the pickle of a tensor may contain."""
_NAMES = NAMES | {
    *(
        _PARAMETER,
        "torch.Size",
        "torch.device",
        "collections.defaultdict",
        "_codecs.encode",
        "_io.BytesIO",
    ),
    # NumPy scalars, such as metrics. They are accepted and ignored.
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype"),
    *(
        "builtins.dict",
        "builtins.list",
        "builtins.set",
        "__builtin__.dict",
        "__builtin__.list",
        "__builtin__.set",
    ),
}
# A file from before PyTorch 1.6 begins with a pickle of protocol 2, and its first value is this number.
_OLD_BEGINNING = b"\x80\x02"
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_MOST_OLD_PICKLES = 64 * 2**20
"""Largest size of the pickles in a file from before PyTorch 1.6, in bytes."""
_MAX_DEPTH = 60
_MAX_NAMES = 1_000_000
FREE_STEPS = 1_000_000
"""An unpickler may make this many steps for a file of any size."""
BYTES_PER_STEP = 16
"""An unpickler may make one step for each of this many bytes of its file."""
_VIEWS_OF_A_STORAGE = 1024
"""Largest ratio of a storage to a tensor in it. Parts of a split tensor share a large storage."""


class TorchStorage(tuple[str, str]):
    """Name of a storage in its archive, and its dtype. The dtype is "" if the tensor specifies it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensor in the file: dtype, shape, and position of its elements in a storage."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    key: str

    @property
    def last_byte(self) -> int:
        """Number of bytes that the storage must have."""
        if math.prod(self.shape) == 0:
            return 0
        last_element = self.offset
        for size, stride in zip(self.shape, self.strides, strict=True):
            last_element += (size - 1) * stride
        return (last_element + 1) * ITEM_BYTES[self.dtype]

    def of(self, data: bytearray) -> Tensor:
        """Return the tensor as a view of the bytes of its storage."""
        dtype = getattr(torch, self.dtype)
        # ``frombuffer`` refuses an empty buffer.
        if not data:
            return torch.empty(self.shape, dtype=dtype)
        # An untyped storage can have any size, so its last element may be incomplete.
        numel = len(data) // ITEM_BYTES[self.dtype]
        flat = torch.frombuffer(data, dtype=dtype, count=numel)
        return flat.as_strided(self.shape, self.strides, self.offset)


@dataclass(frozen=True, slots=True)
class Other:
    """Other object in the pickle, such as a device. It is never created."""

    name: str


class TorchFile:
    """File of ``torch.save``. ``value`` is the saved value, with a ``Stored`` for each tensor."""

    def __init__(self, path: Path) -> None:
        """Read the description of the file's value without reading tensors. Runs no code of the file.

        Raises:
            CheckpointError: the file cannot be read, is damaged, or contains more than plain values and
                tensors.
        """
        self.path = path
        self._old_places: dict[str, int] = {}
        where = str(path)
        with self._opened() as (file, length), damage(where):
            max_steps = FREE_STEPS + length // BYTES_PER_STEP
            if file.read(2) == _OLD_BEGINNING:
                described, self._sizes, self._old_places = _describe_old(
                    file, length, where, max_steps
                )
            else:
                archive = zipfile.ZipFile(file)
                described, self._sizes = describe(archive, length, _NAMES, where, max_steps)
            self.value = _Plain(self._sizes, where).of(described)

    def tensor(self, stored: Stored) -> Tensor:
        """Return a tensor on the CPU, with separate memory.

        Raises CheckpointError if its bytes are damaged.
        """
        where = str(self.path)
        key = stored.key
        with self._opened() as (file, length), damage(where):
            if key in self._old_places:
                file.seek(self._old_places[key])
                data = bytearray(file.read(self._sizes[key]))
            else:
                archive = zipfile.ZipFile(file)
                data = read_storage(archive, length, key, where)
            # Copy the view. Otherwise a small tensor would keep its entire storage in memory.
            view = stored.of(data)
            return view.clone(memory_format=torch.contiguous_format)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[BinaryIO, int]]:
        try:
            with open(self.path, "rb", opener=atomic_io.without_waiting) as file:
                length = file.seek(0, 2)
                file.seek(0)
                yield file, length
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error.strerror or error}"
            ) from None


class FlatFile:
    """File of one state dict with dotted names, as written by ``dcp_to_torch`` or ``torch.save``.

    Has the interface of ``DcpFolder``.
    """

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises CheckpointError like ``TorchFile``, and if the file does not contain a dict.
        """
        self._file = TorchFile(path)
        self.folder = path
        self.tensors: dict[str, Stored] = {}
        self.objects: dict[str, Any] = {}
        self.unread: dict[str, str] = {}
        if not isinstance(self._file.value, dict):
            raise CheckpointError(f"{path} contains no state dict; use another checkpoint")
        self._add("", self._file.value, _MAX_NAMES)

    def _add(self, start: str, table: Any, budget: int) -> int:
        """Add the values of a nested dict or list under dotted names that begin with ``start``.

        Return how many of the ``budget`` names are left.
        """
        items = table.items() if isinstance(table, dict) else enumerate(table)
        for key, value in items:
            # The file is not trusted. Limit the number and length of names before storing them.
            budget -= 1
            name = f"{start}{key}"
            if budget < 0 or len(name) > MAX_NAME or not name.isprintable():
                raise CheckpointError(
                    f"{self.folder} has more or longer names than a model; use another file",
                )
            # An empty dict or list is stored as a value, because there are no names below it.
            if isinstance(value, dict | list) and value:
                budget = self._add(f"{name}.", value, budget)
                continue
            # The dict {"a": {"b": 1}, "a.b": 2} has two values of the name a.b.
            if name in self.tensors or name in self.objects:
                raise CheckpointError(f"{self.folder} has {name} twice; use another checkpoint")
            if isinstance(value, Stored):
                self.tensors[name] = value
            else:
                self.objects[name] = value
        return budget

    def tensor(self, name: str) -> Tensor:
        """Return one full tensor, on the CPU."""
        return self._file.tensor(self.tensors[name])

    def value(self, name: str) -> Any:
        """Return a number, text, or short tuple of them. None for other values."""
        value = self.objects[name]
        elements = (value,)
        if isinstance(value, tuple) and len(value) < 100:
            elements = value
        for element in elements:
            if element is not None and not isinstance(element, bool | int | float | str):
                return None
        return value


def describe(
    archive: zipfile.ZipFile, length: int, names: Set[str], where: str, max_steps: int = 10_000
) -> tuple[Any, dict[str, int]]:
    """Return the value described by an archive of ``length`` bytes, and the size in bytes of each storage.

    Raises:
        CheckpointError: the archive is invalid. The message begins with ``where``.
    """
    with damage(where):
        top, members = _members(archive, length, where)
        # Older files have no byte order. They are read as little-endian.
        byte_order = f"{top}/byteorder"
        if byte_order in archive.NameToInfo and archive.read(byte_order) != b"little":
            raise CheckpointError(
                f"{where} was written big-endian; convert it on the machine that wrote it"
            )

        pickle = archive.read(f"{top}/data.pkl")
        value = parse(pickle, names, where, _storage, max_steps=max_steps)
        sizes = {key: member.file_size for key, member in members.items()}
        return value, sizes


def _describe_old(
    file: BinaryIO, length: int, where: str, max_steps: int
) -> tuple[Any, dict[str, int], dict[str, int]]:
    """Describe a file from before PyTorch 1.6: the value, and the size and first byte of each storage.

    There is no checksum. Damage is only detected if the sizes are inconsistent.
    """
    types: dict[str, str] = {}

    def storage(persistent_id: Any) -> TorchStorage:
        if not isinstance(persistent_id, tuple) or len(persistent_id) != 6:
            raise ValueError("a storage is invalid")
        # the sixth entry is not None for a view of another storage
        if persistent_id[5] is not None:
            raise ValueError("a storage is invalid")
        described = _storage(persistent_id[:5])
        key, dtype = described
        types[key] = dtype
        return described

    file.seek(0)
    # Five pickles: a magic number, the version, the byte order, the value, and the keys of the storages.
    pickles = io.BytesIO(file.read(_MOST_OLD_PICKLES))
    magic = parse(pickles, NAMES, where)
    version = parse(pickles, NAMES, where)
    system = parse(pickles, NAMES, where)
    if (magic, version) != (_OLD_MAGIC, 1001):
        raise ValueError("it is not in the format of torch.save")
    if system.get("little_endian") is not True:
        raise ValueError("it was not written on a little-endian machine")
    value = parse(pickles, _NAMES, where, storage, max_steps=max_steps)
    keys = parse(pickles, NAMES, where, max_steps=max_steps)

    # The storages follow the pickles, each with its number of elements in eight bytes and then the elements.
    sizes: dict[str, int] = {}
    places: dict[str, int] = {}
    end = pickles.tell()
    for key in keys:
        file.seek(end)
        num_elements = int.from_bytes(file.read(8), "little")
        sizes[key] = num_elements * ITEM_BYTES[types[key]]
        places[key] = end + 8
        end = places[key] + sizes[key]
    if end != length:
        raise ValueError(f"its storages end at byte {end}, but the file has {length} bytes")
    return value, sizes, places


def _storage(persistent_id: Any) -> TorchStorage:
    """Return the storage of a persistent ID. Raises ValueError if the ID is not that of a storage."""
    if not isinstance(persistent_id, tuple) or len(persistent_id) != 5:
        raise ValueError("a storage is invalid")
    mark, kind, key = persistent_id[:3]
    if mark != "storage" or not isinstance(kind, Name) or not isinstance(key, str):
        raise ValueError("a storage is invalid")
    class_name = str(kind)
    if class_name == _UNTYPED:
        return TorchStorage((key, ""))
    if class_name not in _STORAGES:
        raise ValueError("a storage is of no known type")
    return TorchStorage((key, _STORAGES[class_name]))


def read_storage(archive: zipfile.ZipFile, length: int, key: str, where: str) -> bytearray:
    """Return the bytes of one storage after verifying their CRC-32."""
    _, members = _members(archive, length, where)
    return _bytes_of(archive, members[key])


def stored(value: Any) -> Stored:
    """Return the tensor that a pickle describes. Raises ValueError if it does not describe one."""
    # A parameter contains its tensor.
    while isinstance(value, Made) and str(value.name) == _PARAMETER and value.arguments:
        value = value.arguments[0]
    is_rebuilt = isinstance(value, Made) and str(value.name) in REBUILD
    if not is_rebuilt or len(value.arguments) < 4:
        raise ValueError("it holds no tensor")
    storage, offset, shape, strides = value.arguments[:4]
    if isinstance(shape, Made) and str(shape.name) == "torch.Size":
        if len(shape.arguments) != 1:
            raise ValueError("a tensor is invalid")
        shape = shape.arguments[0]
    if not isinstance(storage, TorchStorage):
        raise ValueError("a tensor is invalid")
    key, dtype = storage
    if dtype == "" and len(value.arguments) > 6:
        # An untyped storage has no dtype. The seventh argument of _rebuild_tensor_v3 is the tensor's dtype.
        dtype_name = value.arguments[6]
        if isinstance(dtype_name, Name) and dtype_name.module == "torch":
            dtype = dtype_name.name
    if dtype not in ITEM_BYTES:
        raise ValueError("a tensor is invalid")

    # Check every number, because they decide how much memory is allocated and which bytes are viewed.
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise ValueError("a tensor is invalid")
    if len(shape) != len(strides) or len(shape) > MAX_DIMS:
        raise ValueError("a tensor is invalid")
    for number in (*shape, *strides, offset):
        if type(number) is not int or not 0 <= number <= MAX_SIZE:
            raise ValueError("a tensor is invalid")
    if math.prod(shape) > MAX_SIZE:
        raise ValueError("a tensor is invalid")
    return Stored(dtype, shape, strides, offset, key)


class _Plain:
    """Convert the description in a pickle to plain values.

    Parts may be shared. Reject values that contain themselves.
    """

    def __init__(self, sizes: dict[str, int], where: str) -> None:
        self._sizes = sizes
        self._where = where
        self._done: dict[int, tuple[Any, Any]] = {}
        self._within: set[int] = set()

    def of(self, value: Any) -> Any:
        """Return the plain value of a description. Raises ValueError if it is nested too deeply."""
        if isinstance(value, Name | TorchStorage):
            return Other(str(value))
        if not isinstance(value, Made | dict | list | tuple):
            return value
        # A pickle of a few bytes can describe exponentially many values by sharing. Convert each only once.
        key = id(value)
        if key in self._done:
            _, plain = self._done[key]
            return plain
        if key in self._within or len(self._within) > _MAX_DEPTH:
            raise ValueError("its values are nested too deeply")
        self._within.add(key)
        plain = self._of(value)
        self._within.discard(key)
        # Keep a reference to the value. Otherwise another value may get its id.
        self._done[key] = (value, plain)
        return plain

    def _of(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._key(key): self.of(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.of(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self.of(item) for item in value)
        kind = str(value.name)
        if kind in REBUILD or kind == _PARAMETER:
            tensor = stored(value)
            self._check_storage(tensor)
            return tensor
        if kind in ("collections.OrderedDict", "collections.defaultdict"):
            # The dict is filled after its creation or, as in older Pythons, created from a list of pairs.
            keys_and_values = value.items
            has_pairs = bool(value.arguments) and isinstance(value.arguments[0], list)
            if not keys_and_values and has_pairs:
                pairs = value.arguments[0]
                keys_and_values = list(itertools.chain.from_iterable(pairs))
            keys = [self._key(key) for key in keys_and_values[::2]]
            values = [self.of(item) for item in keys_and_values[1::2]]
            return dict(zip(keys, values, strict=True))
        if kind == "torch.Size" and len(value.arguments) == 1:
            return self.of(value.arguments[0])
        return Other(kind)

    def _check_storage(self, tensor: Stored) -> None:
        """Raise ValueError unless a tensor is within its storage, and the storage is not much larger.

        Reading a tensor reads all of its storage, so a large storage would cost more than the tensor.
        """
        storage_bytes = self._sizes.get(tensor.key)
        if storage_bytes is None:
            raise ValueError(f"the storage {tensor.key[:40]!r} of a tensor is missing")
        if tensor.last_byte > storage_bytes:
            raise ValueError("a tensor is longer than its storage")
        tensor_bytes = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if tensor_bytes > storage_bytes:
            raise ValueError("a tensor repeats its storage (expanded, and not contiguous)")
        if storage_bytes > _VIEWS_OF_A_STORAGE * tensor_bytes + 2**20:
            raise ValueError(
                f"a tensor of {tensor_bytes} bytes has a storage of {storage_bytes} bytes"
            )

    def _key(self, key: Any) -> Any:
        if isinstance(key, str | int):
            return key
        return str(Other("a key"))


def _members(
    archive: zipfile.ZipFile, length: int, where: str
) -> tuple[str, dict[str, zipfile.ZipInfo]]:
    """Return the name of an archive, and its storages."""
    members = archive.infolist()
    tops = set()
    for member in members:
        # A compressed member could expand to any size, so it is rejected before it is read.
        if member.compress_type != zipfile.ZIP_STORED or member.file_size > length:
            raise CheckpointError(
                f"{where} is compressed, which torch.save does not do; use another checkpoint"
            )
        tops.add(member.filename.partition("/")[0])
    if len(tops) != 1:
        raise ValueError("it is not an archive of torch.save")
    (top,) = tops
    start = f"{top}/data/"
    storages = {}
    for member in members:
        if member.filename.startswith(start):
            storages[member.filename.removeprefix(start)] = member
    return top, storages


def _bytes_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytearray:
    data = bytearray(member.file_size)
    with archive.open(member) as file:
        view: memoryview = memoryview(data)
        opened: IO[bytes] = file
        while view:
            count = opened.readinto(view)  # type: ignore[attr-defined]
            # The member is shorter than the archive's directory claims.
            if not count:
                break
            view = view[count:]
        # Reading beyond the last byte of the member verifies the CRC-32.
        opened.read(1)
    return data


@contextlib.contextmanager
def damage(where: str) -> Iterator[None]:
    """Convert errors of the block, which reads untrusted data, to a CheckpointError that begins
    with ``where``.
    """
    try:
        yield
    except zipfile.BadZipFile as error:
        reason = str(error)[:150]
        if "CRC" in reason:
            reason += (
                ", or was written without checksums (torch.serialization.set_crc32_options(False))"
            )
        if "not a zip" in reason:
            reason += (
                ": torch.save did not write it (`shardtrain import` reads files of safetensors)"
            )
        raise CheckpointError(f"{where} is damaged: {reason}; use another checkpoint") from None
    except (
        *(
            ValueError,
            TypeError,
            IndexError,
            KeyError,
            AttributeError,
            ArithmeticError,
            RuntimeError,
            MemoryError,
        ),
        *(EOFError, OSError),
    ) as error:
        reason = " ".join(str(error).split())[:150] or type(error).__name__
        raise CheckpointError(f"{where} is damaged: {reason}; use another checkpoint") from None
