"""The table of a certificate: one line per dimension, then the reasons of dimensions that do not hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardtrain.config.certificate import AXES
from shardtrain.tools.verify.certificate.comparison import VariantResult, WorstDifference, worst_of

HEADER = ("dimension", "verdict", "compared", "worst difference")


@dataclass(frozen=True)
class DimensionResult:
    """Result of one dimension.

    Attributes:
        name: The dimension.
        verdict: "holds", "differs", "failed", "not proven", "not checked", "not possible", "does not apply" or
            "not requested". It is "not possible" if the user accepts impossible meshes, and no other was requested.
        comparisons: Results of its comparisons.
        reason: Reason why nothing was compared.
    """

    name: str
    verdict: str
    comparisons: Sequence[VariantResult] = ()
    reason: str = ""

    @property
    def holds(self) -> bool:
        """True unless a number differs or a requested comparison was not made."""
        return self.verdict in ("holds", "not possible", "does not apply", "not requested")

    @property
    def worst(self) -> WorstDifference | None:
        """The worst difference, in multiples of its tolerance."""
        return worst_of(self.comparisons)

    @property
    def compared_axes(self) -> set[str]:
        """Mesh axes of the comparisons that found the same numbers."""
        axes = set()
        for comparison in self.comparisons:
            if comparison.verdict == "same":
                for axis, degree in re.findall(r"(\w+)=(\d+)", comparison.compared):
                    if axis in AXES and int(degree) > 1:
                        axes.add(axis)
        return axes

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a certificate."""
        worst = None if self.worst is None else vars(self.worst)
        comparisons = [comparison.to_json() for comparison in self.comparisons]
        return {
            "name": self.name,
            "verdict": self.verdict,
            "reason": self.reason,
            "worst": worst,
            "comparisons": comparisons,
        }


def table(results: Sequence[DimensionResult]) -> str:
    """Format one line per dimension, followed by every comparison that differs or was not possible."""
    cells = [HEADER, *(_cells(result) for result in results)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    for result in results:
        for comparison in result.comparisons:
            if comparison.verdict == "same":
                continue
            lines += [
                "",
                f"{result.name}, {comparison.compared}: {comparison.verdict}: {comparison.first}",
            ]
            if comparison.cause:
                lines.append(f"  likely cause: {comparison.cause}")
    return "\n".join(lines)


def _cells(result: DimensionResult) -> tuple[str, ...]:
    if not result.comparisons:
        return result.name, result.verdict, "-", result.reason
    num_variants = len(result.comparisons)
    num_compared = 0
    for comparison in result.comparisons:
        if comparison.verdict != "not possible":
            num_compared += 1
    compared = f"{num_compared} of {num_variants} variants"
    if num_compared == num_variants:
        noun = "variants" if num_compared > 1 else "variant"
        compared = f"{num_compared} {noun}"
    return result.name, result.verdict, compared, str(result.worst or "-")
