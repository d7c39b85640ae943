"""The optimizers of examples/optimizers: equal to their references, on every mesh, and after a resume."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import (
    Ended,
    Result,
    assert_bitwise,
    assert_same_numbers,
    make_run,
    run_tiny,
    tiny_config,
    train_whole,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardtrain import optim
from shardtrain.checkpoint import manifest, tensors
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.config import load as load_config
from shardtrain.config.schema import Config, Optimizer
from shardtrain.ops.dtensor import to_full
from shardtrain.optim import build, set_learning_rate, state_tensors
from shardtrain.train import trainer, validation
from shardtrain.train.preflight import meta_model
from shardtrain.utils.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "examples" / "optimizers"
NAMES = ("lion", "schedule_free", "normuon", "dion")
STEPS = 5
SHAPES = {
    "embed.weight": (11, 6),
    "layers.0.wq.weight": (6, 6),
    "layers.0.w1.weight": (9, 6),
    "layers.0.w2.weight": (6, 9),
    "layers.0.experts.w1": (4, 5, 6),
    "layers.0.norm.weight": (6,),
}
MATRICES = [name for name in SHAPES if "layers" in name and "norm" not in name]
RATES = [1e-2 / (step + 1) for step in range(STEPS)]
DECAY = 0.3
SAME = 1e-12
"""Tolerance in float64, whose rounding is 1e-16. Five steps and a QR decomposition amplify it."""


def options(name: str, **more: Any) -> Optimizer:
    path = str(FOLDER / f"{name}.py")
    return Optimizer(name=path, lr=1e-2, weight_decay=DECAY, eps=1e-3, **more)


def values(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, shape in SHAPES.items():
        drawn[name] = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return drawn


def gradients(step: int) -> dict[str, Tensor]:
    return values(1000 + step, scale=0.1)


def trained(name: str, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = build(parameters.items(), options(name))
    state_tensors(optimizer, parameters.items())
    for step, rate in enumerate(RATES):
        for key, gradient in gradients(step).items():
            parameter = parameters[key]
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        set_learning_rate(optimizer, rate)
        optimizer.step()
    return optimizer


def trained_here(name: str) -> dict[str, Tensor]:
    parameters = {key: nn.Parameter(value) for key, value in values(0).items()}
    trained(name, parameters)
    return {key: parameter.detach() for key, parameter in parameters.items()}


def trained_by(reference: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    for step, rate in enumerate(RATES):
        for key, gradient in gradients(step).items():
            parameters[key].grad = gradient
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=0, atol=SAME, msg=key)


def test_lion_equals_the_published_implementation() -> None:
    lion = pytest.importorskip("lion_pytorch")
    parameters = {key: nn.Parameter(value) for key, value in values(0).items()}
    reference = lion.Lion(
        parameters.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=DECAY, use_triton=False
    )
    trained_by(reference, parameters)

    assert_close(trained_here("lion"), {key: p.detach() for key, p in parameters.items()})


def test_schedule_free_equals_the_published_implementation() -> None:
    """The training weights and the evaluation weights are both equal."""
    schedulefree = pytest.importorskip("schedulefree")
    parameters = {key: nn.Parameter(value) for key, value in values(0).items()}
    reference = schedulefree.AdamWScheduleFree(
        parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=DECAY, foreach=False
    )
    reference.train()
    trained_by(reference, parameters)
    ours = {key: nn.Parameter(value) for key, value in values(0).items()}
    optimizer = trained("schedule_free", ours)

    assert_close(ours, parameters)

    reference.eval()
    averages = {key: optimizer.evaluation_weights(p) for key, p in ours.items()}  # type: ignore[attr-defined]
    assert_close(averages, parameters)
    assert not torch.equal(averages["embed.weight"], ours["embed.weight"])


def newton_schulz(matrix: Tensor) -> Tensor:
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


def normuon_reference(weight: Tensor, steps: list[Tensor]) -> Tensor:
    """Algorithm 1 of the paper, with Nesterov momentum like the built-in Muon."""
    momentum = torch.zeros_like(weight)
    mean_square = torch.zeros(len(weight), 1, dtype=weight.dtype)
    for gradient, rate in zip(steps, RATES, strict=True):
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = newton_schulz(0.05 * gradient + 0.95 * momentum)
        mean_square = 0.95 * mean_square + 0.05 * direction.square().mean(1, keepdim=True)
        update = direction / (mean_square.sqrt() + 1e-8)
        size = 0.2 * rate * math.sqrt(weight.numel()) / update.norm()
        weight = weight * (1 - rate * DECAY) - size * update
    return weight


def dion_reference(weight: Tensor, steps: list[Tensor]) -> Tensor:
    """Algorithm 1 of the paper on one device, with a quarter of the full rank."""
    rows, columns = weight.shape
    momentum = torch.zeros_like(weight)
    rank = math.ceil(min(weight.shape) / 4)
    q = torch.randn(columns, rank, generator=torch.Generator().manual_seed(0)).double()
    for gradient, rate in zip(steps, RATES, strict=True):
        buffer = momentum + gradient
        p = torch.linalg.qr(buffer @ q).Q
        r = buffer.T @ p
        momentum = buffer - (1 - 0.95) * p @ r.T
        q = r / (r.norm(dim=0) + 1e-8)
        update = math.sqrt(rows / columns) * p @ q.T
        weight = weight * (1 - rate * DECAY) - rate * update
    return weight


REFERENCES = {"normuon": normuon_reference, "dion": dion_reference}


@pytest.mark.parametrize("name", REFERENCES)
def test_matrices_get_the_update_of_the_paper(name: str) -> None:
    ours = trained_here(name)
    for key in MATRICES:
        if len(SHAPES[key]) == 3:
            # Dion draws one Q per stack of matrices, which the reference does not.
            continue
        steps = [gradients(step)[key] for step in range(STEPS)]
        expected = REFERENCES[name](values(0)[key], steps)
        # Newton-Schulz amplifies rounding up to 485-fold
        torch.testing.assert_close(ours[key], expected, rtol=0, atol=1e-10, msg=key)


@pytest.mark.parametrize("name", REFERENCES)
def test_other_parameters_get_the_update_of_adamw(name: str) -> None:
    parameters = {key: nn.Parameter(value) for key, value in values(0).items()}
    reference = torch.optim.AdamW(
        parameters.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=DECAY
    )
    trained_by(reference, parameters)
    ours = trained_here(name)

    for key in set(SHAPES) - set(MATRICES):
        torch.testing.assert_close(ours[key], parameters[key].detach(), rtol=0, atol=SAME)


PLACEMENTS = {
    "rows over 4": ((4,), [Shard(0)]),
    "columns over 4": ((4,), [Shard(-1)]),
    "rows, copies": ((2, 2), [Shard(0), Replicate()]),
    "rows and columns": ((2, 2), [Shard(0), Shard(-1)]),
    "stacks and rows": ((2, 2), [Shard(0), Shard(1)]),
}


def placed(rank: int, name: str) -> dict[str, dict[str, Tensor]]:
    results = {}
    for case, (mesh_shape, wanted) in PLACEMENTS.items():
        mesh = init_device_mesh("cpu", mesh_shape)
        parameters = {}
        for key, value in values(0).items():
            placements: list[Any] = []
            for placement in wanted:
                if isinstance(placement, Shard):
                    dim = min(placement.dim % value.ndim, value.ndim - 1)
                    placement = Shard(dim)
                placements.append(placement)
            # like FSDP, split the only dimension of a vector once
            if value.ndim == 1:
                placements = [Shard(0), *[Replicate()] * (len(wanted) - 1)]
            parameters[key] = nn.Parameter(distribute_tensor(value, mesh, placements))
        trained(name, parameters)
        results[case] = {key: to_full(p.detach()) for key, p in parameters.items()}
    return results


@pytest.mark.parametrize("name", NAMES)
def test_placements_change_no_number(name: str) -> None:
    """Covers dimensions that ranks cannot divide evenly."""
    expected = trained_here(name)
    for results in run_ranks(4, placed, name):
        for case, result in results.items():
            for key, tensor in expected.items():
                where = f"{key}, {case}"
                torch.testing.assert_close(result[key], tensor, rtol=0, atol=1e-10, msg=where)


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "hsdp": (4, {"data_parallel_replicate_degree": 2}),
    "tp": (2, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}),
    "pp": (2, {"pipeline_parallel_degree": 2}),
    "zero1": (2, {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True}),
    "fsdp tp": (4, {"tensor_parallel_degree": 2}),
}
# Lion updates by a sign, which rounding changes for gradients near zero, so its rate is small.
RATE = {"lion": 1e-5, "schedule_free": 1e-2, "normuon": 1e-2, "dion": 1e-2}


def tiny(name: str, **sections: dict[str, Any]) -> Config:
    optimizer = {"name": str(FOLDER / f"{name}.py"), "lr": RATE[name], "eps": 1e-3}
    training = {"max_norm": 0.1, **sections.pop("training", {})}
    return tiny_config(optimizer=optimizer, training=training, **sections)


@functools.cache
def one_process(name: str) -> Result:
    return run_tiny(1, tiny(name, training={"local_batch_size": 8}), steps=3)[0]


FIRST = [("lion", "fsdp"), ("schedule_free", "zero1"), ("normuon", "tp"), ("dion", "tp")]
ALL = [(name, mesh) for name in NAMES for mesh in MESHES]


@pytest.mark.parametrize(
    ("name", "mesh"), cases(FIRST, nightly=[case for case in ALL if case not in FIRST])
)
def test_meshes_change_no_number(name: str, mesh: str) -> None:
    num_ranks, parallelism = MESHES[mesh]
    training = {"local_batch_size": 8} if mesh in ("tp", "pp") else {}
    config = tiny(name, parallelism=parallelism, training=training)
    expected = one_process(name)

    for result in run_tiny(num_ranks, config, 3):
        # a pipeline stage has a part of the weights
        initial = {key: expected.initial[key] for key in result.initial}
        assert_same_numbers(result, dataclasses.replace(expected, initial=initial))
        for key, weight in result.final.items():
            # gradients are added in another order
            torch.testing.assert_close(weight, expected.final[key], atol=1e-5, rtol=0, msg=key)


def complete(name: str, folder: Path, steps: int = 4, **sections: dict[str, Any]) -> Config:
    return tiny(
        name,
        job={"dump_folder": str(folder)},
        training={"steps": steps, "local_batch_size": 4, **sections.pop("training", {})},
        checkpoint={"enable": True, "interval": 2},
        **sections,
    )


def straight_and_resumed(rank: int, root: Path, name: str, mesh: str) -> tuple[Ended, Ended]:
    straight = train_whole(rank, complete(name, root / "straight"))
    train_whole(rank, complete(name, root / "killed"), stop_after=3)
    parallelism = MESHES[mesh][1]
    batch = {"local_batch_size": 8} if mesh == "tp" else {}
    resumed = complete(name, root / "killed", parallelism=parallelism, training=batch)
    return straight, train_whole(rank, resumed)


RESUMES = [(name, mesh) for name in NAMES for mesh in ("fsdp", "tp")]


@pytest.mark.parametrize(
    ("name", "mesh"),
    cases(
        [("schedule_free", "fsdp")],
        nightly=[case for case in RESUMES if case != ("schedule_free", "fsdp")],
    ),
)
def test_run_resumes_on_any_mesh(tmp_path: Path, name: str, mesh: str) -> None:
    for straight, resumed in run_ranks(2, straight_and_resumed, tmp_path, name, mesh):
        assert straight.error is None
        assert resumed.error is None
        assert len(resumed.losses) == 2
        if mesh == "fsdp":
            assert resumed.losses == straight.losses[2:]
            assert_bitwise(resumed.weights, straight.weights)
            assert_bitwise(resumed.optimizer, straight.optimizer)
        # float32 sums in a different order on other meshes
        assert resumed.losses == pytest.approx(straight.losses[2:], abs=1e-5)


def evaluated(rank: int, config: Config) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    """Return the averages after a run of 4 steps, their validation loss, and the training weights."""
    run = make_run(rank, config)
    for _ in range(config.training.steps):
        trainer.step(run)
    parameters = run.runner.parameters()
    before = {name: to_full(p.detach()).clone() for name, p in parameters.items()}
    if config.parallelism.shard_optimizer_states:
        # ZeRO-1 shards z differently than the parameters, so let the run compute the averages
        with run.evaluation_weights():
            averages = {name: to_full(p.detach()).clone() for name, p in parameters.items()}
    else:
        averages = {}
        for name, p in parameters.items():
            z = run.optimizer.state[p]["z"]
            # y = 0.1 z + 0.9 x, with training weights y and averages x
            averages[name] = ((to_full(p.detach()) - 0.1 * to_full(z)) / 0.9).clone()
    with torch.no_grad():
        for name, p in parameters.items():
            if isinstance(p, DTensor):
                p.copy_(distribute_tensor(averages[name], p.device_mesh, p.placements))
            else:
                p.copy_(averages[name])
    stream = validation.open_dataloader(config, run.mesh)
    evaluation = validation.evaluate(run.runner, stream, run.mesh, 2)
    assert evaluation is not None
    return averages, evaluation.loss, before


@pytest.mark.parametrize("mesh", cases(["fsdp"], nightly=["zero1", "tp", "hsdp"]))
def test_validation_and_checkpoints_use_the_evaluation_weights(tmp_path: Path, mesh: str) -> None:
    num_ranks, parallelism = MESHES[mesh]
    data = tiny("lion").training
    config = complete(
        "schedule_free",
        tmp_path,
        parallelism=parallelism,
        training={"local_batch_size": 8 if mesh == "tp" else 8 // num_ranks},
        validation={
            "enable": True,
            "dataset": "text",
            "dataset_path": data.dataset_path,
            "freq": 4,
            "steps": 2,
            "seq_len": 64,
            "local_batch_size": 2,
        },
    )
    (averages, loss, training_weights) = run_ranks(num_ranks, evaluated, config)[0]

    for ended in run_ranks(num_ranks, train_whole, config):
        assert ended.error is None
        # a complete run may choose CPU kernels that round differently
        for name, weight in training_weights.items():
            torch.testing.assert_close(ended.weights[name], weight, rtol=0, atol=1e-6, msg=name)

    path = tmp_path / "checkpoint" / "step-4"
    stored = manifest.read(path)
    for name, average in averages.items():
        weight = tensors.read_whole(stored, path, WEIGHTS_PREFIX + name)
        # dividing by 0.9 rounds differently
        torch.testing.assert_close(weight, average, rtol=0, atol=1e-6, msg=name)
        weight = tensors.read_whole(stored, path, f"optimizer.{name}.training_weight")
        assert torch.equal(weight, ended.weights[name])
    line = (tmp_path / "validation.jsonl").read_text().splitlines()[-1]

    assert json.loads(line)["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.nightly(
    "parameters in bfloat16",
    by="tests/optim/test_example_optimizers.py::test_meshes_change_no_number",
)
def test_parameters_in_bfloat16_learn(name: str) -> None:
    config = tiny(name, training={"dtype": "bfloat16", "local_batch_size": 4})
    if name == "lion":
        config = dataclasses.replace(
            config, optimizer=dataclasses.replace(config.optimizer, lr=1e-3)
        )
    losses = run_tiny(2, config, steps=8)[0].losses

    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("name", NAMES)
def test_example_passes_the_checks_before_a_run(name: str) -> None:
    optim.check_own(options(name))


def test_averages_of_training_weights_are_rejected() -> None:
    config = tiny("schedule_free", training={"ema_decay": 0.9})
    errors, parameters = meta_model.build(config)
    assert parameters is None
    assert "training.ema_decay=0.9 averages weights that" in str(errors[0])


def test_rank_fraction_out_of_range_is_rejected() -> None:
    path = str(FOLDER / "dion.py")
    arguments = ["--job.custom_config_module", path, "--optimizer.name", path]
    loaded = load_config(None, [*arguments, "--optimizer.dion_rank_fraction", "1.5"])
    errors, _ = meta_model.build(loaded.config)
    assert "optimizer.dion_rank_fraction=1.5 must be above 0 and at most 1" in str(errors[0])


BROKEN = """
import torch

class Broken(torch.optim.SGD):
    def evaluation_weights(self, parameter):
        {body}

def build(param_groups, options):
    return Broken(param_groups, lr=options.lr)
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return parameter.sum()", "do not have the shape of the parameter"),
        ("return parameter.detach().mul_(2)", "changes the parameter in evaluation_weights"),
    ],
)
def test_wrong_evaluation_weights_are_rejected(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN.format(body=body))
    with pytest.raises(ConfigError, match=message):
        optim.check_own(Optimizer(name=str(path)))
