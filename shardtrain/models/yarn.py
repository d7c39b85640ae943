"""Rotary angles that are stretched to longer contexts by YaRN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardtrain.models.layers import RotaryAngles


class YarnAngles(RotaryAngles):
    """Rotary angles stretched to longer contexts by YaRN (Peng et al. 2023, section 3.2).

    Pairs that turn more than ``beta_fast`` times within the original context keep their frequency, those that turn
    less than ``beta_slow`` times have it divided by ``factor``, and a linear ramp lies in between, whose ends
    ``truncate`` rounds outwards to whole pairs. A factor of 1 changes nothing.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        factor: float,
        original_seq_len: int,
        beta_fast: float,
        beta_slow: float,
        truncate: bool = True,
    ) -> None:
        super().__init__(head_dim, theta, factor=factor, original_seq_len=original_seq_len)
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.truncate = truncate

    def inverse_frequencies(self, device: torch.device | None = None) -> Tensor:
        """Radians per position of each pair of features, float32, shape (H/2,)."""
        frequencies_h = super().inverse_frequencies(device)
        # The ramp lies between the pair that turns beta_fast times within the original context and the one that turns
        # beta_slow times; its length is not zero, by which it would be divided
        first, last = (self._pair_that_turns(times) for times in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        low = max(0, first)
        high = min(self.head_dim - 1, last)
        pairs_h = torch.arange(self.head_dim // 2, device=device, dtype=torch.float32)
        stretched_h = ((pairs_h - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        return frequencies_h * (1.0 - stretched_h) + frequencies_h / self.factor * stretched_h

    def _pair_that_turns(self, times: float) -> float:
        """Index of the pair that turns so many times within the original context."""
        wavelength = self.original_seq_len / (times * 2 * math.pi)
        return self.head_dim * math.log(wavelength) / (2 * math.log(self.theta))


def yarn_scale(factor: float, mscale: float) -> float:
    """By how much YaRN scales queries and keys alike: 0.1 mscale ln(factor) + 1 (Peng et al. 2023, equation 15)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
