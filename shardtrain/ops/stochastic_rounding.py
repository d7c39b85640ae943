"""Rounding up or down by chance, so that many small changes are not lost (Gupta et al. 2015, arXiv 1502.02551).

A number between two others becomes the upper one with the probability of its distance from the lower: what it becomes
is the number itself in expectation. Chance is a hash of (seed, parameter name, step, place in the whole tensor), so
that a number is rounded alike on every mesh and every device, and again after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

# The constants of SplitMix64 (Steele et al. 2014) as signed integers
_GOLDEN = -0x61C8864680B583EB
_FIRST = -0x40A7B892E31B1A47
_SECOND = -0x6B2FB644ECCEEE15

LEVELS = 1 << 16
"""The resolution of the random numbers: 16 bits, as many as a float32 has more than a bfloat16."""


def key_of(seed: int, name: str) -> int:
    """A number of 64 bits, signed, for a parameter of a run."""
    digest = hashlib.blake2b(f"rounding/{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's output function: int64 to int64, arithmetic modulo 2^64."""
    # PyTorch's >> of int64 repeats the sign; the masks clear those bits, as a shift of unsigned numbers would
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def places(shape: Sequence[int], strides: Sequence[int], first: Tensor) -> Tensor:
    """Places of a part of ``shape`` in a whole tensor, int64, of the shape of the part.

    ``strides`` are those of the whole tensor in a row, and ``first``, an int64 scalar, is where the part begins in it.
    """
    place = first
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        along = torch.arange(size, device=first.device) * stride
        place = place + along.view(-1, *[1] * (len(shape) - 1 - dim))
    return place


def chances(key: int | Tensor, step: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three independent int64 tensors of numbers in [0, 65536) at each place, for one step."""
    stream = _mixed(step.to(torch.int64) * _GOLDEN + key)
    bits = _mixed(place * _GOLDEN + stream)
    return bits & (LEVELS - 1), (bits >> 16) & (LEVELS - 1), (bits >> 32) & (LEVELS - 1)


def to_bfloat16(x: Tensor, chance: Tensor) -> Tensor:
    """Finite float32 numbers as one of the two bfloat16 around them; what is one already stays."""
    # The lower 16 bits of a float32 are what a bfloat16 lacks. A number from 0 to 65,535 is added to them, so that the
    # larger they are, the more often they carry into the upper bits; then they are cut off
    bits = x.view(torch.int32) + chance.to(torch.int32)
    up_or_down = (bits & -LEVELS).view(torch.float32)
    return torch.where(torch.isfinite(x), up_or_down, x).to(torch.bfloat16)


def to_code(x: Tensor, code: Tensor, chance: Tensor) -> Tensor:
    """Numbers between the first and the last of a sorted table of 256 as indices of the two around them, uint8."""
    low = (torch.bucketize(x, code, right=True) - 1).clamp_(0, code.numel() - 2)
    below = code[low]
    above = code[low + 1]
    return (low + (chance < (x - below) / (above - below) * LEVELS)).to(torch.uint8)
