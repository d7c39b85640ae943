"""Gradient clipping: every mesh computes the norm of the full gradient, and ``max_norm`` limits the update."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import make_run, tiny_config, whole

from shardtrain.distributed import LOSS_AXES
from shardtrain.distributed.grad_clip import gradient_norm, scale_gradients
from shardtrain.ops.dtensor import local_tensor, to_full
from shardtrain.train import trainer
from shardtrain.utils.errors import NumericalError

REPLICATE = {"data_parallel_replicate_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
MESHES = {
    1: [{}],
    2: [{}, REPLICATE, TENSOR],
    4: [
        {},
        REPLICATE,
        TENSOR,
        {**REPLICATE, **TENSOR},
        {**REPLICATE, "shard_optimizer_states": True},
    ],
}


def _gradient_norms(rank: int, meshes: list[dict]) -> list[tuple[float, float]]:
    """Return the package's norm and the float64 norm of the full gradient, before and after scaling by 0.25."""
    pairs = []
    for parallelism in meshes:
        run = make_run(
            rank, tiny_config(parallelism=parallelism, training={"global_batch_size": -1})
        )
        weight = torch.tensor(1 / 64.0 / 2)
        run.runner.forward_backward([next(run.dataloader)], weight)
        parameters = list(run.runner.parameters().values())
        for factor in (1.0, 0.25):
            scale_gradients(parameters, factor)
            full = torch.cat([to_full(p.grad).double().flatten() for p in parameters])
            pairs.append(
                (gradient_norm(parameters, run.mesh).item(), torch.linalg.vector_norm(full).item())
            )
    return pairs


@pytest.mark.parametrize("num_ranks", MESHES)
def test_norm_is_that_of_the_full_gradient_on_every_mesh(num_ranks: int) -> None:
    by_rank = run_ranks(num_ranks, _gradient_norms, MESHES[num_ranks])
    assert all(pairs == by_rank[0] for pairs in by_rank)  # bitwise equal on all ranks

    pairs = by_rank[0]
    for norm, expected in pairs:
        assert norm == pytest.approx(expected, rel=1e-12)  # squares are summed in float64
        assert norm > 0.01
    for before, after in zip(pairs[::2], pairs[1::2], strict=True):
        assert after[0] == pytest.approx(before[0] / 4, rel=1e-6)


def _norms_of_a_wide_layer(rank: int, parallelism: dict, dim: int) -> list[float]:
    """Return the gradient norm and loss of each of two steps of a one-layer model."""
    sizes = {
        "dim": dim,
        "ffn_dim": 4 * dim,
        "num_layers": 1,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": dim // 8,
    }
    config = tiny_config(
        model={"overrides": sizes},
        parallelism=parallelism,
        training={"seq_len": 16, "local_batch_size": 2, "global_batch_size": 4, "max_norm": 0.1},
    )
    run = make_run(rank, config)
    norms_and_losses = []
    for _ in range(2):
        outcome = trainer.step(run)
        norms_and_losses += [
            outcome.grad_norm,
            run.mesh.sum(outcome.loss_sum.double(), over=LOSS_AXES).item(),
        ]
    return norms_and_losses


@pytest.mark.parametrize("dim", cases([768], [2048]))
def test_norm_of_a_wide_layer_does_not_depend_on_the_mesh(dim: int) -> None:
    # 9 and 64 million numbers, like a layer of a 1B model. Sums of squares in float32 would be off by 1e-4 and 1e-3,
    # depending on the mesh, and so would the clipped update. The gradients themselves differ by about 1e-7.
    [alone] = run_ranks(1, _norms_of_a_wide_layer, {}, dim)
    for parallelism in ({}, TENSOR):
        for result in run_ranks(2, _norms_of_a_wide_layer, parallelism, dim):
            assert result == pytest.approx(alone, rel=1e-6)


def _disagree(rank: int, parallelism: dict, damage: str) -> tuple[str, bool]:
    """Change a gradient of rank 1 after the reduction. Return the error, and True if weights are unchanged."""
    run = make_run(rank, tiny_config(parallelism=parallelism))
    before = {name: local_tensor(p).detach().clone() for name, p in run.runner.parameters().items()}
    reduce = run.runner.forward_backward

    def damaged(batches, weight):
        loss = reduce(batches, weight)
        if rank == 1:
            # damage the gradient of a replicated weight on one rank: NaN, or a large finite number
            gradient = local_tensor(run.runner.parameters()["norm.weight"].grad).view(-1)
            gradient[:1] = math.nan if damage == "nan" else gradient[:1].abs() * 1e3 + 1.0
        return loss

    run.runner.forward_backward = damaged
    message = ""
    try:
        trainer.step(run)
    except NumericalError as error:
        message = str(error)
    after = run.runner.parameters()
    is_unchanged = True
    for name, weight in before.items():
        is_unchanged &= torch.equal(local_tensor(after[name]), weight)
    return message, is_unchanged


@pytest.mark.parametrize("damage", ["nan", "finite"])
@pytest.mark.parametrize(
    ("num_ranks", "parallelism"), [(2, REPLICATE), (4, REPLICATE), (2, TENSOR)]
)
def test_replica_with_a_different_gradient_stops_all_ranks_at_the_same_step(
    num_ranks, parallelism, damage
) -> None:
    results = run_ranks(num_ranks, _disagree, parallelism, damage)
    assert len({message for message, _ in results}) == 1
    for message, unchanged in results:
        assert unchanged
        assert message.startswith("step 1: ")
        assert "rank 1" in message
        assert ("is not finite" in message) == (damage == "nan")


def _changes(rank: int, parallelism: dict) -> list[tuple[float, float]]:
    """For each max_norm, return the reported norm and the distance that SGD with rate 1 moves the weights."""
    norms_and_changes = []
    for max_norm in (0.01, 0.05, 1e6):
        config = tiny_config(
            parallelism=parallelism,
            training={"max_norm": max_norm},
            optimizer={"lr": 1.0},
            lr_scheduler={"warmup_steps": 0},
        )
        run = make_run(rank, config)
        run.optimizer = torch.optim.SGD(run.runner.optimizer_parameters().values(), lr=1.0)
        before = whole(run)
        outcome = trainer.step(run)
        moved = sum(
            (weight - before[name]).double().square().sum().item()
            for name, weight in whole(run).items()
        )
        norms_and_changes.append((outcome.grad_norm, math.sqrt(moved) / outcome.lr))
    return norms_and_changes


@pytest.mark.parametrize(
    ("num_ranks", "parallelism"),
    [
        (1, {}),
        (2, {}),
        (2, TENSOR),
        (2, {**REPLICATE, "shard_optimizer_states": True}),
        (4, TENSOR),
    ],
)
def test_larger_gradients_are_clipped_to_max_norm(num_ranks: int, parallelism: dict) -> None:
    for (norm_a, a), (norm_b, b), (norm_c, c) in run_ranks(num_ranks, _changes, parallelism):
        assert norm_a == norm_b == norm_c > 0.05  # the reported norm is the one before clipping
        # rounding: weights near 1 have a precision of 1e-7, and the clipping rule has an eps of
        # 1e-6
        assert a == pytest.approx(0.01, rel=1e-3)
        assert b == pytest.approx(0.05, rel=1e-3)
        assert c == pytest.approx(norm_c, rel=1e-3)  # unchanged, not scaled up


def test_parameters_without_gradient_are_skipped() -> None:
    class Alone:
        device = torch.device("cpu")

        def sum(self, tensor, over):
            assert over == ("pp",)
            return tensor

    with_gradient = torch.ones(3, requires_grad=True)
    without = torch.ones(4, requires_grad=True)
    assert gradient_norm([with_gradient, without], Alone()).item() == 0.0

    scale_gradients([with_gradient, without], 0.5)
    with_gradient.grad = torch.tensor([3.0, 4.0, 0.0])
    assert gradient_norm([with_gradient, without], Alone()).item() == pytest.approx(5.0)

    scale_gradients([with_gradient, without], 0.5)
    assert with_gradient.grad.tolist() == [1.5, 2.0, 0.0]
    assert without.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norm_of_a_nonfinite_gradient_is_not_finite(bad: float) -> None:
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = torch.tensor([1.0, bad, 2.0])

    class Alone:
        device = torch.device("cpu")
        sum = staticmethod(lambda tensor, over: tensor)

    assert not math.isfinite(gradient_norm([parameter], Alone()).item())
