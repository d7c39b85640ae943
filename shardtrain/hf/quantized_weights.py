"""Dequantize weights in a Hugging Face folder, and open a folder with any supported kind of weights.

Block-wise fp8 is the format of DeepSeek-V3 (DeepSeek-AI 2024, section 3.3). ``X.weight_scale_inv`` has one float32
scale for each block of ``weight_block_size`` rows and columns of ``X.weight``. The value is the product of the fp8
number and the scale of its block, computed in float32.

MXFP4 is the format of the experts of gpt-oss (OCP Microscaling Formats specification 1.0, section 5.3). ``X_blocks``
(E, O, I / 32, 16) and ``X_scales`` (E, O, I / 32) replace ``X`` (E, I, O). Both are bytes. Each group of 32 inputs of
an output shares a power of two, whose exponent is the scale minus 127. Each byte of a block has two 4-bit numbers, the
first in its low half. A number has a sign bit, two exponent bits and one mantissa bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardtrain.hf.weights import HubWeights, layer_file_reader
from shardtrain.hub_formats.config_json import Quantized
from shardtrain.utils.errors import CheckpointError

_SCALE = "_scale_inv"
"""Suffix of the name of an fp8 weight's scales."""
_BLOCKS = "_blocks"
_SCALES = "_scales"
_SHARED = 32
"""Number of inputs that share a scale in MXFP4."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""MXFP4 values by their lower three bits. The highest bit is the sign."""


def open_weights(folder: Path, block: Quantized, prefix: str = "") -> HubWeights:
    """Open the weights of a folder: safetensors files, which may be quantized, or one file per layer.

    Args:
        block: Quantization of the weights.
        prefix: Prefix to remove from names. See ``HubWeights``.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if (reader := layer_file_reader(folder)) is not None:
        layer_weights: HubWeights = reader.LayerWeights(folder)
        return layer_weights
    if isinstance(block, tuple):
        return BlockFp8Weights(folder, block, prefix)
    return HubWeights(folder, prefix) if block is None else Mxfp4Weights(folder, prefix)


class BlockFp8Weights(HubWeights):
    """Weights in block-wise fp8. Quantized tensors are read as float32, and their scales are hidden."""

    def __init__(self, folder: Path, block: tuple[int, int], prefix: str = "") -> None:
        """Open every file and check the scales.

        Raises:
            CheckpointError: as ``HubWeights``, or the shape or dtype of scales is wrong.
        """
        super().__init__(folder, prefix)
        self._block = block
        self._scaled = {name for name in super().names() if name + _SCALE in self}
        # The source trained in the dtype of its matrices that are not quantized.
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
        """Return the names of all tensors except scales."""
        scales = {name + _SCALE for name in self._scaled}
        return [name for name in super().names() if name not in scales]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        A quantized tensor has the dtype of the other matrices, or bfloat16 without others.
        """
        return self._plain if name in self._scaled else super().dtype(name)

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """Read a box of a tensor. A quantized tensor is returned as float32."""
        found = super().read(name, box)
        if name not in self._scaled:
            return found
        # Read the scales of all blocks that overlap with the box, expand them to rows and columns, and cut
        # them to the box.
        blocks = [slice(part.start // step, -(-part.stop // step)) for part, step in zip(box, self._block, strict=True)]
        scales = super().read(name + _SCALE, blocks)
        for dim, (part, step) in enumerate(zip(box, self._block, strict=True)):
            begin = part.start - blocks[dim].start * step
            scales = scales.repeat_interleave(step, dim).narrow(dim, begin, part.stop - part.start)
        return found.float() * scales


class Mxfp4Weights(HubWeights):
    """Weights with MXFP4 tensors, which are read as bfloat16. bfloat16 represents all their values exactly."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Open every file and check blocks and scales.

        Raises:
            CheckpointError: as ``HubWeights``, or the shape or dtype of blocks or scales is wrong.
        """
        super().__init__(folder, prefix)
        there = set(super().names())
        self._packed = {name.removesuffix(_BLOCKS) for name in there if name.endswith(_BLOCKS)}
        for name in self._packed:
            if name + _SCALES not in there or name in there:
                raise CheckpointError(
                    f"{folder}: {name}{_BLOCKS} requires {name}{_SCALES} and excludes {name}; download the folder again"
                )
            shapes = super().shape(name + _BLOCKS), super().shape(name + _SCALES)
            kinds = super().dtype(name + _BLOCKS), super().dtype(name + _SCALES)
            fits = len(shapes[0]) == 4 and shapes[0] == (*shapes[1], _SHARED // 2)
            if not fits or kinds != (torch.uint8, torch.uint8):
                raise CheckpointError(
                    f"{folder}: {name}{_BLOCKS} {list(shapes[0])} {kinds[0]} with scales {list(shapes[1])} {kinds[1]} "
                    f"are not blocks of {_SHARED} inputs with one byte per scale"
                )

    def names(self) -> list[str]:
        """Return the names of all tensors, with the dequantized name instead of each pair of blocks and scales."""
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
        # Read all groups of 32 inputs that overlap with the box.
        experts, inputs, outputs = box
        groups = slice(inputs.start // _SHARED, -(-inputs.stop // _SHARED))
        blocks_EOgb = super().read(name + _BLOCKS, (experts, outputs, groups, slice(0, _SHARED // 2)))
        scales_EOg = super().read(name + _SCALES, (experts, outputs, groups))

        # Unpack two 4-bit numbers per byte, low half first, and multiply them by the power of two of their group.
        codes_EOgi = torch.stack((blocks_EOgb & 15, blocks_EOgb >> 4), dim=-1).flatten(-2).int()
        values = torch.tensor((*_VALUES, *(-value for value in _VALUES)))
        numbers_EOgi = torch.ldexp(values[codes_EOgi], scales_EOg[..., None].int() - 127)
        begin = inputs.start - groups.start * _SHARED
        numbers_EOI = numbers_EOgi.flatten(-2)[..., begin : begin + inputs.stop - inputs.start]
        return numbers_EOI.transpose(1, 2).to(torch.bfloat16)
