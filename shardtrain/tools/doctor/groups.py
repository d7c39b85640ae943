"""Groups of ranks to measure: along mesh axes, within a host, between hosts, and in pairs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from shardtrain.config import Loaded

Groups = dict[str, list[list[int]]]


def of_mesh(sizes: Mapping[str, int]) -> Groups:
    """Return the groups along each axis of size > 1.

    The last axis varies fastest, as in ``distributed.mesh``.

    >>> of_mesh({"dp_shard": 2, "cp": 1, "tp": 2})
    {'dp_shard': [[0, 2], [1, 3]], 'tp': [[0, 1], [2, 3]]}
    """
    size = math.prod(sizes.values())
    groups: Groups = {}
    # Neighbors along an axis differ by the product of the sizes of all later axes.
    stride = size
    for axis, degree in sizes.items():
        stride //= degree
        if degree == 1:
            continue
        groups[axis] = []
        for rank in range(size):
            is_first = rank // stride % degree == 0
            if is_first:
                groups[axis].append(list(range(rank, rank + degree * stride, stride)))
    return groups


def of_run(loaded: Loaded, hosts: Sequence[Hashable]) -> Groups:
    """Return all groups to measure. Equal divisions of the ranks are merged under a joined name.

    ``hosts`` contains the name or number of each rank's host. A mesh that does not fit the number
    of ranks is skipped, because the configuration check reports it.
    """
    from shardtrain.distributed import mesh

    size = len(hosts)
    if size < 2:
        return {}

    # Divide the ranks by mesh axes, and into one group of all ranks.
    try:
        sizes = mesh.sizes_of(loaded.config, size)
    except ZeroDivisionError:
        sizes = {}
    divisions: Groups = {}
    if sizes and min(sizes.values()) > 0 and math.prod(sizes.values()) == size:
        divisions = of_mesh(sizes)
    divisions["all ranks"] = [list(range(size))]

    # If all hosts have the same number of ranks, also divide within and across hosts.
    ranks_by_host = list(_ranks_of(hosts).values())
    counts = {len(ranks) for ranks in ranks_by_host}
    if len(ranks_by_host) > 1 and len(counts) == 1:
        divisions["one host"] = ranks_by_host
        divisions["across hosts"] = [list(ranks) for ranks in zip(*ranks_by_host, strict=True)]

    # Join the names of equal divisions, such as "dp_shard (all ranks)". Groups of one rank have nothing
    # to measure.
    names: dict[str, list[str]] = {}
    for name, groups in divisions.items():
        if len(groups[0]) > 1:
            names.setdefault(str(sorted(groups)), []).append(name)
    joined = {}
    for first, *others in names.values():
        suffix = "".join(f" ({name})" for name in others)
        joined[first + suffix] = divisions[first]
    return joined


def _ranks_of(hosts: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    ranks: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return ranks


def pairs(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return two rounds of pairs of neighbors. With an odd number, each round skips one member.

    >>> pairs([0, 1, 2, 3])
    [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]
    """
    # The last member is also the neighbor of the first, if a round does not skip it.
    count = len(members)
    neighbors = [(members[i], members[(i + 1) % count]) for i in range(count)]
    if count % 2:
        neighbors.pop()
    return [neighbors[0::2], neighbors[1::2]]


def pair_rounds(hosts: Sequence[Hashable]) -> dict[str, list[list[tuple[int, int]]]]:
    """Return rounds of pairs within each host, and between the first ranks of neighboring hosts.

    A rank is judged by the faster of its two pairs, so a kind of pair requires at least three ranks.
    """
    ranks_by_host = list(_ranks_of(hosts).values())
    rounds: dict[str, list[list[tuple[int, int]]]] = {}

    # All hosts measure simultaneously: round 1 has the first pairs of every host, and round 2 the second
    # ones.
    first_round, second_round = [], []
    for ranks in ranks_by_host:
        if len(ranks) > 2:
            first, second = pairs(ranks)
            first_round += first
            second_round += second
    if first_round:
        rounds["neighbours"] = [first_round, second_round]

    if len(ranks_by_host) > 2:
        rounds["neighbouring hosts"] = pairs([ranks[0] for ranks in ranks_by_host])
    return rounds
