"""The beginning of a safetensors file: written by itself, so that the tensors can follow one by one. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardtrain.facts.dtypes import ITEM_BYTES, SAFETENSORS_NAMES


def header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> memoryview:
    """The bytes before those of the tensors, which are (type, shape) by name and follow in the same order."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return memoryview(len(text).to_bytes(8, "little") + text)
