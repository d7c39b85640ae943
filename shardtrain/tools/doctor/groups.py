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
    groups = {}
    # Neighbors along an axis differ by the product of the sizes of all later axes.
    stride = size
    for axis, degree in sizes.items():
        stride //= degree
        if degree > 1:
            firsts = [rank for rank in range(size) if rank // stride % degree == 0]
            groups[axis] = [[first + place * stride for place in range(degree)] for first in firsts]
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
    own = _ranks_of(hosts)

    # Divide the ranks by mesh axes, into one group of all ranks and, if all hosts have the same number of
    # ranks, within and across hosts.
    try:
        sizes = mesh.sizes_of(loaded.config, size)
    except ZeroDivisionError:
        sizes = {}
    fits = sizes and min(sizes.values()) > 0 and math.prod(sizes.values()) == size
    divisions = of_mesh(sizes) if fits else {}
    divisions["all ranks"] = [list(range(size))]
    alike = len({len(ranks) for ranks in own.values()}) == 1
    if len(own) > 1 and alike:
        divisions["one host"] = list(own.values())
        divisions["across hosts"] = [list(ranks) for ranks in zip(*own.values(), strict=True)]

    # Join the names of equal divisions, such as "dp_shard (all ranks)".
    names: dict[str, list[str]] = {}
    for name, groups in divisions.items():
        if len(groups[0]) > 1:
            names.setdefault(str(sorted(groups)), []).append(name)
    return {first + "".join(f" ({name})" for name in others): divisions[first] for first, *others in names.values()}


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
    count = len(members)
    first = [(members[i], members[i + 1]) for i in range(0, count - 1, 2)]
    second = [(members[i], members[(i + 1) % count]) for i in range(1, count if count % 2 == 0 else count - 1, 2)]
    return [first, second]


def pair_rounds(hosts: Sequence[Hashable]) -> dict[str, list[list[tuple[int, int]]]]:
    """Return rounds of pairs within each host, and between the first ranks of neighboring hosts.

    A rank is judged by the faster of its two pairs, so a kind of pair requires at least three ranks.
    """
    own = _ranks_of(hosts)
    found: dict[str, list[list[tuple[int, int]]]] = {}
    within = [pairs(ranks) for ranks in own.values() if len(ranks) > 2]
    if within:
        found["neighbours"] = [[pair for rounds in within for pair in rounds[number]] for number in (0, 1)]
    if len(own) > 2:
        found["neighbouring hosts"] = pairs([ranks[0] for ranks in own.values()])
    return found
