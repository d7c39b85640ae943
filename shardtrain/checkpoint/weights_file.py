"""The weights of a checkpoint as one safetensors file, a format that other programs open; streamed, without torch."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from shardtrain.checkpoint import files, manifest
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX, Manifest, StoredTensor
from shardtrain.checkpoint.safetensors_header import header
from shardtrain.checkpoint.storage import Place
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.utils.errors import CheckpointError


def write(checkpoint: Place, output: Path) -> int:
    """Write all weights, whole and verified, under the model's own names; gives their number.

    Raises:
        CheckpointError: when the checkpoint is damaged.
        OSError: when ``output`` exists or cannot be written.
    """
    stored = manifest.read(checkpoint)
    for file in stored.files:
        damage = files.find_damage(checkpoint, file)
        if damage:
            raise CheckpointError(f"checkpoint {checkpoint}: {damage}; use another one")
    weights = {name: tensor for name, tensor in stored.tensors.items() if name.startswith(WEIGHTS_PREFIX)}
    kinds = {name.removeprefix(WEIGHTS_PREFIX): (tensor.dtype, tensor.shape) for name, tensor in weights.items()}

    def blocks() -> Iterator[memoryview]:
        yield header(kinds)
        for tensor in weights.values():
            yield memoryview(whole_bytes(stored, checkpoint, tensor))

    if os.path.lexists(output):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(output))
    # The name is unpredictable: nobody can plant a link there, and no file of the user has it.
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        files.write_hashed(temporary, blocks())
        # Link instead of rename, which would replace a file that was created in the meantime.
        os.link(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    files.sync_folder(output.parent)
    return len(weights)


def whole_bytes(stored: Manifest, checkpoint: Place, tensor: StoredTensor) -> bytearray:
    """The bytes of a whole tensor, row after row, put together from its pieces."""
    item = ITEM_BYTES[tensor.dtype]
    whole = bytearray(math.prod(tensor.shape) * item)
    for chunk in tensor.chunks():
        with contextlib.closing(files.open_stored(checkpoint / stored.files[chunk.file].name)) as reader:
            # The last dimensions that a piece holds whole are one run of bytes in both.
            dims = len(tensor.shape)
            while dims and chunk.sizes[dims - 1] == tensor.shape[dims - 1]:
                dims -= 1
            run_dims = max(dims - 1, 0)
            run_bytes = math.prod(chunk.sizes[run_dims:]) * item
            for number in range(math.prod(chunk.sizes[:run_dims])):
                start = _place(number, chunk.offsets, chunk.sizes, tensor.shape, run_dims) * item
                into = memoryview(whole)[start : start + run_bytes]
                if reader.read_into(into, chunk.begin + number * run_bytes) != run_bytes:
                    raise CheckpointError(f"checkpoint {checkpoint}: a file became shorter while it was read")
    return whole


def _place(number: int, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...], run_dims: int) -> int:
    """Element of the whole tensor at which the ``number``-th run of a piece begins."""
    at = list(offsets)
    for dim in reversed(range(run_dims)):
        number, inside = divmod(number, sizes[dim])
        at[dim] += inside
    place = 0
    for coordinate, size in zip(at, shape, strict=True):
        place = place * size + coordinate
    return place
