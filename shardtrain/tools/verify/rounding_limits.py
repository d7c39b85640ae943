"""Relative errors of a result, and the errors that random roundings of the exact result explain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardtrain.tools.verify.rounding_noise import ROUNDOFF, rounded, unit_roundoff

MARGIN = 1.25
"""Allowed error divided by the largest of ``DRAWS`` simulated errors."""
DRAWS = 4
LEAST = ROUNDOFF["float16"] / 8
"""Allowed relative error of a float32 result. Its angles and sums lose a few digits, far fewer than a shorter dtype."""


@dataclass(frozen=True)
class Deviation:
    """A relative error, and the error that rounding explains."""

    error: float
    allowed: float

    @property
    def ratio(self) -> float:
        """The error divided by the allowed error."""
        return self.error / max(self.allowed, 1e-300)

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the error. NaN counts as too large."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Excess:
    """A result with more error than rounding explains.

    Attributes:
        path: Module of the result.
        what: "output", "own code before NAME", "loss", "gradient of the logits" or another gradient.
        error: Relative error.
        allowed: Relative error that rounding explains.
        cause: Likely cause, as a sentence.
    """

    path: str
    what: str
    error: float
    allowed: float
    cause: str


def deviation(
    actual: Tensor,
    exact: Tensor,
    roundings: int,
    is_by_row: bool,
    promised: torch.dtype | None = None,
) -> Deviation:
    """Compare a result with float64, and with ``roundings`` random roundings of the float64 result.

    Roundings are those of the ``promised`` dtype, or of the result's own dtype if that is longer. So a
    result in a shorter dtype than promised has no larger tolerance.

    With ``is_by_row``, also compare the error that all elements of a row have in common, and return the
    worse of both. A sum or scale in a short dtype changes all elements of a row alike,
    and rounding its result does not.
    """
    exact = exact.double()
    dtype = actual.dtype
    if promised is not None and unit_roundoff(promised) < unit_roundoff(dtype):
        dtype = promised
    generator = torch.Generator().manual_seed(0)
    # Rounding to nearest is not always random. For example, a bfloat16 row that a norm multiplies by 1.001
    # does not change at all, so all its elements have the same relative error.
    nearest = torch.empty_like(exact, dtype=dtype).copy_(exact).double()
    simulated = [nearest]
    for _ in range(DRAWS):
        values = exact
        for _ in range(roundings):
            values = rounded(values, dtype, generator)
        simulated.append(values)

    least = 0.0
    if unit_roundoff(dtype) < LEAST:
        least = LEAST
    statistics: list[Callable[[Tensor, Tensor], float]] = [distance]
    if is_by_row:
        statistics.append(_common_error)
    deviations = []
    for statistic in statistics:
        explained = MARGIN * max(statistic(values, exact) for values in simulated)
        allowed = max(explained, least) + _subnormal_error(dtype, exact)
        error = statistic(actual.double(), exact)
        deviations.append(Deviation(error, allowed))
    return max(deviations, key=lambda one: one.ratio)


def distance(actual: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error. Elements that are infinite in both do not count."""
    difference = torch.where(actual == exact, 0.0, actual - exact)
    size = torch.where(exact.isfinite(), exact, 0.0).norm()
    error = float(difference.norm() / size.clamp_min(1e-300))
    return math.inf if math.isnan(error) else error


def _common_error(actual: Tensor, exact: Tensor) -> float:
    """Return the root mean square over rows of the relative error that is a multiple of the row."""
    if exact.ndim < 2:
        return 0.0
    energy = exact.square().sum(-1)
    along = ((actual - exact) * exact).sum(-1)
    shares = torch.where(energy > 0, along / energy.clamp_min(1e-300), 0.0)
    return float(shares.square().mean().sqrt())


def _subnormal_error(dtype: torch.dtype, exact: Tensor) -> float:
    """Return the relative error of rounding subnormal numbers, which is absolute for each element."""
    smallest = float(torch.finfo(dtype).tiny)
    size = max(float(exact.norm()), 1e-300)
    return smallest * math.sqrt(exact.numel()) / size
