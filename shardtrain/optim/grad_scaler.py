"""Loss scaling for float16: move gradients that would underflow into its range."""

from __future__ import annotations

import math
from collections.abc import Mapping

from shardtrain.utils.errors import CheckpointError, ConfigError, Problem

SMALLEST = 2.0**-14
"""Minimum scale: float16's smallest normal number. Backward starts from the scale, and a smaller,
subnormal value would lose bits. If gradients overflow even at this scale, the scale is not the cause."""
LARGEST = 2.0**24
"""Maximum scale. All-zero gradients are finite at any scale, so the scale would grow without a bound."""
_BACKOFF = 0.5
_GROWTH = 2.0


class LossScaler:
    """Dynamic loss scale: halved when a gradient overflows, doubled after a number of consecutive finite
    steps.

    Multiply the loss by ``scale`` before backward, and divide the gradients by it before clipping. All
    ranks decide alike, because ``finite`` is a property of the global gradient norm. The method is that of
    Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.

    Raises:
        ConfigError: a constant is out of range.
    """

    def __init__(self, initial: float, growth_interval: int) -> None:
        if not (math.isfinite(initial) and SMALLEST <= initial <= LARGEST):
            raise ConfigError(
                Problem(
                    "training.initial_loss_scale",
                    initial,
                    rule="must be between 2**-14 and 2**24",
                    fix="use 65536.0",
                )
            )
        if growth_interval < 1:
            raise ConfigError(
                Problem(
                    "training.loss_scale_growth_interval",
                    growth_interval,
                    rule="must be at least 1",
                    fix="use 2000",
                )
            )
        self.scale = float(initial)
        self._growth_interval = growth_interval
        self._finite_steps = 0

    @property
    def can_shrink(self) -> bool:
        """True if the scale is not yet at its minimum.

        At the minimum, a gradient that is not finite is not an overflow.
        """
        return self.scale > SMALLEST

    def update(self, finite: bool) -> bool:
        """Set the scale of the next step. Return True if the update of this step may be applied."""
        if not finite:
            # Gradients overflow at this scale, so skip the update and try a smaller one.
            self.scale = max(SMALLEST, self.scale * _BACKOFF)
            self._finite_steps = 0
            return False
        self._finite_steps += 1
        if self._finite_steps == self._growth_interval:
            self.scale = min(LARGEST, self.scale * _GROWTH)
            self._finite_steps = 0
        return True

    def state(self) -> dict[str, float | int]:
        """Return the scale, and the number of finite steps since it last changed, for a checkpoint."""
        return {"scale": self.scale, "finite_steps": self._finite_steps}

    def load(self, state: Mapping[str, float | int]) -> None:
        """Restore the result of ``state()``.

        Raises:
            CheckpointError: a value is missing or out of range.
        """
        scale = state.get("scale")
        finite_steps = state.get("finite_steps")
        if (
            scale is None
            or not SMALLEST <= scale <= LARGEST
            or finite_steps is None
            or finite_steps < 0
        ):
            raise CheckpointError(
                f"the loss scaler's state {dict(state)} is not a scale and count; use another checkpoint"
            )
        self.scale = float(scale)
        # after a resume with a shorter interval, the count may already be past it
        self._finite_steps = min(int(finite_steps), self._growth_interval - 1)
