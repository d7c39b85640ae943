"""Which ranks talk to each other: along the axes of the run's mesh, within a host, between hosts, and in pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardtrain.config import Loaded

Groups = dict[str, list[list[int]]]


def of_mesh(sizes: Mapping[str, int]) -> Groups:
    """Groups along each axis of more than one rank; the last axis runs fastest, as in ``parallel.mesh``.

    >>> of_mesh({"dp_shard": 2, "cp": 1, "tp": 2})
    {'dp_shard': [[0, 2], [1, 3]], 'tp': [[0, 1], [2, 3]]}
    """
    size = math.prod(sizes.values())
    stride = math.prod(sizes.values())
    found = {}
    for axis, degree in sizes.items():
        stride //= degree
        if degree > 1:
            firsts = [rank for rank in range(size) if rank // stride % degree == 0]
            found[axis] = [[first + place * stride for place in range(degree)] for first in firsts]
    return found


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
    try:
        sizes = mesh.sizes_of(loaded.config, size)
    except ZeroDivisionError:
        sizes = {}
    found = of_mesh(sizes) if sizes and min(sizes.values()) > 0 and math.prod(sizes.values()) == size else {}
    found["all ranks"] = [list(range(size))]
    alike = len({len(ranks) for ranks in own.values()}) == 1
    if len(own) > 1 and alike:
        found["one host"] = list(own.values())
        found["across hosts"] = [list(ranks) for ranks in zip(*own.values(), strict=True)]
    return _merged({name: groups for name, groups in found.items() if len(groups[0]) > 1})


def _merged(found: Groups) -> Groups:
    """Names of one division joined: ``dp_shard (all ranks)``."""
    names: dict[str, list[str]] = {}
    for name, groups in found.items():
        names.setdefault(str(sorted(groups)), []).append(name)
    return {joined[0] + "".join(f" ({name})" for name in joined[1:]): found[joined[0]] for joined in names.values()}


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
