"""Dtypes by PyTorch's names: bytes of an element, names in safetensors files, and which of them models compute in."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

ComputeDtype = Literal["bfloat16", "float16", "float32"]
"""Dtypes in which a model can compute and in which weights can be exported. Error messages suggest the first."""

COMPUTE_DTYPES: tuple[str, ...] = get_args(ComputeDtype)


class _StoredDtype(NamedTuple):
    safetensors_name: str
    item_bytes: int


# dtype in PyTorch -> its name in safetensors, and its size.
_STORED = {
    "float64": _StoredDtype("F64", 8),
    "float32": _StoredDtype("F32", 4),
    "float16": _StoredDtype("F16", 2),
    "bfloat16": _StoredDtype("BF16", 2),
    "float8_e4m3fn": _StoredDtype("F8_E4M3", 1),
    "float8_e5m2": _StoredDtype("F8_E5M2", 1),
    "int64": _StoredDtype("I64", 8),
    "int32": _StoredDtype("I32", 4),
    "int16": _StoredDtype("I16", 2),
    "int8": _StoredDtype("I8", 1),
    "uint8": _StoredDtype("U8", 1),
    "bool": _StoredDtype("BOOL", 1),
}

ITEM_BYTES = {dtype: stored.item_bytes for dtype, stored in _STORED.items()}
"""Bytes of an element of each dtype that a tensor in a checkpoint may have."""

SAFETENSORS_NAMES = {dtype: stored.safetensors_name for dtype, stored in _STORED.items()}
"""Names of the same dtypes in the header of a safetensors file."""
