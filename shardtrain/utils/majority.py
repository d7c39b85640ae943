"""Find the ranks whose value differs from that of most ranks. Pure functions of values by rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def groups(values: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Return (value, ranks) pairs, the largest group first. Ties are ordered by their lowest rank."""
    ranks_of: dict[T, list[int]] = {}
    for rank in sorted(values):
        ranks_of.setdefault(values[rank], []).append(rank)
    # Groups are created in the order of their lowest rank, which a stable sort keeps for ties.
    return sorted(ranks_of.items(), key=lambda group: len(group[1]), reverse=True)


def odd(values: Mapping[int, T]) -> list[int]:
    """Return the ranks that differ from the majority. Without a majority, return all ranks.

    >>> odd({0: "a", 1: "a", 2: "b"}), odd({0: "a", 1: "b"}), odd({0: "a", 1: "a"})
    ([2], [0, 1], [])
    """
    by_size = groups(values)
    if len(by_size) < 2:
        return []
    largest = by_size[0][1]
    second = by_size[1][1]
    if len(second) == len(largest):
        return sorted(values)
    return sorted(set(values) - set(largest))


def named(values: Mapping[int, T]) -> tuple[int, int]:
    """Return the rank that an error names for different values, and the rank to compare it with.

    The named rank is the lowest one outside the largest group, and the other rank is the lowest one in it. If groups
    are equally large, the one with the lowest rank counts as the largest. So one of both is always the lowest rank.

    >>> named({0: "a", 1: "b"}), named({0: "a", 1: "b", 2: "b"}), named({0: "a", 1: "a", 2: "b", 3: "b"})
    ((1, 0), (0, 1), (2, 0))
    """
    largest = groups(values)[0][1]
    return min(set(values) - set(largest)), largest[0]
