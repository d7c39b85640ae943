"""Which ranks differ from the others, and which are slow; pure functions of values by rank.

Slow is decided by the modified z-score of Iglewicz and Hoaglin (How to Detect and Handle Outliers, 1993): the distance
from the median in units of 1.4826 times the median absolute deviation, of which more than 3.5 is an outlier. Less than
half of the median is slow whatever the spread: of a few ranks, the slow one itself makes most of it. Of two ranks, one
is slow that has not half the rate of the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Mapping
from typing import TypeVar

from shardtrain.tools.doctor.result import EQUAL, Finding, Reports, Verdict

T = TypeVar("T", bound=Hashable)

OUTLIER = 3.5
LEAST_SPREAD = 0.05
"""Of the median: where all others agree to the last digit, 1 % is still no outlier."""
SLOW = 0.7
"""Of the median: a rank may be an outlier and be fast enough, which is not a finding."""
SURELY_SLOW = 0.5


def groups(values: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Ranks of each value: the largest group first, of equal ones that with the lowest rank."""
    found: dict[T, list[int]] = {}
    for rank in sorted(values):
        found.setdefault(values[rank], []).append(rank)
    return sorted(found.items(), key=lambda group: (-len(group[1]), group[1][0]))


def odd(values: Mapping[int, T]) -> list[int]:
    """Ranks that are not of the majority; all of them where there is none.

    >>> odd({0: "a", 1: "a", 2: "b"}), odd({0: "a", 1: "b"}), odd({0: "a", 1: "a"})
    ([2], [0, 1], [])
    """
    found = groups(values)
    if len(found) < 2:
        return []
    most = found[0][1]
    return sorted(values) if len(found[1][1]) == len(most) else sorted(set(values) - set(most))


def slow(rates: Mapping[int, float]) -> list[int]:
    """Ranks whose rate is far below the others', the slowest first.

    >>> slow({0: 100.0, 1: 101.0, 2: 40.0, 3: 99.0}), slow({0: 100.0, 1: 60.0}), slow({0: 100.0, 1: 40.0})
    ([2], [], [1])
    """
    if len(rates) < 2:
        return []
    if len(rates) == 2:
        limit = SURELY_SLOW * max(rates.values())
    else:
        # 1.4826 makes the median absolute deviation the standard deviation of normal numbers
        median = statistics.median(rates.values())
        deviation = statistics.median(abs(rate - median) for rate in rates.values())
        spread = max(1.4826 * deviation, LEAST_SPREAD * median)
        limit = max(SURELY_SLOW * median, min(SLOW * median, median - OUTLIER * spread))
    return sorted((rank for rank, rate in rates.items() if rate < limit), key=lambda rank: (rates[rank], rank))


def equal(reports: Reports, area: str, subject: str, values: Mapping[int, str], verdict: Verdict, fix: str) -> Finding:
    """A row that passes where all ranks have the same value, and else names those that have another."""
    found = groups(values)
    if len(found) == 1:
        return Finding(area, subject, "pass", found[0][0] or "none", EQUAL)
    text = "; ".join(f"{value or 'none'} on {reports.who(ranks)}" for value, ranks in found[:4])
    more = f"; {len(found) - 4} more" if len(found) > 4 else ""
    return Finding(area, subject, verdict, text + more, EQUAL, fix, tuple(odd(values)))


def fastest_first(reports: Reports, rates: Mapping[int, float], unit: str) -> str:
    """A rate in words: the value of one rank, or the lowest and the highest of several and who has the lowest."""
    if len(rates) == 1:
        return f"{next(iter(rates.values())):.4g} {unit}"
    least = min(rates, key=lambda rank: (rates[rank], rank))
    return f"{rates[least]:.4g} to {max(rates.values()):.4g} {unit}, slowest {reports.who([least])}"
