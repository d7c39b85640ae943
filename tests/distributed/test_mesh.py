"""The mesh: torchtitan's order of axes, adjacent tensor-parallel ranks, and sums over the given axes."""

from __future__ import annotations

import itertools

import pytest
import torch
from ranks import run_ranks
from tiny import tiny_config

from shardtrain.distributed import BATCH_AXES, LOSS_AXES, build
from shardtrain.distributed.mesh import AXES, sizes_of
from shardtrain.distributed.process_group import World

KEYS = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
GRIDS = [
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    {"pp": 2, "dp_replicate": 2, "cp": 2, "dp_shard": 1},
    {"dp_shard": 8},
    {"dp_replicate": 8, "dp_shard": 1},
]


def config_of(degrees: dict[str, int]):
    return tiny_config(parallelism={KEYS[axis]: degree for axis, degree in degrees.items()})


def test_axes_are_in_order_with_tensor_parallel_innermost() -> None:
    assert AXES == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert BATCH_AXES == ("dp_replicate", "dp_shard")
    assert (*BATCH_AXES, "cp") == LOSS_AXES


@pytest.mark.parametrize(
    ("degrees", "world_size", "expected"),
    [
        ({}, 1, (1, 1, 1, 1, 1)),
        ({}, 8, (1, 1, 8, 1, 1)),
        ({"tp": 2}, 8, (1, 1, 4, 1, 2)),
        ({"dp_replicate": 8}, 8, (1, 8, 1, 1, 1)),
        ({"pp": 2, "cp": 2, "tp": 2}, 16, (2, 1, 2, 2, 2)),
        ({"dp_replicate": 2, "dp_shard": 4}, 8, (1, 2, 4, 1, 1)),
    ],
)
def test_dp_shard_gets_the_ranks_that_other_axes_leave(degrees, world_size: int, expected) -> None:
    assert tuple(sizes_of(config_of(degrees), world_size).values()) == expected


def _describe(rank: int) -> list[dict]:
    facts = []
    for degrees in GRIDS:
        mesh = build(config_of(degrees), World(rank, 8, rank, torch.device("cpu")))
        peers = {}
        for axis in mesh.device_mesh.mesh_dim_names:
            peers[axis] = torch.distributed.get_process_group_ranks(mesh.group(axis))
        # A sum of powers of two shows which ranks contributed to it.
        power = torch.tensor(2.0**rank)
        facts_of_mesh = {
            "place": {axis: mesh.rank(axis) for axis in AXES},
            "batch": mesh.rank(*BATCH_AXES),
            "sizes": (mesh.size("tp"), mesh.size(*AXES), mesh.size(*BATCH_AXES)),
            "peers": peers,
            "sums": {axis: mesh.sum(power.clone(), over=(axis,)).item() for axis in AXES},
            "loss_sum": mesh.sum(power.clone(), over=LOSS_AXES).item(),
            "max": mesh.max(torch.tensor(float(rank)), over=AXES).item(),
            "data": mesh.data_mesh().mesh_dim_names,
            "data_size": mesh.data_mesh().size(),
        }
        facts.append(facts_of_mesh)
    return facts


@pytest.fixture(scope="module")
def described() -> list[list[dict]]:
    return run_ranks(8, _describe)


def ranks_that_share(places: list[tuple[int, ...]], rank: int, axes: list[int]) -> list[int]:
    """Return the ranks with the same place as ``rank`` along ``axes``."""
    return [
        peer
        for peer, place in enumerate(places)
        if all(place[axis] == places[rank][axis] for axis in axes)
    ]


@pytest.mark.parametrize("index", range(len(GRIDS)))
def test_ranks_are_in_row_major_order(index: int, described) -> None:
    sizes = {axis: GRIDS[index].get(axis, 1) for axis in AXES}
    places = list(itertools.product(*(range(size) for size in sizes.values())))
    for rank, place in enumerate(places):
        facts = described[rank][index]
        assert tuple(facts["place"].values()) == place
        assert facts["sizes"] == (sizes["tp"], 8, sizes["dp_replicate"] * sizes["dp_shard"])
        assert facts["batch"] == place[1] * sizes["dp_shard"] + place[2]
        for position, axis in enumerate(AXES):
            other_axes = [i for i in range(5) if i != position]
            peers = ranks_that_share(places, rank, other_axes)
            assert facts["sums"][axis] == sum(2.0**peer for peer in peers)
            if sizes[axis] > 1:
                assert facts["peers"][axis] == peers
            else:
                # no group for an axis with one rank
                assert axis not in facts["peers"] or axis == "dp_shard"

        # A loss is summed over all axes except pp, the first, and tp, the last.
        peers = ranks_that_share(places, rank, [0, 4])
        assert facts["loss_sum"] == sum(2.0**peer for peer in peers)
        assert facts["max"] == 7.0


def test_three_dimensional_mesh_matches_the_documented_table(described) -> None:
    """PP 2 x FSDP 2 x TP 2: rank = 4 pp + 2 dp + tp."""
    places = [described[rank][0]["place"] for rank in range(8)]
    table = [(place["pp"], place["dp_shard"], place["tp"]) for place in places]
    assert table == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (0, 1, 1),
        (1, 0, 0),
        (1, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]


def test_fsdp_mesh_begins_with_the_replicate_axis_if_there_is_one(described) -> None:
    axes_of_ranks = [(facts["data"], facts["data_size"]) for facts in described[0]]
    replicate_and_shard = ("dp_replicate", "dp_shard")
    with_context = ("dp_replicate", "dp_shard_cp")

    assert axes_of_ranks == [
        (("dp_shard",), 2),
        (replicate_and_shard, 4),
        (with_context, 4),
        (("dp_shard",), 8),
        (replicate_and_shard, 8),
    ]
