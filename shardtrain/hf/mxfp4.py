"""Experts in MXFP4, as gpt-oss is published, read as numbers (OCP Microscaling Formats specification 1.0, section 5.3).

In the place of ``X`` (E, I, O) lie ``X_blocks`` (E, O, I / 32, 16) and ``X_scales`` (E, O, I / 32), bytes: 32 inputs of
an output share a power of two, the scale less 127, and each byte of their block holds two numbers of 4 bits, the first
in its low half: a sign, two bits of exponent and one of fraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardtrain.hf.weights import HubWeights
from shardtrain.utils.errors import CheckpointError

_BLOCKS = "_blocks"
_SCALES = "_scales"
_SHARED = 32
"""Inputs that share a scale."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the 4 bits without the sign, which is the highest."""


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
