"""Read the header of a safetensors file: a JSON object with the dtype, shape and place of each tensor.

The safetensors library parses any header of up to 100 MB, which may take gigabytes. ``read`` is called
before the library opens a file.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import os
from pathlib import Path

from shardtrain.utils import atomic_io, checked_json

LENGTH_BYTES = 8
"""Bytes before the header, which contain its length."""
MAX_BYTES = 100 * 10**6
"""Maximum size of a header, as in the safetensors library."""


def read(path: Path) -> bytes:
    """Return the header of a file.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device.
        ValueError: it is truncated, or its header takes more memory than ``LARGE_MEMORY_BYTES``.
    """
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        file_bytes = os.fstat(file.fileno()).st_size
        # A damaged length must not cause a large allocation.
        if length > min(MAX_BYTES, file_bytes - LENGTH_BYTES):
            raise ValueError("its header is cut, or larger than 100 MB")
        header = file.read(length)
    checked_json.check_memory(header, checked_json.LARGE_MEMORY_BYTES)
    return header
