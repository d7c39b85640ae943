"""Weights in fp8 with a scale per block, as DeepSeek-V3 is published (DeepSeek-AI 2024, section 3.3), read as numbers.

Beside ``X.weight`` lies ``X.weight_scale_inv``, one float32 for each block of ``weight_block_size`` rows and columns:
the number is the fp8 one times that of its block. The product is made in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain.errors import CheckpointError, ConfigError
from shardtrain.hub.weights import HubWeights

_SCALE = "_scale_inv"
_KEYS = {"quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert"}


def block_of(config: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Rows and columns of a block, by ``quantization_config`` of a ``config.json``; None where nothing is quantised.

    Raises:
        ConfigError: for any other kind of quantisation.
    """
    said = config.get("quantization_config")
    if said is None:
        return None
    said = said if isinstance(said, dict) else {}
    block, unknown = said.get("weight_block_size"), sorted(map(str, set(said) - _KEYS))
    is_block = isinstance(block, list) and len(block) == 2 and all(type(n) is int and 1 <= n <= 2**20 for n in block)
    if said.get("quant_method") != "fp8" or said.get("fmt", "e4m3") != "e4m3" or not is_block or unknown:
        kind = f"quant_method={said.get('quant_method')!r}, fmt={said.get('fmt')!r}, weight_block_size={block!r}"
        more = f" and {', '.join(unknown)}" if unknown else ""
        raise ConfigError(
            f"{where}: quantization_config with {kind}{more} is not read, only fp8 e4m3 with a weight_block_size; use "
            "the weights before quantisation"
        )
    assert block is not None
    return block[0], block[1]


def open_weights(folder: Path, block: tuple[int, int] | None) -> HubWeights:
    """The weights of a folder, whichever of the two ways they lie there; raises CheckpointError."""
    return HubWeights(folder) if block is None else BlockFp8Weights(folder, block)


class BlockFp8Weights(HubWeights):
    """Weights of which some have scales: those are read as float32, and their scales are no tensors of their own."""

    def __init__(self, folder: Path, block: tuple[int, int]) -> None:
        """Raises CheckpointError as ``HubWeights`` does, and for scales that do not fit."""
        super().__init__(folder)
        self._block = block
        self._scaled = {name for name in super().names() if name + _SCALE in self}
        for name in self._scaled:
            shape = super().shape(name)
            wanted = tuple(-(-size // step) for size, step in zip(shape, block, strict=False))
            kinds = (super().dtype(name), super().dtype(name + _SCALE))
            fits = len(shape) == 2 and super().shape(name + _SCALE) == wanted
            if not fits or kinds != (torch.float8_e4m3fn, torch.float32):
                raise CheckpointError(
                    f"{folder}: {name} {list(shape)} {kinds[0]} with scales {list(super().shape(name + _SCALE))} "
                    f"{kinds[1]} is no fp8 weight with a float32 for each block of {block[0]} x {block[1]}"
                )

    def names(self) -> list[str]:
        """See HubWeights: without the scales of what is there."""
        scales = {name + _SCALE for name in self._scaled}
        return [name for name in super().names() if name not in scales]

    def dtype(self, name: str) -> torch.dtype:
        """See HubWeights: bfloat16 for a quantised one, whose numbers that type was to hold."""
        return torch.bfloat16 if name in self._scaled else super().dtype(name)

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """See HubWeights: float32 for a quantised one."""
        found = super().read(name, box)
        if name not in self._scaled:
            return found
        blocks = [slice(part.start // step, -(-part.stop // step)) for part, step in zip(box, self._block, strict=True)]
        scales = super().read(name + _SCALE, blocks)
        for dim, (part, step) in enumerate(zip(box, self._block, strict=True)):
            begin = part.start - blocks[dim].start * step
            scales = scales.repeat_interleave(step, dim).narrow(dim, begin, part.stop - part.start)
        return found.float() * scales
