"""``TokenLossRunner``: a loss of the caller on outputs per token, on meshes and compared with plain PyTorch."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiers import cases
from tiny import tiny_config
from torch.nn import functional as F

from shardtrain import distributed
from shardtrain.distributed import BATCH_AXES
from shardtrain.distributed.context_parallel.cores import splittable_length
from shardtrain.distributed.process_group import World
from shardtrain.distributed.token_runner import TokenLossBatch, with_token_losses
from shardtrain.ops.dtensor import to_full
from shardtrain.train.task_model import build_model

MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "fsdp": (2, {}),
    "tp": (2, {"tensor_parallel_degree": 2}),
    "cp": (2, {"context_parallel_degree": 2}),
    "fsdp tp": (4, {"tensor_parallel_degree": 2}),
    "cp tp": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "pp": (2, {"pipeline_parallel_degree": 2}),
    "fsdp pp": (4, {"pipeline_parallel_degree": 2}),
    "pp tp": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "pp cp": (4, {"pipeline_parallel_degree": 2, "context_parallel_degree": 2}),
    "fsdp cp": (4, {"context_parallel_degree": 2}),
}
DOCUMENTS = (5, 9, 3)
"""Lengths of the packed documents of each micro-batch."""
MICRO_BATCHES = 2
"""Per rank on two data-parallel ranks, and twice as many on one."""


def micro_batch(
    number: int, has_values: bool, length_multiple: int, outputs_of_losses: list[Any]
) -> Any:
    """Return a random micro-batch whose loss appends its outputs to ``outputs_of_losses``."""
    generator = torch.Generator().manual_seed(number)
    length = sum(DOCUMENTS)
    tokens = torch.randint(0, 256, (1, length), generator=generator)
    weights = torch.randn(2, 1, length, generator=generator)
    positions = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
    documents = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))[None]
    temperatures = torch.rand(1, length, generator=generator) + 0.5

    def loss(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """A loss that is not linear in the outputs, and that ignores the padding."""
        values = {name: value[:, :length] for name, value in outputs.items()}
        outputs_of_losses.append({name: value.detach().clone() for name, value in values.items()})
        present = [values[name] for name in ("values", "log_probs", "entropy") if name in values]
        total = (weights[0] * present[0].square()).sum()
        for value in present[1:]:
            total = total + (weights[1] * value).sum()
        return total

    padding = (0, -length % length_multiple)
    return TokenLossBatch(
        F.pad(tokens, padding),
        F.pad(tokens.roll(-1, 1), padding),
        F.pad(positions, padding),
        F.pad(temperatures, padding, value=1.0),
        F.pad(documents, padding, value=9),
        loss=loss,  # type: ignore[arg-type]
    )


def run(rank: int, mesh: str, has_values: bool, trains: bool) -> dict[str, Any]:
    """Run forward or a training step. Return the outputs of this rank's micro-batches and all gradients."""
    num_ranks, degrees = MESHES[mesh]
    config = tiny_config(parallelism={**degrees, "disable_loss_parallel": has_values})
    if has_values:
        task = dataclasses.replace(config.task, name="reward_model")
        config = dataclasses.replace(config, task=task)
    world = World(rank, num_ranks, rank, torch.device("cpu"))
    built_mesh = distributed.build(config, world)
    with_loss = partial(with_token_losses, has_values=has_values)
    built = build_model(config, built_mesh, with_loss=with_loss)
    runner: Any = built.runner

    # This rank's part of the micro-batches of a step.
    multiple = splittable_length(built_mesh.size("tp"), built_mesh)
    count = 2 * MICRO_BATCHES // built_mesh.size(*BATCH_AXES)
    first = built_mesh.rank(*BATCH_AXES) * count
    outputs: list[dict[str, torch.Tensor]] = []
    batches = []
    for number in range(first, first + count):
        batches.append(micro_batch(number, has_values, multiple, outputs))

    gradients = {}
    if trains:
        runner.forward_backward(batches, torch.tensor(1.0))
        gradients = {name: to_full(p.grad).clone() for name, p in runner.parameters().items()}
    else:
        runner.forward_only(batches)
    dist.barrier()

    arrays = []
    for values in outputs:
        arrays.append({name: value.numpy() for name, value in values.items()})
    return {
        "rank": built_mesh.rank(*BATCH_AXES),
        "outputs": arrays if built_mesh.rank("cp", "tp") == 0 else [],
        "gradients": {name: gradient.numpy() for name, gradient in gradients.items()},
    }


def joined(mesh: str, has_values: bool, trains: bool) -> tuple[list[Any], dict[str, Any]]:
    results = run_ranks(MESHES[mesh][0], run, mesh, has_values, trains)
    results.sort(key=lambda result: result["rank"])
    gradients = {}
    for result in results:  # pipeline ranks have different parameters
        gradients |= result["gradients"]
    return [output for result in results for output in result["outputs"]], gradients


@cache
def in_one_process(has_values: bool) -> tuple[list[Any], dict[str, Any]]:
    return joined("one", has_values, trains=True)


DEFAULT = ["tp", "cp", "pp"]


@pytest.mark.parametrize("has_values", [False, True], ids=["log-probabilities", "values"])
@pytest.mark.parametrize(
    "mesh", cases(DEFAULT, nightly=[name for name in MESHES if name not in (*DEFAULT, "one")])
)
def test_losses_of_tokens_do_not_depend_on_the_mesh(mesh: str, has_values: bool) -> None:
    """Outputs, and gradients of a loss that is not linear in them, with padding that only some meshes need."""
    outputs, gradients = joined(mesh, has_values, trains=True)
    expected_outputs, expected_gradients = in_one_process(has_values)
    # float32 rounding in another order; gradients of this loss are up to 100
    torch.testing.assert_close(outputs, expected_outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)


def _by_hand(rank: int) -> tuple[list[Any], dict[str, Any]]:
    """Compute the outputs and gradients of the same model with PyTorch, each document in a separate call."""
    config = tiny_config()
    world = World(0, 1, 0, torch.device("cpu"))
    built = build_model(config, distributed.build(config, world))
    (model,) = built.runner.parts
    outputs: list[Any] = []
    for number in range(2 * MICRO_BATCHES):
        batch = micro_batch(number, False, 1, [])
        logits = []
        start = 0
        for length in DOCUMENTS:
            tokens = batch.tokens_BT[:, start : start + length]
            logits.append(model(tokens, torch.arange(length)[None]))
            start += length
        log_softmax = F.log_softmax(torch.cat(logits, 1) / batch.temperatures_BT[..., None], -1)
        values = {
            "log_probs": log_softmax.gather(2, batch.targets_BT[..., None]).squeeze(2),
            "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
        }
        batch.loss(values).backward()
        outputs.append({name: value.detach().numpy() for name, value in values.items()})
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}  # type: ignore[union-attr]
    return outputs, gradients


def test_outputs_and_gradients_equal_those_of_separate_documents_in_pytorch() -> None:
    ((outputs, gradients),) = run_ranks(1, _by_hand)
    ours, our_gradients = in_one_process(has_values=False)
    torch.testing.assert_close(ours, outputs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_gradients, gradients, rtol=1e-4, atol=1e-4)


def test_forward_only_gives_the_outputs_of_a_training_step() -> None:
    outputs, _ = joined("tp", False, trains=False)
    torch.testing.assert_close(outputs, in_one_process(False)[0], rtol=1e-5, atol=1e-5)
