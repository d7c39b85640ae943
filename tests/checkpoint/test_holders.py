"""Who holds what, computed by every rank for all: the same boxes as the mesh gives, and few words about them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardtrain.checkpoint import holders, save_plan
from shardtrain.checkpoint.collectives import all_gather_json
from shardtrain.checkpoint.grids import Chunk
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.utils.errors import CheckpointError


def expected_plan(said: list[dict[str, Any]]) -> tuple[dict[str, list[Chunk]], list[int]]:
    """The definition, piece by piece: each goes to the holder that has the least to write.

    First those that one rank holds alone, and of these first the tensors of which all ranks have equally much.
    """
    found: dict[tuple[str, Any], list[int]] = {}
    for rank, own in enumerate(said):
        for name, (dtype, offsets, sizes) in own.items():
            if all(sizes):
                found.setdefault((name, (tuple(offsets), tuple(sizes), dtype)), []).append(rank)
    load = [0] * len(said)
    placed = []
    sizes_of: dict[str, set[tuple[int, ...]]] = {}
    holders_of: dict[str, set[int]] = {}
    for own in said:
        for name, (_, _, sizes) in own.items():
            sizes_of.setdefault(name, set()).add(tuple(sizes))
    for (name, _), ranks in found.items():
        holders_of.setdefault(name, set()).add(len(ranks))
    even = {name for name, sizes in sizes_of.items() if len(sizes) == 1 and len(holders_of.get(name, ())) == 1}
    for (name, box), ranks in sorted(found.items(), key=lambda item: (len(item[1]), item[0][0] not in even, item[0])):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        placed.append((name, box, writer, load[writer]))
        load[writer] += int(np.prod(box[1], dtype=np.int64)) * ITEM_BYTES[box[2]]
    numbers = [sum(size > 0 for size in load[:rank]) for rank in range(len(load))]
    chunks: dict[str, list[Chunk]] = {}
    for name, box, writer, begin in placed:
        chunks.setdefault(name, []).append(Chunk(box[0], box[1], numbers[writer], begin))
    return chunks, load


def check(said: list[dict[str, Any]], held: dict[str, holders.Held]) -> None:
    chunks, load = expected_plan(said)
    stored, found_load = save_plan.share_out(held, len(said))
    assert found_load == load
    for name, one in stored.items():
        assert sorted(one.chunks(), key=lambda c: c.offsets) == sorted(chunks.get(name, []), key=lambda c: c.offsets)
    plan = save_plan.SavePlan(stored, load, held)
    for rank in range(len(said)):
        own = [(c.begin, name) for name, cs in chunks.items() for c in cs if c.file == plan.file_numbers[rank]]
        assert plan.names_of(rank) == [name for _, name in sorted(own)]


@settings(max_examples=150)
@given(st.data())
def test_the_plan_is_that_of_the_definition(data: st.DataObject) -> None:
    """Meshes of up to three axes, in stages of a pipeline, any splits, sizes that do not divide, replicas."""
    axes = [data.draw(st.integers(1, 3)) for _ in range(3)]
    stages = data.draw(st.integers(1, 2))
    strides = [axes[1] * axes[2], axes[2], 1]
    per_stage = axes[0] * strides[0]
    tables: list[dict[str, Any]] = []
    for stage in range(stages):
        table = {}
        for number in range(data.draw(st.integers(1, 5))):
            dims = data.draw(st.integers(0, 2))
            shape = [data.draw(st.integers(1, 7)) for _ in range(dims)]
            splits = [
                [axes[axis], strides[axis], data.draw(st.integers(0, dims - 1))]
                for axis in data.draw(st.permutations(range(3)))
                if dims and data.draw(st.booleans())
            ]
            shared = data.draw(st.booleans()) and stage and f"t{number}" in tables[0]
            dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int64"]))
            table[f"t{number}" if shared else f"s{stage}.t{number}"] = (
                tables[0][f"t{number}"] if shared else [dtype, shape, splits]
            )
        tables.append(table)
    table_of_rank = [rank // per_stage for rank in range(stages * per_stage)]
    held = holders.held_by_all(tables, table_of_rank)
    said = []
    for rank, number in enumerate(table_of_rank):
        own = {}
        for name, (dtype, shape, rule) in tables[number].items():
            offsets, sizes = holders.boxes_of(shape, rule, np.array([rank]))
            own[name] = [dtype, offsets[0].tolist(), sizes[0].tolist()]
        said.append(own)
    check(said, held)


PLACEMENTS: list[list[Any]] = [
    [Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()],
    [Shard(0), Shard(0)], [_StridedShard(0, split_factor=2), Shard(0)],
]  # fmt: skip


def on_ranks(rank: int) -> dict[str, Any]:
    world = init_device_mesh("cpu", (3, 2), mesh_dim_names=("fsdp", "tp"))
    found: dict[str, torch.Tensor] = {"plain": torch.zeros(3), "scalar": torch.tensor(1.0)}
    for number, (placements, shape) in enumerate(itertools.product(PLACEMENTS, [(8, 4), (7, 5), (2, 2)])):
        if isinstance(placements[0], _StridedShard):
            if shape[0] % 6:  # as FSDP over tensor parallelism makes it
                continue
            found[str(number)] = DTensor.from_local(torch.zeros(shape[0] // 6, shape[1]), world, placements)
            continue
        found[str(number)] = distribute_tensor(torch.arange(float(np.prod(shape))).view(shape), world, placements)
    for axis in ("fsdp", "tp"):
        found[axis] = distribute_tensor(torch.zeros(5, 4), world[axis], [Shard(0)])
    if rank < 2:  # as one stage of a pipeline
        found["only two"] = torch.zeros(4)
    table = holders.table_of(found)
    held = holders.find_holders(found)
    said = all_gather_json(
        {name: [str(t.dtype).removeprefix("torch."), *map(list, holders.box_of(t))] for name, t in found.items()}
    )
    check(said, held)
    return {"table": table, "said": said}


def test_ranks_compute_what_the_mesh_holds() -> None:
    told = run_ranks(6, on_ranks)
    tables = [{k: v for k, v in one["table"].items() if k != "only two"} for one in told]
    assert all(table == tables[0] for table in tables), "ranks say the same of what they hold differently"
    assert not any(isinstance(rule, dict) for _, _, rule in tables[0].values()), "every split here is one of digits"


def odd_mesh(rank: int) -> dict[str, Any]:
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [[0, 3], [1, 2]])
    local = torch.zeros(4 if rank in (0, 3) else 3, 2)
    found = {"a": DTensor.from_local(local, mesh, [Shard(0), Replicate()], shape=(7, 2), stride=(2, 1))}
    held = holders.find_holders(found)
    check(all_gather_json({"a": ["float32", *map(list, holders.box_of(found["a"]))]}), held)
    return holders.table_of(found)


def test_ranks_in_an_order_of_their_own_say_their_boxes() -> None:
    rules = [table["a"][2] for table in run_ranks(4, odd_mesh)]
    # the digits of ranks 0 and 1 happen to be right, and those of 2 and 3 are not
    assert [isinstance(rule, dict) for rule in rules] == [False, False, True, True]


@pytest.mark.parametrize("second", [["float32", [3], []], ["float16", [2], []]])
def test_tensors_of_one_name_that_differ_are_refused(second: list[Any]) -> None:
    with pytest.raises(CheckpointError, match=r"model.a cannot be saved: it is .* on rank 2, and .* before"):
        holders.held_by_all([{"model.a": ["float32", [2], []]}, {"model.a": second}], [0, 0, 1])


def test_a_type_that_no_checkpoint_holds_is_refused() -> None:
    with pytest.raises(CheckpointError, match="model.a cannot be saved: its type complex64 is not one of"):
        holders.held_by_all([{"model.a": ["complex64", [2], []]}], [0])


VALUES = st.sampled_from([["float32", [4, 2], []], ["float32", [4, 2], [[2, 1, 0]]], ["bfloat16", [3], []]])
NAMES = st.one_of(
    st.builds("{}.{}.{}".format, st.sampled_from(["model.layers", "a", ""]), st.integers(0, 12), st.sampled_from("wv")),
    st.sampled_from(["embed", "a.007.w", "a.1", "1.w", "..2..w", "a.0.b.1.c", "a.-1.w", "a.\uff11.w"]),
)


@given(st.dictionaries(NAMES, VALUES, max_size=30))
def test_a_folded_table_is_the_table(table: dict[str, list[Any]]) -> None:
    assert holders.unfold(json.loads(json.dumps(holders.fold(table)))) == table


def test_a_folded_table_does_not_grow_with_layers() -> None:
    def told(layers: int) -> int:
        names = [f"model.layers.{layer}.{name}" for layer in range(layers) for name in ("wq", "wk", "w1")]
        return len(json.dumps(holders.fold({name: ["float32", [8, 8], [[2, 1, 0]]] for name in names})))

    assert told(900) <= told(2) + 2 * 3  # three lines, whose end has two digits more


def uneven(ep: int, shards: int, layers: int) -> int:
    """Grids of a layer of a mixture whose experts lie on ``ep`` ranks and whose rows are cut unevenly by the others."""
    rows, ranks = 2 * shards - 5, ep * shards
    kinds = {"w1": ([ep * 2, rows, 4], [[ep, 1, 0], [shards, ep, 1]])}
    kinds |= {"w2": ([ep * 2, rows - 3, 4], [[ep, 1, 0], [shards, ep, 1]])}
    kinds |= {"wo": ([ranks - 7, 4], [[ranks, 1, 0]]), "norm": ([rows], [[ranks, 1, 0]])}
    layer = range(layers)
    table = {f"layers.{n}.{name}": ["float32", *kind] for n in layer for name, kind in kinds.items()}
    stored, load = save_plan.share_out(holders.held_by_all([table], [0] * ranks), ranks)
    assert sum(load) == 4 * sum(int(np.prod(shape)) for shape, _ in kinds.values()) * layers
    return sum(len(tensor.grids) for tensor in stored.values()) // layers


def test_a_mesh_that_divides_nothing_evenly_has_few_grids_a_tensor() -> None:
    """Whatever the ranks and layers; an order of one dimension alone gives some for each rank that holds experts."""
    assert uneven(96, 40, 12) <= uneven(6, 7, 2)
