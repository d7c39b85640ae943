"""Write the weights of a checkpoint as one safetensors file, for other programs.

Streams, and needs no torch.
"""

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
from shardtrain.checkpoint.storage import Place
from shardtrain.checkpoint.written_header import header
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.utils.errors import CheckpointError


def write(checkpoint: Place, output: Path) -> int:
    """Write all weights, unsharded and verified, under the model's names. Return their number.

    Raises:
        CheckpointError: the checkpoint is damaged.
        OSError: ``output`` exists or cannot be written.
    """
    stored = manifest.read(checkpoint)
    for file in stored.files:
        damage = files.find_damage(checkpoint, file)
        if damage:
            raise CheckpointError(f"checkpoint {checkpoint}: {damage}; use another checkpoint")
    weights = {}
    for name, tensor in stored.tensors.items():
        if name.startswith(WEIGHTS_PREFIX):
            weights[name.removeprefix(WEIGHTS_PREFIX)] = tensor

    def blocks() -> Iterator[memoryview]:
        yield header({name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()})
        for tensor in weights.values():
            yield memoryview(whole_bytes(stored, checkpoint, tensor))

    if os.path.lexists(output):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(output))
    # An unpredictable name prevents planted links and collisions with files of the user.
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
    """Return the bytes of a full tensor in row-major order, assembled from its stored pieces."""
    item_bytes = ITEM_BYTES[tensor.dtype]
    data = bytearray(math.prod(tensor.shape) * item_bytes)
    view = memoryview(data)
    for chunk in tensor.chunks():
        # The trailing dimensions that a piece covers completely are contiguous in both.
        dims = len(tensor.shape)
        while dims and chunk.sizes[dims - 1] == tensor.shape[dims - 1]:
            dims -= 1
        run_dims = max(dims - 1, 0)
        run_bytes = math.prod(chunk.sizes[run_dims:]) * item_bytes
        num_runs = math.prod(chunk.sizes[:run_dims])
        path = checkpoint / stored.files[chunk.file].name
        with contextlib.closing(files.open_stored(path)) as reader:
            for number in range(num_runs):
                first = _place(number, chunk.offsets, chunk.sizes, tensor.shape, run_dims)
                start = first * item_bytes
                target = view[start : start + run_bytes]
                num_read = reader.read_into(target, chunk.begin + number * run_bytes)
                if num_read != run_bytes:
                    raise CheckpointError(
                        f"checkpoint {checkpoint}: a file became shorter while it was read"
                    )
    return data


def _place(
    number: int,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
    run_dims: int,
) -> int:
    """Return the index in the full tensor of the first element of a piece's ``number``-th contiguous run."""
    at = list(offsets)
    for dim in reversed(range(run_dims)):
        number, inside = divmod(number, sizes[dim])
        at[dim] += inside
    place = 0
    for coordinate, size in zip(at, shape, strict=True):
        place = place * size + coordinate
    return place
