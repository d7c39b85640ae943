"""Judge the errors of trials: the tolerance of each number, the worst difference, and the first one beyond it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardtrain.tools.verify import verify_report
from shardtrain.tools.verify.certificate.trial import AVERAGE, METRIC, RATE, SCALE, NumberError
from shardtrain.tools.verify.verify_report import MOST, ROUNDING, MeshResult, Verdict

USUAL = {
    **verify_report.USUAL,
    "initial": 0.0,
    RATE: 0.0,
    SCALE: 0.0,
    METRIC: 1e-5,
    AVERAGE: verify_report.USUAL["weights"],
    "validation": 1e-5,
}
"""Tolerances of float32. Initial weights must be bitwise equal, and numbers that no rank rounds must be equal."""
_ORDER = (
    "initial",
    RATE,
    SCALE,
    "gradient",
    "loss",
    "norm",
    METRIC,
    "weights",
    AVERAGE,
    "validation",
)
"""Order of the numbers of a step. A gradient names a tensor, so it comes before the loss."""


@dataclass(frozen=True)
class WorstDifference:
    """The number of a comparison that is closest to its tolerance, or furthest beyond it.

    Attributes:
        error: None for a number that is missing or not finite.
        step, tensor: None if only the largest error of all steps and tensors is known.
        tolerance: None if it was measured for each tensor.
    """

    kind: str
    step: int | None
    tensor: str | None
    error: float | None
    tolerance: float | None

    def __str__(self) -> str:
        """One phrase: ``gradient of embed.weight in step 2: 3.1e-07 (1e-05 is rounding)``."""
        place = f" of {self.tensor}" if self.tensor else ""
        if self.step is not None:
            place += f" in step {self.step}"
        if self.error is None:
            return f"{self.kind}{place} is missing or not finite"
        if not self.error:
            return "none: bitwise equal"
        rounding = "must be bitwise equal"
        if self.tolerance is None:
            rounding = "rounding is measured for each tensor"
        elif self.tolerance:
            rounding = f"{self.tolerance:.0e} is rounding"
        return f"{self.kind}{place}: {self.error:.1e} ({rounding})"


@dataclass(frozen=True)
class VariantResult:
    """Result of one variant.

    Attributes:
        compared: Short description of the variant.
        verdict: The verdict.
        worst: The worst difference. None if nothing was compared.
        first: The first difference beyond its tolerance, or the reason why nothing was compared.
        cause: Likely cause, if known.
        seconds: Wall-clock time, or 0 if the variant shared its processes with others.
    """

    compared: str
    verdict: Verdict
    worst: WorstDifference | None = None
    first: str = ""
    cause: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as an entry of a certificate."""
        return asdict(self)


Explain = Callable[[Sequence[NumberError], NumberError], str]
"""Returns the likely cause, given all numbers beyond their tolerances and the first of them."""


def judge(
    compared: str,
    errors: Sequence[NumberError],
    is_exact: bool,
    shaken: Sequence[NumberError] | None,
    explain: Explain | None = None,
) -> VariantResult | None:
    """Compare errors with their tolerances.

    Args:
        compared: Description of the variant.
        errors: Errors of the variant.
        is_exact: True if every error must be 0.
        shaken: Errors of a run whose weights were moved by one unit in the last place, if it exists.
        explain: Finds the likely cause of a difference.

    Returns:
        The comparison. None if a number exceeds its usual tolerance, and a shaken run is needed to find out
        whether rounding explains it.
    """
    effects = {(error.kind, error.step, error.tensor): error.error for error in shaken or ()}
    ranked = sorted(errors, key=lambda error: (error.step, _ORDER.index(error.kind)))
    worst: WorstDifference | None = None
    first: WorstDifference | None = None
    beyond: list[NumberError] = []
    largest_ratio = -1.0
    for error in ranked:
        effect = effects.get((error.kind, error.step, error.tensor), 0.0)
        # Averages of the reference are computed in float64, so they are never bitwise equal.
        is_bitwise = is_exact and error.kind != AVERAGE
        tolerance = 0.0 if is_bitwise else _tolerance(error.kind, effect)
        difference = WorstDifference(
            error.kind,
            error.step,
            error.tensor,
            error.error if math.isfinite(error.error) else None,
            tolerance,
        )
        ratio = error.error / tolerance if tolerance else error.error * 1e9
        if ratio > largest_ratio:
            largest_ratio = ratio
            worst = difference
        if not error.error <= tolerance:
            beyond.append(error)
            first = first or difference
    if first is None:
        return VariantResult(compared, "same", worst)
    if shaken is None and not is_exact and first.kind != "initial":
        return None
    cause = ""
    if explain is not None:
        # Errors are sorted by kind. Tensors of one kind keep the order of the forward pass, so the first
        # error is the most likely origin.
        cause = explain(beyond, beyond[0])
    return VariantResult(compared, "differs", worst, f"the first difference is {first}", cause)


def _tolerance(kind: str, effect: float) -> float:
    usual = USUAL[kind]
    return max(usual, min(ROUNDING * effect, MOST * usual))


def of_mesh(row: MeshResult, has_measured_tolerances: bool = False) -> VariantResult:
    """Convert a row of ``verify``'s table. With measured tolerances, the tolerance of the largest error is unknown."""
    # Only pipelines have a schedule, and only some meshes have options.
    parts = [text for text in (row.mesh, row.schedule, row.options) if text]
    compared = ", ".join(parts)
    worst = None
    if row.gradient is not None:
        worst = _largest_of(row)
        if has_measured_tolerances:
            worst = replace(worst, tolerance=None)
    seconds = round(row.seconds, 1)
    first = row.first or row.cause
    if row.verdict == "not proven":
        first = row.unproven
    cause = row.cause if row.first else ""
    return VariantResult(compared, row.verdict, worst, first, cause, seconds)


def _largest_of(row: MeshResult) -> WorstDifference:
    """Return the error of a row that is largest relative to its tolerance. Such a row names no step."""
    errors = {"loss": row.loss, "gradient": row.gradient, "norm": row.norm, "weights": row.weights}
    if row.initial:
        return WorstDifference("initial", None, f"{row.initial} tensors", None, 0.0)
    kind = max(errors, key=lambda name: (errors[name] or 0.0) / USUAL[name])
    error = errors[kind]
    finite = error if error is not None and math.isfinite(error) else None
    return WorstDifference(kind, None, None, finite, USUAL[kind])


def verdict_of(comparisons: Sequence[VariantResult], accepts_impossible: bool) -> str:
    """Return "holds", "differs", "failed", "not proven" or "not checked" for a dimension."""
    verdicts = {comparison.verdict for comparison in comparisons}
    for name in ("differs", "failed", "not proven", "not checked"):
        if name in verdicts:
            return name
    if "not possible" in verdicts and not accepts_impossible:
        return "not checked"
    return "holds" if "same" in verdicts else "not checked"


def worst_of(comparisons: Sequence[VariantResult]) -> WorstDifference | None:
    """Return the worst difference over several comparisons, in multiples of the tolerance."""

    def ratio(worst: WorstDifference) -> float:
        if worst.error is None:
            return math.inf
        return worst.error / worst.tolerance if worst.tolerance else worst.error * 1e9

    candidates = [comparison.worst for comparison in comparisons if comparison.worst is not None]
    return max(candidates, key=ratio, default=None)
