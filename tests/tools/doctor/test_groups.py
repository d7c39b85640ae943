"""Groups of ranks partition all ranks along each axis as the mesh does. Pairs cover all neighbours."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
from patients import loaded

from shardtrain.distributed.mesh import AXES
from shardtrain.tools.doctor import groups

degrees = st.lists(st.integers(1, 4), min_size=len(AXES), max_size=len(AXES))


@given(degrees)
def test_each_axis_divides_the_ranks_into_groups_that_differ_only_along_it(chosen):
    sizes = dict(zip(AXES, chosen, strict=True))
    rank_groups = groups.of_mesh(sizes)
    assert set(rank_groups) == {axis for axis, degree in sizes.items() if degree > 1}

    for axis, groups_of_axis in rank_groups.items():
        grouped_ranks = sorted(itertools.chain.from_iterable(groups_of_axis))
        assert grouped_ranks == list(range(math.prod(chosen)))

        number = AXES.index(axis)
        for group in groups_of_axis:
            along_axis = []
            along_others = set()
            for rank in group:
                place = list(_place(rank, chosen))
                along_axis.append(place.pop(number))
                along_others.add(tuple(place))
            assert along_axis == list(range(sizes[axis]))
            assert len(along_others) == 1


def _place(rank, shape):
    """Return the coordinates of a rank in row-major order, like ``init_device_mesh``."""
    place = []
    for degree in reversed(shape):
        rank, here = divmod(rank, degree)
        place.append(here)
    return place[::-1]


@given(st.integers(2, 40))
def test_pairs_are_disjoint_in_a_round_and_join_neighbours(size):
    rounds = groups.pairs(range(size))
    covered = set()
    for pairs in rounds:
        ranks = list(itertools.chain.from_iterable(pairs))
        covered |= set(ranks)
        assert len(ranks) == len(set(ranks))
        assert all((b - a) % size == 1 for a, b in pairs)

    if size >= 3:
        assert covered == set(range(size))


def test_hosts_yield_groups_within_and_across_without_duplicates(tmp_path):
    hosts = ["a", "a", "b", "b"]
    rank_groups = groups.of_run(loaded(tmp_path), hosts)
    assert rank_groups == {
        "dp_shard (all ranks)": [[0, 1, 2, 3]],
        "one host": [[0, 1], [2, 3]],
        "across hosts": [[0, 2], [1, 3]],
    }

    rank_groups = groups.of_run(loaded(tmp_path, parallelism={"tensor_parallel_degree": 2}), hosts)
    assert set(rank_groups) == {"dp_shard (across hosts)", "tp (one host)", "all ranks"}


def test_a_mesh_that_does_not_fit_keeps_the_groups_of_hosts(tmp_path):
    rank_groups = groups.of_run(
        loaded(tmp_path, parallelism={"tensor_parallel_degree": 2}), ["a"] * 3
    )
    assert rank_groups == {"all ranks": [[0, 1, 2]]}
    assert groups.of_run(loaded(tmp_path), ["a"]) == {}
