"""Stochastic rounding, which preserves many small updates on average (Gupta et al. 2015, arXiv 1502.02551).

The probability of rounding up is the relative distance from the lower neighbor, so the expectation is exact.
The random numbers are a hash of (seed, parameter name, step, position in the full tensor).
Rounding is therefore equal on every mesh and device, and after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

# The constants of SplitMix64 (Steele et al. 2014) as signed integers.
_GOLDEN = -0x61C8864680B583EB
_FIRST = -0x40A7B892E31B1A47
_SECOND = -0x6B2FB644ECCEEE15

LEVELS = 1 << 16
"""Number of different random numbers: 16 bits, the bits of float32 that bfloat16 lacks."""


def key_of(seed: int, name: str) -> int:
    """Return a signed 64-bit hash key for a parameter."""
    digest = hashlib.blake2b(f"rounding/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _mixed(x: Tensor) -> Tensor:
    """Apply the output function of SplitMix64 to int64 values, modulo 2^64."""
    # PyTorch's >> of int64 extends the sign. The masks clear these bits, like an unsigned shift.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def places(shape: Sequence[int], strides: Sequence[int], first: Tensor) -> Tensor:
    """Return the int64 positions of a part's elements in the full tensor, in the shape of the part.

    Args:
        shape: Shape of the part.
        strides: Strides of the contiguous full tensor.
        first: Position of the part's first element, an int64 scalar.
    """
    place = first
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        along = torch.arange(size, device=first.device) * stride
        place = place + along.view(-1, *[1] * (len(shape) - 1 - dim))
    return place


def chances(key: int | Tensor, step: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three independent int64 tensors of random numbers in [0, 65536) for these positions and step."""
    stream = _mixed(step.to(torch.int64) * _GOLDEN + key)
    bits = _mixed(place * _GOLDEN + stream)
    mask = LEVELS - 1
    return bits & mask, (bits >> 16) & mask, (bits >> 32) & mask


def to_bfloat16(x: Tensor, chance: Tensor) -> Tensor:
    """Round finite float32 numbers to one of the two nearest bfloat16 values. Exact values do not change."""
    # A bfloat16 lacks the lower 16 bits of a float32. Add a random number from 0 to 65,535 to these bits. The
    # probability of a carry into the upper bits is proportional to their value. Then clear the lower bits.
    bits = x.view(torch.int32) + chance.to(torch.int32)
    up_or_down = (bits & -LEVELS).view(torch.float32)
    return torch.where(torch.isfinite(x), up_or_down, x).to(torch.bfloat16)


def to_code(x: Tensor, code: Tensor, chance: Tensor) -> Tensor:
    """Round numbers to a sorted table of 256 values. Return uint8 indices of one of the two neighbors."""
    low = (torch.bucketize(x, code, right=True) - 1).clamp_(0, code.numel() - 2)
    below = code[low]
    above = code[low + 1]
    return (low + (chance < (x - below) / (above - below) * LEVELS)).to(torch.uint8)
