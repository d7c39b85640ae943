"""One training step: normalization by targets, clipping, and steps without targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from once import made_once
from ranks import run_ranks
from tiny import make_run, shallow_config, whole
from torch import Tensor

from shardtrain import data
from shardtrain.config.schema import Config
from shardtrain.data.batch import IGNORE
from shardtrain.distributed import LOSS_AXES
from shardtrain.ops.dtensor import to_full
from shardtrain.train import trainer

NO_CLIP = 1e9
SAME = 1e-6
"""Losses are about 6 and gradients below 1. The tolerance is two units in the last place of a float32 loss."""

SAME_NORM = 5e-6
"""Tolerance for the root of a sum of 100,000 squares in a different order."""


@dataclass(frozen=True)
class Step:
    """A step on one rank: loss per target over all ranks, targets, norm, and the full gradients of the update."""

    loss: float
    own_tokens: int
    tokens: int
    grad_norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    sample_ids: list[int]


def config(mesh: str, max_norm: float = NO_CLIP, **training: Any) -> Config:
    parallelism = {
        "tp": {"tensor_parallel_degree": 2},
        "ddp": {"data_parallel_replicate_degree": 2},
    }.get(mesh, {})
    rows = {"one": 8, "tp": 8, "accumulation": 2}.get(mesh, 4)
    return shallow_config(
        training={"local_batch_size": rows, "max_norm": max_norm, **training},
        parallelism=parallelism,
    )


def one_step(rank: int, config: Config, num_kept: Mapping[int, int] | int = 64) -> Step:
    """Run one step in which each row keeps its first ``kept[sample]`` targets."""
    run = make_run(rank, config)
    ids = []
    gradients = {}
    pull = run.dataloader.__next__
    update = run.runner.update

    class Masked:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def __next__(self) -> data.Batch:
            batch = pull()
            targets = batch.targets_BT.clone()
            for row, sample in enumerate(batch.sample_ids_B.tolist()):
                targets[row, num_kept if isinstance(num_kept, int) else num_kept[sample] :] = IGNORE
            ids.extend(batch.sample_ids_B.tolist())
            return dataclasses.replace(batch, targets_BT=targets)

    def watched(optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in run.runner.parameters().items():
            assert parameter.grad is not None
            gradients[name] = to_full(parameter.grad).clone()
        update(optimizer)

    stream, run.dataloader = run.dataloader, Masked()  # type: ignore[assignment]
    run.runner.update = watched  # type: ignore[method-assign]
    outcome = trainer.step(run)
    loss = run.mesh.sum(outcome.loss_sum.double(), over=("pp", *LOSS_AXES)).item() / max(
        1, outcome.global_tokens
    )
    return Step(
        loss,
        outcome.local_tokens,
        outcome.global_tokens,
        outcome.grad_norm,
        gradients,
        whole(run),
        ids,
    )


def mesh_steps(
    rank: int, meshes: tuple[str, ...], masks: dict[str, Any]
) -> dict[tuple[str, str], Step]:
    """One step per mesh and mask, by their names, and one with clipped gradients."""
    steps = {}
    for mesh in meshes:
        for name, mask in masks.items():
            steps[mesh, name] = one_step(rank, config(mesh), mask)
        steps[mesh, "clipped"] = one_step(rank, config(mesh, max_norm=0.01))
    return steps


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Step]]:
    """Steps by mesh and mask, for each rank."""
    return made_once(tmp_path_factory, "trainer-steps", make_steps)


def make_steps() -> list[dict[tuple[str, str], Step]]:
    first = run_ranks(1, one_step, config("one"))[0].sample_ids
    masks = {
        "none": 64,
        "uneven": {sample: 1 + 9 * place for place, sample in enumerate(first)},
        "one rank": {sample: 30 if place < 4 else 0 for place, sample in enumerate(first)},
        "all": 0,
    }
    one_process = run_ranks(1, mesh_steps, ("one", "accumulation"), masks)[0]
    return [
        {**one_process, **two} for two in run_ranks(2, mesh_steps, ("fsdp", "ddp", "tp"), masks)
    ]


@pytest.mark.parametrize("mesh", ["accumulation", "fsdp", "ddp", "tp"])
@pytest.mark.parametrize("mask", ["none", "uneven", "one rank"])
def test_every_target_has_equal_weight_on_any_rank(steps: Any, mesh: str, mask: str) -> None:
    expected = steps[0]["one", mask]
    for rank in steps:
        step = rank[mesh, mask]
        assert step.tokens == expected.tokens
        assert abs(step.loss - expected.loss) <= SAME
        assert abs(step.grad_norm - expected.grad_norm) <= SAME_NORM
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(step.gradients[name], gradient, atol=SAME, rtol=0, msg=name)


def test_targets_of_these_cases_are_uneven(steps: Any) -> None:
    assert [rank["fsdp", "uneven"].own_tokens for rank in steps] == [
        1 + 10 + 19 + 28,
        37 + 46 + 55 + 64,
    ]
    assert [rank["fsdp", "one rank"].own_tokens for rank in steps] == [120, 0]
    assert [rank["tp", "uneven"].own_tokens for rank in steps] == [260, 260]


@pytest.mark.parametrize("mesh", ["one", "accumulation", "fsdp", "ddp", "tp"])
def test_step_without_targets_is_zero_and_not_nan(steps: Any, mesh: str) -> None:
    for rank in steps:
        step = rank[mesh, "all"]
        assert (step.loss, step.tokens, step.grad_norm) == (0.0, 0, 0.0)
        assert all(not gradient.any() for gradient in step.gradients.values())
        assert all(torch.isfinite(weight).all() for weight in step.weights.values())


@pytest.mark.parametrize("mesh", ["one", "accumulation", "fsdp", "ddp", "tp"])
def test_update_gets_clipped_gradients_and_the_log_the_norm_before(steps: Any, mesh: str) -> None:
    for rank in steps:
        clipped = rank[mesh, "clipped"]
        free = rank[mesh, "none"]
        assert clipped.grad_norm == pytest.approx(free.grad_norm, abs=SAME_NORM)
        assert clipped.grad_norm > 0.1

        total = (
            sum(float(gradient.double().square().sum()) for gradient in clipped.gradients.values())
            ** 0.5
        )
        # the clipping factor has 1e-6 in its divisor, as in PyTorch
        assert total == pytest.approx(0.01, rel=1e-4)

        unclipped = (
            sum(float(gradient.double().square().sum()) for gradient in free.gradients.values())
            ** 0.5
        )
        assert unclipped == pytest.approx(free.grad_norm, rel=1e-6)


def test_model_too_small_for_the_tokenizer_is_rejected() -> None:
    with pytest.raises(
        AssertionError,
        match=r"contains a tokenizer with \d+ ids, and the model has a vocabulary of 64",
    ):
        run_ranks(1, make_run, shallow_config(model={"overrides": {"vocab_size": 64}}))


def test_nonfinite_gradient_is_distinguished_from_a_nonfinite_loss() -> None:
    assert run_ranks(1, bad_gradient) == [
        "step 1: a gradient is not finite: lower optimizer.lr, or check the samples in the rank's log, or set "
        "training.nonfinite_policy=skip; reason: the weights are still those of step 0; the first non-finite gradient "
        "is that of embed.weight (rank 0)"
    ]


def bad_gradient(rank: int) -> str:
    from shardtrain.utils.errors import NumericalError

    run = make_run(rank, config("one"))
    original = run.runner.forward_backward

    def damaged(batches: Any, weight: Tensor) -> Tensor:
        loss = original(batches, weight)
        next(iter(run.runner.parameters().values())).grad[0, 0] = float("nan")  # type: ignore[index]
        return loss

    run.runner.forward_backward = damaged  # type: ignore[method-assign]
    with pytest.raises(NumericalError) as caught:
        trainer.step(run)
    return str(caught.value)
