"""Initial weights: a function of (seed, name, block), bitwise equal on any mesh, with the right statistics."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardtrain.layout import Draw, Layout
from shardtrain.ops import init_weights
from shardtrain.ops.dtensor import local_slices, local_tensor

LAYOUT = Layout(first=("embed",), layers="layers", last=("head",))
NORMAL = Draw("normal", std=0.02)
TRUNCATED = Draw("truncated_normal", std=0.5, cutoff=1.0)


def drawn(
    shape: tuple[int, ...], draw: Draw = NORMAL, name: str = "w", seed: int = 0, dtype=torch.float32
):
    tensor = torch.empty(shape, dtype=dtype)
    init_weights.draw_(tensor, name, draw, seed)
    return tensor


def test_equal_seed_and_name_are_bitwise_equal() -> None:
    assert torch.equal(drawn((300, 500)), drawn((300, 500)))


def test_seeds_names_and_blocks_have_different_numbers() -> None:
    weight = drawn((300, 500))
    assert not torch.equal(weight, drawn((300, 500), name="v"))
    assert not torch.equal(weight, drawn((300, 500), seed=1))

    rows_per_block = init_weights.BLOCK_NUMEL // 500
    first = weight[:rows_per_block]
    second = weight[rows_per_block : 2 * rows_per_block]

    assert not torch.equal(first, second)
    # 5 sigma of 65,500 pairs
    assert abs(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]) < 0.02


def test_weights_of_a_seed_never_change() -> None:
    """If a new version drew different numbers, runs could not be reproduced."""
    digest = hashlib.sha256(
        drawn((70, 1000), name="layers.0.attn.wq.weight", seed=42).numpy().tobytes()
    ).hexdigest()
    expected = torch.empty(65, 1000)
    seed = int.from_bytes(
        hashlib.blake2b(b"42/layers.0.attn.wq.weight/0", digest_size=7).digest(), "big"
    )
    expected.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
    tail = torch.empty(5, 1000)
    seed = int.from_bytes(
        hashlib.blake2b(b"42/layers.0.attn.wq.weight/1", digest_size=7).digest(), "big"
    )
    tail.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))

    assert digest == hashlib.sha256(torch.cat([expected, tail]).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1, 17982163893102248868])
def test_any_seed_is_accepted(seed: int) -> None:
    assert torch.isfinite(drawn((3, 3), seed=seed)).all()


def test_ones_and_zeros() -> None:
    assert torch.equal(drawn((5,), Draw("ones")), torch.ones(5))
    assert torch.equal(drawn((5, 2), Draw("zeros")), torch.zeros(5, 2))


def test_normal_has_its_mean_and_standard_deviation() -> None:
    values = drawn((1000, 1000), Draw("normal", std=0.3)).double()
    # five standard errors for a million numbers: 5 * 0.3 / 1000 (mean), divided by sqrt(2) (std)
    assert abs(values.mean()) < 1.5e-3
    assert abs(values.std() - 0.3) < 1.1e-3
    assert values.abs().max() > 4 * 0.3  # not truncated


@pytest.mark.parametrize("cutoff", [1.0, 2.0, 3.0])
def test_truncated_normal_stays_within_its_cutoff_and_has_its_variance(cutoff: float) -> None:
    weights = drawn((1000, 1000), Draw("truncated_normal", std=0.5, cutoff=cutoff))
    values = weights.double() / 0.5

    assert values.abs().max() <= cutoff * (1 + 1e-6)  # float32 rounding
    assert values.abs().max() > 0.98 * cutoff

    # variance of a truncated normal distribution; five sigma of the mean of a million numbers
    density = math.exp(-(cutoff**2) / 2) / math.sqrt(2 * math.pi)
    variance = 1 - 2 * cutoff * density / math.erf(cutoff / math.sqrt(2))
    assert abs(values.mean()) < 5e-3
    assert abs(values.var() - variance) < 5e-3 * variance + 2e-3


def test_bfloat16_parameter_is_the_rounded_float32_one() -> None:
    for draw in (NORMAL, TRUNCATED):
        assert torch.equal(
            drawn((200, 500), draw, dtype=torch.bfloat16), drawn((200, 500), draw).bfloat16()
        )


@pytest.mark.parametrize("shape", [(7,), (1, 1), (61, 7), (3, 200_000), (5, 4, 3), (0, 4)])
def test_every_shape_is_filled(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, float("nan"))
    init_weights.draw_(tensor, "w", NORMAL, 0)
    assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("draw", [NORMAL, TRUNCATED, Draw("uniform", std=0.5)])
def test_blocks_transformed_together_match_single_ones(draw, monkeypatch) -> None:
    one_by_one = drawn((700, 1000), draw)
    monkeypatch.setattr(init_weights, "is_accelerator", lambda _: True)
    for together in (1, 200_000, 1 << 22):  # one, several and all of the eleven blocks
        monkeypatch.setattr(init_weights, "GROUP_NUMEL", together)
        assert torch.equal(drawn((700, 1000), draw), one_by_one)


SHAPES = [(61, 7), (7, 61), (64, 8), (3, 5), (61,), (2, 3, 5)]


def _check_plain_placements(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for shape in SHAPES:
        for draw in (NORMAL, TRUNCATED):
            full = drawn(shape, draw)
            cases = [(mesh, [Shard(dim)]) for dim in range(len(shape))]
            cases += [(grid, [Replicate(), Shard(dim)]) for dim in range(len(shape))]
            cases += [(grid, [Shard(dim), Replicate()]) for dim in range(len(shape))]
            cases += [(grid, [Shard(0), Shard(dim)]) for dim in range(len(shape))]
            for device_mesh, placements in cases:
                shard = distribute_tensor(torch.full(shape, float("nan")), device_mesh, placements)
                init_weights.draw_(shard, "w", draw, 0)
                part = full[local_slices(shard)]
                assert torch.equal(local_tensor(shard), part), (shape, placements)
                assert torch.equal(
                    distribute_tensor(full, device_mesh, placements).to_local(), part
                )


def _check_fsdp_over_tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for out_features, in_features in ((61, 7), (7, 61), (64, 8), (3, 5)):
        full = drawn((out_features, in_features))
        for style in (ColwiseParallel(), RowwiseParallel()):
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(in_features, out_features, bias=False))
            parallelize_module(model, mesh["tp"], {"0": style})
            fully_shard(model, mesh=mesh["dp"])
            model.to_empty(device="cpu")
            init_weights.draw_(model[0].weight, "w", NORMAL, 0)
            local = local_tensor(model[0].weight)
            assert torch.equal(local, full[local_slices(model[0].weight)])
            # the shards of all ranks cover each number once
            parts = [None] * 4
            torch.distributed.all_gather_object(parts, (local_slices(model[0].weight), local))
            covered = torch.zeros_like(full)
            rebuilt = torch.zeros_like(full)
            for slices, part in parts:
                covered[slices] += 1
                rebuilt[slices] = part
            assert torch.equal(rebuilt, full)
            assert torch.equal(covered, torch.ones_like(full))


def _check_meshes(rank: int) -> None:
    _check_plain_placements(rank)
    _check_fsdp_over_tensor_parallel(rank)


def test_weights_are_bitwise_equal_on_every_mesh_also_with_uneven_sizes(monkeypatch) -> None:
    # small blocks, so shard boundaries are within blocks; forked ranks inherit the value
    monkeypatch.setattr(init_weights, "BLOCK_NUMEL", 20)
    run_ranks(4, _check_meshes)


def test_first_matching_rule_is_used() -> None:
    rules = {
        "layers.*.w": Draw("normal", std=1.0),
        "layers.*.*": Draw("zeros"),
        "embed": Draw("ones"),
    }
    plan = init_weights.plan(["layers.0.w", "layers.0.b", "embed"], rules, LAYOUT, 2)

    assert [plan[name].distribution for name in ("layers.0.w", "layers.0.b", "embed")] == [
        "normal",
        "zeros",
        "ones",
    ]


def test_parameter_without_a_rule_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"layers\.0\.b"):
        init_weights.plan(["layers.0.b"], {"embed": Draw("ones")}, LAYOUT, 2)


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        ("none", [1.0, 1.0, 1.0]),
        ("layer", [2**-0.5, 4**-0.5, 22**-0.5]),
        ("total", [24**-0.5, 24**-0.5, 24**-0.5]),
    ],
)
def test_depth_scales_the_standard_deviation(depth: str, expected: list[float]) -> None:
    names = ["layers.0.w", "layers.1.w", "layers.10.w"]
    plan = init_weights.plan(
        names, {"layers.*.w": Draw("normal", std=1.0, depth=depth)}, LAYOUT, 12
    )
    assert [plan[name].std for name in names] == pytest.approx(expected)
