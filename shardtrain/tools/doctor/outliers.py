"""Report ranks that differ from the majority, and find slow ranks. Pure functions of values by rank.

A rank is slow if its modified z-score is below -3.5 (Iglewicz and Hoaglin, How to Detect and Handle Outliers,
1993). The score is the distance from the median in units of 1.4826 times the median absolute deviation. A
rate below half of the median is always slow, because with few ranks the slow rank itself causes most of the
deviation. With two ranks, a rank is slow if its rate is below half of the other rank's rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from shardtrain.tools.doctor.result import EQUAL, Finding, Reports, Verdict
from shardtrain.utils.majority import groups, odd

OUTLIER = 3.5
LEAST_SPREAD = 0.05
"""Minimum spread as a fraction of the median.

If rates are almost equal, 1 % below the median is no outlier.
"""
SLOW = 0.7
"""Fraction of the median. An outlier above it is fast enough and is not reported."""
SURELY_SLOW = 0.5


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
        # Never report a rank above SLOW, and always report one below SURELY_SLOW.
        outlier_limit = median - OUTLIER * spread
        limit = max(SURELY_SLOW * median, min(SLOW * median, outlier_limit))
    slow_ranks = [rank for rank, rate in rates.items() if rate < limit]
    return sorted(slow_ranks, key=lambda rank: (rates[rank], rank))


def equal(
    reports: Reports,
    area: str,
    subject: str,
    values: Mapping[int, str],
    verdict: Verdict,
    fix: str,
) -> Finding:
    """Return a finding that passes if all values are equal. Otherwise it names the ranks that differ."""
    by_size = groups(values)
    if len(by_size) == 1:
        value, _ = by_size[0]
        return Finding(area, subject, "pass", value or "none", EQUAL)
    # The majority comes first. With a different value on every rank, four suffice to see the pattern.
    texts = []
    for value, ranks in by_size[:4]:
        texts.append(f"{value or 'none'} on {reports.who(ranks)}")
    if len(by_size) > 4:
        texts.append(f"{len(by_size) - 4} more")
    return Finding(area, subject, verdict, "; ".join(texts), EQUAL, fix, tuple(odd(values)))


def format_rates(reports: Reports, rates: Mapping[int, float], unit: str) -> str:
    """Format rates: one value, or the minimum and maximum with the slowest rank."""
    highest = max(rates.values())
    if len(rates) == 1:
        return f"{highest:.4g} {unit}"
    slowest = min(rates, key=lambda rank: (rates[rank], rank))
    who = reports.who([slowest])
    return f"{rates[slowest]:.4g} to {highest:.4g} {unit}, slowest {who}"
