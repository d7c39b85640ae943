"""Which ranks talk to each other: along the axes of the run's mesh, within a host, between hosts, and in pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardtrain.config import Loaded

Groups = dict[str, list[list[int]]]


def of_mesh(sizes: Mapping[str, int]) -> Groups:
    """Groups along each axis of more than one rank; the last axis runs fastest, as in ``distributed.mesh``.

    >>> of_mesh({"dp_shard": 2, "cp": 1, "tp": 2})
    {'dp_shard': [[0, 2], [1, 3]], 'tp': [[0, 1], [2, 3]]}
    """
    size = math.prod(sizes.values())
    groups = {}
    # ranks that are neighbours along an axis are as far apart as the axes behind it have ranks
    stride = size
    for axis, degree in sizes.items():
        stride //= degree
        if degree > 1:
            firsts = [rank for rank in range(size) if rank // stride % degree == 0]
            groups[axis] = [[first + place * stride for place in range(degree)] for first in firsts]
    return groups


def of_run(loaded: Loaded, hosts: Sequence[str]) -> Groups:
    """All groups to be measured, each division of the ranks once, under all its names.

    ``hosts`` are the hosts of the ranks in order. A mesh that does not fit the number of ranks is left out: the
    configuration is refused elsewhere.
    """
    from shardtrain.distributed import mesh

    size = len(hosts)
    if size < 2:
        return {}
    own: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        own.setdefault(host, []).append(rank)

    # The axes of the mesh, all ranks together, and where hosts have equal numbers of ranks, within and across them.
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

    # Names of one division are joined: "dp_shard (all ranks)".
    names: dict[str, list[str]] = {}
    for name, groups in divisions.items():
        if len(groups[0]) > 1:
            names.setdefault(str(sorted(groups)), []).append(name)
    return {first + "".join(f" ({name})" for name in others): divisions[first] for first, *others in names.values()}


def pairs(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Two rounds of pairs in which each member meets its neighbours; an odd number leaves one out of each round.

    >>> pairs([0, 1, 2, 3])
    [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]
    """
    count = len(members)
    first = [(members[i], members[i + 1]) for i in range(0, count - 1, 2)]
    second = [(members[i], members[(i + 1) % count]) for i in range(1, count if count % 2 == 0 else count - 1, 2)]
    return [first, second]


def pair_rounds(hosts: Sequence[str]) -> dict[str, list[list[tuple[int, int]]]]:
    """Rounds of pairs between neighbours of each host, and between the first ranks of neighbouring hosts.

    A rank is judged by its better pair, so it takes three to tell which of a slow pair it is.
    """
    own: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        own.setdefault(host, []).append(rank)
    found: dict[str, list[list[tuple[int, int]]]] = {}
    within = [pairs(ranks) for ranks in own.values() if len(ranks) > 2]
    if within:
        found["neighbours"] = [[pair for rounds in within for pair in rounds[number]] for number in (0, 1)]
    if len(own) > 2:
        found["neighbouring hosts"] = pairs([ranks[0] for ranks in own.values()])
    return found
