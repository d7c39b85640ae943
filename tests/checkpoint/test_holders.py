"""Holders of shards: every rank computes the boxes of all ranks, from compact tables that ranks exchange."""

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


def expected_plan(boxes_of_ranks: list[dict[str, Any]]) -> tuple[dict[str, list[Chunk]], list[int]]:
    """Compute the save plan from its definition: the holder with the least to write writes a piece.

    Pieces with the fewest holders are assigned first. Among those, evenly sharded tensors come first.
    """
    # Find the ranks that hold each piece that is not empty.
    holders_of_piece: dict[tuple[str, Any], list[int]] = {}
    for rank, boxes in enumerate(boxes_of_ranks):
        for name, (dtype, offsets, sizes) in boxes.items():
            if all(sizes):
                piece = (name, (tuple(offsets), tuple(sizes), dtype))
                holders_of_piece.setdefault(piece, []).append(rank)

    # Find the tensors with equal shards on all ranks, and equally many holders of each shard.
    sizes_of: dict[str, set[tuple[int, ...]]] = {}
    holders_of: dict[str, set[int]] = {}
    for boxes in boxes_of_ranks:
        for name, (_, _, sizes) in boxes.items():
            sizes_of.setdefault(name, set()).add(tuple(sizes))
    for (name, _), ranks in holders_of_piece.items():
        holders_of.setdefault(name, set()).add(len(ranks))
    even = set()
    for name, sizes in sizes_of.items():
        if len(sizes) == 1 and len(holders_of.get(name, ())) == 1:
            even.add(name)

    def order(item: tuple[tuple[str, Any], list[int]]) -> Any:
        (name, box), ranks = item
        return len(ranks), name not in even, (name, box)

    # Assign the pieces in this order. Each piece is appended to the file of its writer.
    load = [0] * len(boxes_of_ranks)
    placed = []
    for (name, box), ranks in sorted(holders_of_piece.items(), key=order):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        placed.append((name, box, writer, load[writer]))
        num_values = int(np.prod(box[1], dtype=np.int64))
        load[writer] += num_values * ITEM_BYTES[box[2]]
    # Ranks without a piece write no file, so file numbers skip them.
    has_file = [size > 0 for size in load]
    numbers = [sum(has_file[:rank]) for rank in range(len(load))]
    chunks: dict[str, list[Chunk]] = {}
    for name, box, writer, begin in placed:
        chunks.setdefault(name, []).append(Chunk(box[0], box[1], numbers[writer], begin))
    return chunks, load


def check_plan(boxes_of_ranks: list[dict[str, Any]], held_tensors: dict[str, holders.Held]) -> None:
    chunks, load = expected_plan(boxes_of_ranks)
    stored, planned_load = save_plan.share_out(held_tensors, len(boxes_of_ranks))

    assert planned_load == load
    for name, tensor in stored.items():
        planned = sorted(tensor.chunks(), key=lambda chunk: chunk.offsets)
        expected = sorted(chunks.get(name, []), key=lambda chunk: chunk.offsets)
        assert planned == expected

    # Each rank writes its pieces in the order of their places in the file.
    plan = save_plan.SavePlan(stored, load, held_tensors)
    for rank in range(len(boxes_of_ranks)):
        pieces = []
        for name, chunks_of_tensor in chunks.items():
            for chunk in chunks_of_tensor:
                if chunk.file == plan.file_numbers[rank]:
                    pieces.append((chunk.begin, name))
        assert plan.names_of(rank) == [name for _, name in sorted(pieces)]


@settings(max_examples=150)
@given(st.data())
def test_plan_follows_its_definition(data: st.DataObject) -> None:
    """Meshes of up to three axes, pipeline stages, any splits, uneven sizes and replicas."""
    axes = [data.draw(st.integers(1, 3)) for _ in range(3)]
    stages = data.draw(st.integers(1, 2))
    strides = [axes[1] * axes[2], axes[2], 1]
    ranks_per_stage = axes[0] * strides[0]

    # Draw the tensors of each stage.
    tables: list[dict[str, Any]] = []
    for stage in range(stages):
        table = {}
        for number in range(data.draw(st.integers(1, 5))):
            dims = data.draw(st.integers(0, 2))
            shape = [data.draw(st.integers(1, 7)) for _ in range(dims)]
            # Any axes of the mesh split any dimension, in any order.
            splits = []
            for axis in data.draw(st.permutations(range(3))):
                if dims and data.draw(st.booleans()):
                    split_dim = data.draw(st.integers(0, dims - 1))
                    splits.append([axes[axis], strides[axis], split_dim])
            # The second stage may share tensors with the first stage, such as tied embeddings.
            shared = data.draw(st.booleans()) and stage and f"t{number}" in tables[0]
            dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int64"]))
            if shared:
                table[f"t{number}"] = tables[0][f"t{number}"]
            else:
                table[f"s{stage}.t{number}"] = [dtype, shape, splits]
        tables.append(table)

    # Derive the boxes of each rank from the tensors of its stage.
    table_of_rank = [rank // ranks_per_stage for rank in range(stages * ranks_per_stage)]
    held_tensors = holders.held_by_all(tables, table_of_rank)
    boxes_of_ranks = []
    for rank, number in enumerate(table_of_rank):
        boxes = {}
        for name, (dtype, shape, rule) in tables[number].items():
            offsets, sizes = holders.boxes_of(shape, rule, np.array([rank]))
            boxes[name] = [dtype, offsets[0].tolist(), sizes[0].tolist()]
        boxes_of_ranks.append(boxes)

    check_plan(boxes_of_ranks, held_tensors)


PLACEMENTS: list[list[Any]] = [
    [Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()],
    [Shard(0), Shard(0)], [_StridedShard(0, split_factor=2), Shard(0)],
]  # fmt: skip


def on_ranks(rank: int) -> dict[str, Any]:
    world = init_device_mesh("cpu", (3, 2), mesh_dim_names=("fsdp", "tp"))
    tensors: dict[str, torch.Tensor] = {"plain": torch.zeros(3), "scalar": torch.tensor(1.0)}

    # Tensors with every layout, in shapes that split evenly, unevenly, or leave ranks without rows.
    layouts = itertools.product(PLACEMENTS, [(8, 4), (7, 5), (2, 2)])
    for number, (placements, shape) in enumerate(layouts):
        # Build FSDP over tensor parallelism from local tensors. It requires even shards.
        if isinstance(placements[0], _StridedShard):
            if shape[0] % 6:
                continue
            local = torch.zeros(shape[0] // 6, shape[1])
            tensors[str(number)] = DTensor.from_local(local, world, placements)
            continue
        full = torch.arange(float(np.prod(shape))).view(shape)
        tensors[str(number)] = distribute_tensor(full, world, placements)
    for axis in ("fsdp", "tp"):
        tensors[axis] = distribute_tensor(torch.zeros(5, 4), world[axis], [Shard(0)])
    # Only some ranks hold this tensor, as with the tensors of a pipeline stage.
    if rank < 2:
        tensors["only two"] = torch.zeros(4)

    # Every rank finds the same holders without communication.
    table = holders.table_of(tensors)
    held_tensors = holders.find_holders(tensors)
    boxes = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        offsets, sizes = holders.box_of(tensor)
        boxes[name] = [dtype, list(offsets), list(sizes)]
    boxes_of_ranks = all_gather_json(boxes)
    check_plan(boxes_of_ranks, held_tensors)
    return {"table": table, "boxes": boxes_of_ranks}


def test_ranks_compute_the_boxes_of_all_ranks() -> None:
    answers = run_ranks(6, on_ranks)
    tables = [answer["table"] for answer in answers]
    for table in tables:
        table.pop("only two", None)

    assert all(table == tables[0] for table in tables), (
        "tables differ, although ranks have the same layout"
    )
    assert not any(isinstance(rule, dict) for _, _, rule in tables[0].values()), (
        "every split of this mesh has a compact rule"
    )


def odd_mesh(rank: int) -> dict[str, Any]:
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [[0, 3], [1, 2]])
    local = torch.zeros(4 if rank in (0, 3) else 3, 2)
    tensor = DTensor.from_local(local, mesh, [Shard(0), Replicate()], shape=(7, 2), stride=(2, 1))
    held_tensors = holders.find_holders({"a": tensor})
    offsets, sizes = holders.box_of(tensor)
    boxes_of_ranks = all_gather_json({"a": ["float32", list(offsets), list(sizes)]})
    check_plan(boxes_of_ranks, held_tensors)
    return holders.table_of({"a": tensor})


def test_ranks_in_an_unusual_order_list_their_boxes() -> None:
    rules = [table["a"][2] for table in run_ranks(4, odd_mesh)]
    # In this rank order, the compact rule still describes ranks 0 and 1. Ranks 2 and 3 must list boxes.
    assert [isinstance(rule, dict) for rule in rules] == [False, False, True, True]


@pytest.mark.parametrize("second", [["float32", [3], []], ["float16", [2], []]])
def test_different_tensors_with_one_name_are_rejected(second: list[Any]) -> None:
    with pytest.raises(
        CheckpointError, match=r"model.a cannot be saved: it is .* on rank 2, and .* before"
    ):
        holders.held_by_all([{"model.a": ["float32", [2], []]}, {"model.a": second}], [0, 0, 1])


def test_unsupported_dtype_is_rejected() -> None:
    with pytest.raises(
        CheckpointError, match="model.a cannot be saved: its type complex64 is not one of"
    ):
        holders.held_by_all([{"model.a": ["complex64", [2], []]}], [0])


VALUES = st.sampled_from(
    [["float32", [4, 2], []], ["float32", [4, 2], [[2, 1, 0]]], ["bfloat16", [3], []]]
)
NAMES = st.one_of(
    st.builds(
        "{}.{}.{}".format,
        st.sampled_from(["model.layers", "a", ""]),
        st.integers(0, 12),
        st.sampled_from("wv"),
    ),
    st.sampled_from(
        ["embed", "a.007.w", "a.1", "1.w", "..2..w", "a.0.b.1.c", "a.-1.w", "a.\uff11.w"]
    ),
)


@given(st.dictionaries(NAMES, VALUES, max_size=30))
def test_folded_table_round_trips(table: dict[str, list[Any]]) -> None:
    assert holders.unfold(json.loads(json.dumps(holders.fold(table)))) == table


def test_folded_table_does_not_grow_with_layers() -> None:
    def folded_length(layers: int) -> int:
        table = {}
        for layer in range(layers):
            for name in ("wq", "wk", "w1"):
                table[f"model.layers.{layer}.{name}"] = ["float32", [8, 8], [[2, 1, 0]]]
        return len(json.dumps(holders.fold(table)))

    # 900 layers fold to the same three entries as 2 layers, with two more digits in each layer range.
    assert folded_length(900) <= folded_length(2) + 2 * 3


def grids_per_layer(ep: int, shards: int, layers: int) -> int:
    """Return the number of grids per layer of an MoE with experts on ``ep`` ranks and rows split unevenly."""
    rows = 2 * shards - 5
    ranks = ep * shards
    expert_rule = [[ep, 1, 0], [shards, ep, 1]]
    kinds = {
        "w1": ([ep * 2, rows, 4], expert_rule),
        "w2": ([ep * 2, rows - 3, 4], expert_rule),
        "wo": ([ranks - 7, 4], [[ranks, 1, 0]]),
        "norm": ([rows], [[ranks, 1, 0]]),
    }
    table = {}
    for layer in range(layers):
        for name, (shape, rule) in kinds.items():
            table[f"layers.{layer}.{name}"] = ["float32", shape, rule]
    stored, load = save_plan.share_out(holders.held_by_all([table], [0] * ranks), ranks)

    # Every value is written once, in 4 bytes.
    values_per_layer = sum(int(np.prod(shape)) for shape, _ in kinds.values())
    assert sum(load) == 4 * values_per_layer * layers
    return sum(len(tensor.grids) for tensor in stored.values()) // layers


def test_mesh_with_uneven_splits_has_few_grids_per_tensor() -> None:
    """The number of grids per layer does not grow with ranks or layers.

    Sorting boxes by only one dimension would create separate grids for each expert rank.
    """
    assert grids_per_layer(96, 40, 12) <= grids_per_layer(6, 7, 2)
