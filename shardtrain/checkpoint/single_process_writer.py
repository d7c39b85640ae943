"""Write a checkpoint from a single process, tensor by tensor, with at most one tensor in memory."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain import __version__
from shardtrain.checkpoint import files, manifest
from shardtrain.checkpoint.grids import Grid
from shardtrain.checkpoint.manifest import MANIFEST, Manifest, StoredTensor
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.utils.errors import require_new


def write(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str | Mapping[str, str],
    read: Callable[[str], Tensor],
    facts: Mapping[str, Any],
    beside: Mapping[str, bytes] | None = None,
    step: int = 0,
    with_optimizer: bool = False,
) -> None:
    """Write a checkpoint into a new folder.

    Args:
        folder: must not exist.
        shapes: shape of each tensor, by name.
        dtype: dtype of every tensor, or a mapping from names to dtypes.
        read: loads a tensor by name; called once for each, in the order of names.
        facts: counters and settings stored in the manifest.
        beside: additional files by name, without tensors, listed in the manifest.
        step: training step of the checkpoint.
        with_optimizer: True if the tensors include the optimizer state.

    Raises:
        ConfigError: ``folder`` exists.
        StorageError: it cannot be written. Partial files are removed.
    """
    require_new(folder)
    # Offsets are computed before any tensor is read: one file, in the order of names.
    tensors: dict[str, StoredTensor] = {}
    begin = 0
    dtypes = dict.fromkeys(shapes, dtype) if isinstance(dtype, str) else dtype
    for name, shape in sorted(shapes.items()):
        no_offsets = (0,) * len(shape)
        grid = Grid(no_offsets, shape, file=0, begin=begin)
        tensors[name] = StoredTensor(dtypes[name], shape, (grid,))
        begin += math.prod(shape) * ITEM_BYTES[dtypes[name]]

    def blocks() -> Iterator[memoryview]:
        for name in tensors:
            tensor = read(name).to(getattr(torch, dtypes[name])).contiguous()
            content = tensor.reshape(-1).view(torch.uint8)
            yield memoryview(content.numpy().data)

    # Write to a temporary folder and rename it: readers see a complete checkpoint or none.
    with files.new_folder(folder) as temporary:
        stored = files.write_hashed(temporary / "rank-00000.bin", blocks())
        more = []
        for name, data in (beside or {}).items():
            more.append(files.write_hashed(temporary / name, [memoryview(data)]))
        new_manifest = Manifest(
            step=step,
            world_size=1,
            run=secrets.token_hex(6),
            created_by=f"shardtrain {__version__}, torch {torch.__version__}",
            files=(stored, *more),
            tensors=tensors,
            facts={**facts, "weights_only": not with_optimizer},
        )
        # Parse the manifest before it is published: one that cannot be read must not replace anything.
        text = new_manifest.to_bytes()
        manifest.parse(text, temporary)
        files.write_durable(temporary / MANIFEST, text)
