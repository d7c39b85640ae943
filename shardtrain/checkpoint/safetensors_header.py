"""The beginning of a safetensors file: written by itself, so that the tensors can follow one by one. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardtrain.checkpoint.manifest import ITEM_BYTES

TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
"""What the format calls the types of torch."""


def header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> memoryview:
    """The bytes before those of the tensors, which are (type, shape) by name and follow in the same order."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return memoryview(len(text).to_bytes(8, "little") + text)
