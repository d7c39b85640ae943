"""Dequantize weights in a Hugging Face folder, and open a folder with any supported kind of weights.

Block-wise fp8 is the format of DeepSeek-V3 (DeepSeek-AI 2024, section 3.3). ``X.weight_scale_inv``
has one float32 scale for each block of ``weight_block_size`` rows and columns of ``X.weight``. The
value is the product of the fp8 number and the scale of its block, computed in float32.

MXFP4 is the format of the experts of gpt-oss (OCP Microscaling Formats specification 1.0, section
5.3). ``X_blocks`` (E, O, I / 32, 16) and ``X_scales`` (E, O, I / 32) replace ``X`` (E, I, O). Both
are bytes. Each group of 32 inputs of an output shares a power of two, whose exponent is the scale
minus 127. Each byte of a block has two 4-bit numbers, the first in its low half. A number has a
sign bit, two exponent bits and one mantissa bit.
"""

from __future__ import annotations

import math
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
    reader = layer_file_reader(folder)
    if reader is not None:
        layer_weights: HubWeights = reader.LayerWeights(folder)
        return layer_weights
    if block is None:
        return HubWeights(folder, prefix)
    if isinstance(block, tuple):
        return BlockFp8Weights(folder, block, prefix)
    return Mxfp4Weights(folder, prefix)


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
        # The model was trained in the dtype of its matrices that are not quantized.
        self._plain = torch.bfloat16
        for name in self.names():
            if name not in self._scaled and len(super().shape(name)) == 2:
                self._plain = super().dtype(name)
                break
        for name in self._scaled:
            self._check_scales(name)

    def _check_scales(self, name: str) -> None:
        shape = super().shape(name)
        dtype = super().dtype(name)
        scale_shape = super().shape(name + _SCALE)
        scale_dtype = super().dtype(name + _SCALE)
        rows, columns = self._block
        has_right_dtypes = dtype == torch.float8_e4m3fn and scale_dtype == torch.float32
        # The last block of a row or column may be smaller than the others.
        if len(shape) == 2:
            expected_shape = (math.ceil(shape[0] / rows), math.ceil(shape[1] / columns))
            if scale_shape == expected_shape and has_right_dtypes:
                return
        raise CheckpointError(
            f"{self.folder}: {name} {list(shape)} {dtype} with scales {list(scale_shape)} "
            f"{scale_dtype} is not an fp8 weight with a float32 for each block of {rows} x "
            f"{columns}"
        )

    def names(self) -> list[str]:
        """Return the names of all tensors except scales."""
        scales = {name + _SCALE for name in self._scaled}
        return [name for name in super().names() if name not in scales]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        A quantized tensor has the dtype of the matrices that are not quantized, or bfloat16 if there are none.
        """
        if name in self._scaled:
            return self._plain
        return super().dtype(name)

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """Read a box of a tensor. A quantized tensor is returned as float32."""
        tensor = super().read(name, box)
        if name not in self._scaled:
            return tensor
        # Read the scales of all blocks that overlap with the box, expand them to rows and columns, and cut
        # them to the box.
        blocks = []
        for part, step in zip(box, self._block, strict=True):
            blocks.append(slice(part.start // step, math.ceil(part.stop / step)))
        scales = super().read(name + _SCALE, blocks)
        for dim, step in enumerate(self._block):
            part = box[dim]
            begin = part.start - blocks[dim].start * step
            scales = scales.repeat_interleave(step, dim)
            scales = scales.narrow(dim, begin, part.stop - part.start)
        return tensor.float() * scales


class Mxfp4Weights(HubWeights):
    """Weights with MXFP4 tensors, which are read as bfloat16. bfloat16 represents all their values exactly."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Open every file and check blocks and scales.

        Raises:
            CheckpointError: as ``HubWeights``, or the shape or dtype of blocks or scales is wrong.
        """
        super().__init__(folder, prefix)
        stored_names = set(super().names())
        self._packed = {
            name.removesuffix(_BLOCKS) for name in stored_names if name.endswith(_BLOCKS)
        }
        # With both a quantized and a plain tensor, it would be unclear which one counts.
        for name in self._packed:
            if name + _SCALES not in stored_names or name in stored_names:
                raise CheckpointError(
                    f"{folder}: {name}{_BLOCKS} requires {name}{_SCALES} and excludes {name}; download the folder again"
                )
            self._check_blocks(name)

    def _check_blocks(self, name: str) -> None:
        block_shape = super().shape(name + _BLOCKS)
        block_dtype = super().dtype(name + _BLOCKS)
        scale_shape = super().shape(name + _SCALES)
        scale_dtype = super().dtype(name + _SCALES)
        has_right_shapes = len(block_shape) == 4 and block_shape == (*scale_shape, _SHARED // 2)
        if not has_right_shapes or block_dtype != torch.uint8 or scale_dtype != torch.uint8:
            raise CheckpointError(
                f"{self.folder}: {name}{_BLOCKS} {list(block_shape)} {block_dtype} with scales "
                f"{list(scale_shape)} {scale_dtype} are not blocks of {_SHARED} inputs with one "
                "byte per scale"
            )

    def names(self) -> list[str]:
        """Return the names of all tensors, with the dequantized name instead of each pair of blocks and scales."""
        names = set(super().names()) | self._packed
        for name in self._packed:
            names -= {name + _BLOCKS, name + _SCALES}
        return sorted(names)

    def __contains__(self, name: str) -> bool:
        return name in self._packed or super().__contains__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return super().shape(name)
        experts, outputs, groups = super().shape(name + _SCALES)
        return experts, groups * _SHARED, outputs

    def dtype(self, name: str) -> torch.dtype:
        if name in self._packed:
            return torch.bfloat16
        return super().dtype(name)

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        if name not in self._packed:
            return super().read(name, box)
        # Read all groups of 32 inputs that overlap with the box.
        experts, inputs, outputs = box
        groups = slice(inputs.start // _SHARED, math.ceil(inputs.stop / _SHARED))
        bytes_of_group = slice(0, _SHARED // 2)
        blocks_EOgb = super().read(name + _BLOCKS, (experts, outputs, groups, bytes_of_group))
        scales_EOg = super().read(name + _SCALES, (experts, outputs, groups))

        # Unpack two 4-bit numbers per byte, low half first, and multiply them by
        # the power of two of their group.
        low = blocks_EOgb & 15
        high = blocks_EOgb >> 4
        codes_EOgi = torch.stack((low, high), dim=-1).flatten(-2).int()
        values = torch.tensor(_VALUES)
        values = torch.cat((values, -values))
        exponents_EOg1 = scales_EOg[..., None].int() - 127
        numbers_EOgi = torch.ldexp(values[codes_EOgi], exponents_EOg1)
        begin = inputs.start - groups.start * _SHARED
        end = begin + inputs.stop - inputs.start
        numbers_EOI = numbers_EOgi.flatten(-2)[..., begin:end]
        return numbers_EOI.transpose(1, 2).to(torch.bfloat16)
