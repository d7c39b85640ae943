"""Rotary angles stretched to longer contexts by YaRN, a separate file because most models do not use them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardtrain.models.layers import RotaryAngles


class YarnAngles(RotaryAngles):
    """Rotary angles stretched to longer contexts by YaRN (Peng et al. 2023, section 3.2).

    A pair of features that completes more than ``beta_fast`` turns within the original context
    keeps its frequency. The frequency of a pair with fewer than ``beta_slow`` turns is divided by
    ``factor``. In between is a linear ramp, whose ends ``truncate`` rounds outwards to integer
    pairs. A factor of 1 changes nothing.
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
        """Return the radians per position of each pair of features, float32, shape (H/2,)."""
        frequencies_h = super().inverse_frequencies(device)
        # The ramp goes from the pair with beta_fast turns in the original context to the pair with
        # beta_slow turns
        first = self._pair_with_turns(self.beta_fast)
        last = self._pair_with_turns(self.beta_slow)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        low = max(0, first)
        high = min(self.head_dim - 1, last)
        # A ramp of length zero would be a division by zero
        length = max(high - low, 0.001)
        pairs_h = torch.arange(self.head_dim // 2, device=device, dtype=torch.float32)
        stretched_h = ((pairs_h - low) / length).clamp(0.0, 1.0)
        return frequencies_h * (1.0 - stretched_h) + frequencies_h / self.factor * stretched_h

    def _pair_with_turns(self, turns: float) -> float:
        """Return the fractional index of the pair that completes ``turns`` turns within the
        original context.
        """
        wavelength = self.original_seq_len / (turns * 2 * math.pi)
        return self.head_dim * math.log(wavelength) / (2 * math.log(self.theta))


def yarn_scale(factor: float, mscale: float) -> float:
    """Return YaRN's scale of both queries and keys: 0.1 mscale ln(factor) + 1 (Peng et al. 2023,
    equation 15).
    """
    if factor <= 1.0:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0
