"""Weights that are quantised in the files of a Hugging Face folder, read as numbers; and opening a folder of any kind.

In fp8 with a scale per block, as DeepSeek-V3 is published (DeepSeek-AI 2024, section 3.3): beside ``X.weight`` lies
``X.weight_scale_inv``, one float32 for each block of ``weight_block_size`` rows and columns, and the number is the fp8
one times that of its block. The product is made in float32.

Experts in MXFP4, as gpt-oss is published (OCP Microscaling Formats specification 1.0, section 5.3): in the place of
``X`` (E, I, O) lie ``X_blocks`` (E, O, I / 32, 16) and ``X_scales`` (E, O, I / 32), bytes: 32 inputs of an output share
a power of two, the scale less 127, and each byte of their block holds two numbers of 4 bits, the first in its low half:
a sign, two bits of exponent and one of fraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardtrain.hf.weights import HubWeights, layer_file_reader
from shardtrain.hub_formats.config_json import Quantised
from shardtrain.utils.errors import CheckpointError

_SCALE = "_scale_inv"
"""After the name of a weight in fp8: that of its scales."""
_BLOCKS = "_blocks"
_SCALES = "_scales"
_SHARED = 32
"""Inputs of MXFP4 that share a scale."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the 4 bits without the sign, which is the highest."""


def open_weights(folder: Path, block: Quantised, prefix: str = "") -> HubWeights:
    """The weights of a folder, in whichever way they lie there; raises CheckpointError.

    Names may begin with ``prefix``: see ``HubWeights``.
    """
    if (reader := layer_file_reader(folder)) is not None:
        layer_weights: HubWeights = reader.LayerWeights(folder)
        return layer_weights
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


class Mxfp4Weights(HubWeights):
    """Weights of which some are in MXFP4: these are read as bfloat16, which holds each of them exactly."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Raises CheckpointError as ``HubWeights`` does, and for blocks and scales that do not fit."""
        super().__init__(folder, prefix)
        there = set(super().names())
        self._packed = {name.removesuffix(_BLOCKS) for name in there if name.endswith(_BLOCKS)}
        for name in self._packed:
            if name + _SCALES not in there or name in there:
                raise CheckpointError(f"{folder}: {name}{_BLOCKS} needs {name}{_SCALES} beside it, and no {name}")
            shapes = super().shape(name + _BLOCKS), super().shape(name + _SCALES)
            kinds = super().dtype(name + _BLOCKS), super().dtype(name + _SCALES)
            fits = len(shapes[0]) == 4 and shapes[0] == (*shapes[1], _SHARED // 2)
            if not fits or kinds != (torch.uint8, torch.uint8):
                raise CheckpointError(
                    f"{folder}: {name}{_BLOCKS} {list(shapes[0])} {kinds[0]} with scales {list(shapes[1])} {kinds[1]} "
                    f"are not bytes of {_SHARED} inputs each with a byte for their scale"
                )

    def names(self) -> list[str]:
        """What blocks and scales stand for in their place."""
        parts = {name + part for name in self._packed for part in (_BLOCKS, _SCALES)}
        return sorted({*super().names(), *self._packed} - parts)

    def __contains__(self, name: str) -> bool:
        return name in self._packed or super().__contains__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return super().shape(name)
        experts, outputs, groups = super().shape(name + _SCALES)
        return experts, groups * _SHARED, outputs

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self._packed else super().dtype(name)

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        if name not in self._packed:
            return super().read(name, box)
        # The groups of 32 inputs that the box touches
        experts, inputs, outputs = box
        groups = slice(inputs.start // _SHARED, -(-inputs.stop // _SHARED))
        blocks_EOgb = super().read(name + _BLOCKS, (experts, outputs, groups, slice(0, _SHARED // 2)))
        scales_EOg = super().read(name + _SCALES, (experts, outputs, groups))

        # Two numbers of 4 bits in a byte, the first in its low half; then each times its group's power of two
        codes_EOgi = torch.stack((blocks_EOgb & 15, blocks_EOgb >> 4), dim=-1).flatten(-2).int()
        values = torch.tensor((*_VALUES, *(-value for value in _VALUES)))
        numbers_EOgi = torch.ldexp(values[codes_EOgi], scales_EOg[..., None].int() - 127)
        begin = inputs.start - groups.start * _SHARED
        numbers_EOI = numbers_EOgi.flatten(-2)[..., begin : begin + inputs.stop - inputs.start]
        return numbers_EOI.transpose(1, 2).to(torch.bfloat16)
