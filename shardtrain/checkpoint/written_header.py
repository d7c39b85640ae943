"""Create the header of a safetensors file, so a caller can stream the tensors after it. Does not
import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardtrain.facts.dtypes import ITEM_BYTES, SAFETENSORS_NAMES


def header(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> memoryview:
    """Return the bytes of the header. ``tensors`` maps names to (dtype, shape), in the order of
    their bytes.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        fields[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    length = len(text).to_bytes(8, "little")
    return memoryview(length + text)
