"""Find ranks that differ from the majority, and slow ranks. Pure functions of values by rank.

A rank is slow if its modified z-score is below -3.5 (Iglewicz and Hoaglin, How to Detect and Handle Outliers,
1993). The score is the distance from the median in units of 1.4826 times the median absolute deviation. A
rate below half of the median is always slow, because with few ranks the slow rank itself causes most of the
deviation. With two ranks, a rank is slow if its rate is below half of the other rank's rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from typing import TypeVar

from shardtrain.tools.doctor.result import EQUAL, Finding, Reports, Verdict

T = TypeVar("T", bound=Hashable)

OUTLIER = 3.5
LEAST_SPREAD = 0.05
"""Minimum spread as a fraction of the median. If rates are almost equal, 1 % below the median is no outlier."""
SLOW = 0.7
"""Fraction of the median. An outlier above it is fast enough and is not reported."""
SURELY_SLOW = 0.5


def groups(values: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Return (value, ranks) pairs, the largest group first. Ties are ordered by their lowest rank."""
    found: dict[T, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return sorted(found.items(), key=lambda group: (-len(group[1]), group[1][0]))


def odd(values: Mapping[int, T]) -> list[int]:
    """Return the ranks that differ from the majority. Without a majority, return all ranks.

    >>> odd({0: "a", 1: "a", 2: "b"}), odd({0: "a", 1: "b"}), odd({0: "a", 1: "a"})
    ([2], [0, 1], [])
    """
    found = groups(values)
    if len(found) < 2:
        return []
    most = found[0][1]
    return sorted(values) if len(found[1][1]) == len(most) else sorted(set(values) - set(most))


def slow(rates: Mapping[int, float]) -> list[int]:
    """Return the ranks with a much lower rate than the others, slowest first.

    >>> slow({0: 100.0, 1: 101.0, 2: 40.0, 3: 99.0}), slow({0: 100.0, 1: 60.0}), slow({0: 100.0, 1: 40.0})
    ([2], [], [1])
    """
    if len(rates) < 2:
        return []
    if len(rates) == 2:
        limit = SURELY_SLOW * max(rates.values())
    else:
        # For normally distributed rates, 1.4826 times the median absolute deviation is the standard
        # deviation.
        median = statistics.median(rates.values())
        deviation = statistics.median(abs(rate - median) for rate in rates.values())
        spread = max(1.4826 * deviation, LEAST_SPREAD * median)
        limit = max(SURELY_SLOW * median, min(SLOW * median, median - OUTLIER * spread))
    return sorted((rank for rank, rate in rates.items() if rate < limit), key=lambda rank: (rates[rank], rank))


def equal(reports: Reports, area: str, subject: str, values: Mapping[int, str], verdict: Verdict, fix: str) -> Finding:
    """Return a finding that passes if all values are equal. Otherwise it names the ranks that differ."""
    found = groups(values)
    if len(found) == 1:
        return Finding(area, subject, "pass", found[0][0] or "none", EQUAL)
    text = "; ".join(f"{value or 'none'} on {reports.who(ranks)}" for value, ranks in found[:4])
    more = f"; {len(found) - 4} more" if len(found) > 4 else ""
    return Finding(area, subject, verdict, text + more, EQUAL, fix, tuple(odd(values)))


def fastest_first(reports: Reports, rates: Mapping[int, float], unit: str) -> str:
    """Format rates: one value, or the minimum and maximum with the slowest rank."""
    if len(rates) == 1:
        return f"{next(iter(rates.values())):.4g} {unit}"
    least = min(rates, key=lambda rank: (rates[rank], rank))
    return f"{rates[least]:.4g} to {max(rates.values()):.4g} {unit}, slowest {reports.who([least])}"
