"""A checkpoint written by one process alone, tensor by tensor: no more of it is in memory than the largest tensor."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain import __version__
from shardtrain.checkpoint import files, manifest
from shardtrain.checkpoint.grids import Grid
from shardtrain.checkpoint.manifest import ITEM_BYTES, MANIFEST, Manifest, StoredTensor
from shardtrain.utils.errors import StorageError, require_new


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
    """Write a checkpoint that holds ``shapes``; ``read`` gives each tensor when it is its turn.

    ``dtype`` is the type of all tensors, or of each by name. ``beside`` are further files by name, which the manifest
    knows and no tensor lies in. ``with_optimizer`` says that its state is among
    the tensors.

    Raises:
        ConfigError: when ``folder`` exists.
        StorageError: when it cannot be written; then nothing is left of it.
    """
    require_new(folder)
    # Where each tensor lies is known before one is read: all in one file, by their names.
    temporary = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(6)}")
    tensors: dict[str, StoredTensor] = {}
    begin = 0
    types = dict.fromkeys(shapes, dtype) if isinstance(dtype, str) else dtype
    for name, shape in sorted(shapes.items()):
        tensors[name] = StoredTensor(types[name], shape, (Grid((0,) * len(shape), shape, 0, begin),))
        begin += torch.Size(shape).numel() * ITEM_BYTES[types[name]]

    def blocks() -> Iterator[memoryview]:
        for name in tensors:
            tensor = read(name).to(getattr(torch, types[name])).contiguous()
            yield memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)

    # Written beside its place and renamed, so that it is there whole or not at all.
    try:
        temporary.mkdir(parents=True)
        stored = files.write_hashed(temporary / "rank-00000.bin", blocks())
        more = [files.write_hashed(temporary / name, [memoryview(data)]) for name, data in (beside or {}).items()]
        whole = Manifest(
            step=step,
            world_size=1,
            run=secrets.token_hex(6),
            created_by=f"shardtrain {__version__}, torch {torch.__version__}",
            files=(stored, *more),
            tensors=tensors,
            facts={**facts, "weights_only": not with_optimizer},
        )
        # What could not be read is not called written.
        text = whole.to_bytes()
        manifest.parse(text, temporary)
        files.write_whole(temporary / MANIFEST, text)
        files.sync_folder(temporary)
        files.rename(temporary, folder)
    except OSError as error:
        raise StorageError(f"cannot write {error.filename}: {error.strerror}; choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
