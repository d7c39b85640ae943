"""Weights in fp8 with a scale per block, as DeepSeek-V3 is published (DeepSeek-AI 2024, section 3.3), read as numbers.

Beside ``X.weight`` lies ``X.weight_scale_inv``, one float32 for each block of ``weight_block_size`` rows and columns:
the number is the fp8 one times that of its block. The product is made in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardtrain.hf import layer_files
from shardtrain.hf.config_json import Quantised
from shardtrain.hf.mxfp4 import Mxfp4Weights
from shardtrain.hf.weights import HubWeights
from shardtrain.utils.errors import CheckpointError

_SCALE = "_scale_inv"


def open_weights(folder: Path, block: Quantised, prefix: str = "") -> HubWeights:
    """The weights of a folder, in whichever way they lie there; raises CheckpointError.

    Names may begin with ``prefix``: see ``HubWeights``.
    """
    if layer_files.is_layer_folder(folder):
        return layer_files.LayerWeights(folder)
    if isinstance(block, tuple):
        return BlockFp8Weights(folder, block, prefix)
    return HubWeights(folder, prefix) if block is None else Mxfp4Weights(folder, prefix)


class BlockFp8Weights(HubWeights):
    """Weights of which some have scales: those are read as float32, and their scales are not tensors of their own."""

    def __init__(self, folder: Path, block: tuple[int, int], prefix: str = "") -> None:
        """Raises CheckpointError as ``HubWeights`` does, and for scales that do not fit."""
        super().__init__(folder, prefix)
        self._block = block
        self._scaled = {name for name in super().names() if name + _SCALE in self}
        # The type of the matrices that are not quantised is the one that the model was trained in
        others = [n for n in self.names() if n not in self._scaled and len(super(BlockFp8Weights, self).shape(n)) == 2]
        self._plain = super().dtype(others[0]) if others else torch.bfloat16
        for name in self._scaled:
            shape = super().shape(name)
            wanted = tuple(-(-size // step) for size, step in zip(shape, block, strict=False))
            kinds = (super().dtype(name), super().dtype(name + _SCALE))
            fits = len(shape) == 2 and super().shape(name + _SCALE) == wanted
            if not fits or kinds != (torch.float8_e4m3fn, torch.float32):
                raise CheckpointError(
                    f"{folder}: {name} {list(shape)} {kinds[0]} with scales {list(super().shape(name + _SCALE))} "
                    f"{kinds[1]} is not an fp8 weight with a float32 for each block of {block[0]} x {block[1]}"
                )

    def names(self) -> list[str]:
        """Without the scales of what is there."""
        scales = {name + _SCALE for name in self._scaled}
        return [name for name in super().names() if name not in scales]

    def dtype(self, name: str) -> torch.dtype:
        """For a quantised one that of the other matrices, bfloat16 where there are none."""
        return self._plain if name in self._scaled else super().dtype(name)

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """Float32 for a quantised one."""
        found = super().read(name, box)
        if name not in self._scaled:
            return found
        # The blocks that the box touches, each scale repeated for its rows and columns, and cut to the box
        blocks = [slice(part.start // step, -(-part.stop // step)) for part, step in zip(box, self._block, strict=True)]
        scales = super().read(name + _SCALE, blocks)
        for dim, (part, step) in enumerate(zip(box, self._block, strict=True)):
            begin = part.start - blocks[dim].start * step
            scales = scales.repeat_interleave(step, dim).narrow(dim, begin, part.stop - part.start)
        return found.float() * scales
