"""Runs with ``training.ema_decay``: PyTorch's averages on every mesh, after a resume, and in validation.

tests/tools/test_use_ema.py has the commands that read averages.
"""

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
    STEPS,
    assert_bitwise,
    make_run,
    shallow_config,
    text_file,
    tiny_config,
    train_whole,
)
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardtrain.checkpoint import manifest, tensors
from shardtrain.checkpoint.manifest import AVERAGES_PREFIX, WEIGHTS_PREFIX
from shardtrain.config import Loaded
from shardtrain.config.rules import check
from shardtrain.config.schema import Config
from shardtrain.train import trainer
from shardtrain.train.preflight import memory_fit
from shardtrain.train.run import Run

DECAY = 0.8
SAME = 1e-6
"""Tolerance of averages on different meshes, whose gradients are added in different orders."""
EXPERTS = {
    "name": "mixtral",
    "overrides": {"moe_ffn_dim": 48, "num_experts": 4, "load_balance_coeff": 1e-2},
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp": (2, {"data_parallel_shard_degree": 2}),
    "dp": (2, {"data_parallel_replicate_degree": 2}),
    "zero": (2, {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True}),
    "tp": (2, {"tensor_parallel_degree": 2}),
    "pp": (2, {"pipeline_parallel_degree": 2}),
    "ep": (2, {"expert_parallel_degree": 2}),
    "fsdp tp": (4, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}),
}


def mesh_config(mesh: str, folder: Path, steps: int = STEPS, **training: Any) -> Config:
    parallelism = MESHES[mesh][1]
    # data-parallel axes split the rows of a step, and other axes read the same rows
    shares = math.prod(
        parallelism.get(f"data_parallel_{kind}_degree", 1) for kind in ("shard", "replicate")
    )
    config = tiny_config(
        job={"dump_folder": str(folder)},
        model=EXPERTS if mesh == "ep" else {},
        parallelism=parallelism,
        # a small rate limits the effect of gradient rounding on the weights
        optimizer={"lr": 1e-3, "eps": 1e-3},
        training={
            "steps": steps,
            "local_batch_size": 8 // shares if mesh != "ep" else 4,
            "ema_decay": DECAY,
            **training,
        },
        lr_scheduler={"total_steps": 2 * STEPS},
        checkpoint={"enable": True, "interval": STEPS},
    )
    if mesh != "ep":
        return config
    # all layers have experts
    sizes = {name: size for name, size in config.model.overrides.items() if name != "ffn_dim"}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, overrides=sizes))


def stored(folder: Path, prefix: str = AVERAGES_PREFIX, step: int = STEPS) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose names have a prefix, by their names without it."""
    path = folder / "checkpoint" / f"step-{step}"
    entries = manifest.read(path)
    stored_tensors = {}
    for name in entries.tensors:
        if name.startswith(prefix):
            short_name = name.removeprefix(prefix)
            stored_tensors[short_name] = tensors.read_whole(entries, path, name)
    return stored_tensors


def averaged_by_pytorch(rank: int, config: Config, steps: int) -> dict[str, Tensor]:
    """Train in one process, and average with PyTorch."""
    run = make_run(
        rank,
        dataclasses.replace(config, training=dataclasses.replace(config.training, ema_decay=None)),
    )
    (model,) = run.runner.parts
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    # its first call copies the initial weights
    averaged.update_parameters(model)
    for _ in range(steps):
        trainer.step(run)
        averaged.update_parameters(model)
    return {name: p.detach().clone() for name, p in averaged.module.named_parameters()}


@functools.cache
def expected(has_experts: bool, steps: int = STEPS) -> dict[str, Tensor]:
    config = mesh_config("one", Path(), steps)
    if has_experts:
        model = mesh_config("ep", Path()).model
        config = dataclasses.replace(config, model=model)
    return run_ranks(1, averaged_by_pytorch, config, steps)[0]


def assert_same(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert actual[name].dtype == torch.float32
        difference = float((actual[name] - tensor).abs().max())
        assert difference <= SAME, f"{name}: {difference}"


@pytest.mark.parametrize(
    "mesh", cases(["fsdp", "pp"], nightly=[m for m in MESHES if m not in ("fsdp", "pp")])
)
def test_averages_equal_those_of_pytorch_in_one_process(mesh: str, tmp_path: Path) -> None:
    ranks, _ = MESHES[mesh]
    for ended in run_ranks(ranks, train_whole, mesh_config(mesh, tmp_path)):
        assert ended.error is None
    assert_same(stored(tmp_path), expected(has_experts=mesh == "ep"))


@pytest.mark.parametrize(
    ("saved", "resumed"),
    cases(
        [("fsdp", "tp")],
        nightly=[("tp", "pp"), ("pp", "one"), ("one", "zero"), ("zero", "fsdp tp")],
    ),
)
def test_resume_on_another_mesh_continues_the_averages(
    saved: str, resumed: str, tmp_path: Path
) -> None:
    for mesh, steps in ((saved, STEPS), (resumed, 2 * STEPS)):
        for ended in run_ranks(MESHES[mesh][0], train_whole, mesh_config(mesh, tmp_path, steps)):
            assert ended.error is None
    assert_same(stored(tmp_path, step=2 * STEPS), expected(False, 2 * STEPS))


def accepted(config: Config) -> Config:
    options = dataclasses.replace(config.checkpoint, accept_changes=["training.ema_decay"])
    return dataclasses.replace(config, checkpoint=options)


def one_run(folder: Path, steps: int, decay: float | None, accepts: bool = False) -> Any:
    config = mesh_config("one", folder, steps, ema_decay=decay)
    return run_ranks(1, train_whole, accepted(config) if accepts else config)[0]


def test_other_decay_must_be_accepted_and_continues_the_averages(tmp_path: Path) -> None:
    assert one_run(tmp_path, STEPS, DECAY).error is None
    before = stored(tmp_path)
    refused = one_run(tmp_path, STEPS + 1, 0.5)
    assert "training.ema_decay: 0.8 -> 0.5" in str(refused.error)
    assert one_run(tmp_path, STEPS + 1, 0.5, accepts=True).error is None

    # The next update of the averages uses the new decay.
    weights = stored(tmp_path, WEIGHTS_PREFIX, STEPS + 1)
    after = stored(tmp_path, step=STEPS + 1)
    assert_same(after, {name: before[name].lerp(weights[name], 0.5) for name in before})


def test_averages_that_are_switched_on_start_with_the_loaded_weights(tmp_path: Path) -> None:
    assert one_run(tmp_path, STEPS, None).error is None
    assert not stored(tmp_path)
    before = stored(tmp_path, WEIGHTS_PREFIX)
    assert one_run(tmp_path, STEPS + 1, DECAY, accepts=True).error is None

    weights = stored(tmp_path, WEIGHTS_PREFIX, STEPS + 1)
    after = stored(tmp_path, step=STEPS + 1)
    assert_same(after, {name: before[name].lerp(weights[name], 1 - DECAY) for name in before})


def test_averages_that_are_switched_off_are_dropped(tmp_path: Path) -> None:
    assert one_run(tmp_path, STEPS, DECAY).error is None
    assert one_run(tmp_path, STEPS + 1, None, accepts=True).error is None
    assert stored(tmp_path)
    assert not stored(tmp_path, step=STEPS + 1)


def one_skipped_step(
    rank: int, config: Config, on_device: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Skip the second of three steps. Return the averages of the run, and the same averages by hand."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "decides_on_device", on_device)
        run = make_run(rank, config)
        parameters = run.runner.parameters()
        by_hand = {name: p.detach().clone() for name, p in parameters.items()}
        work = run.runner.forward_backward

        def spoiled(*inputs: Any) -> Tensor:
            loss = work(*inputs)
            if run.state.step == 1:
                next(iter(parameters.values())).grad.mul_(float("nan"))
            return loss

        patch.setattr(run.runner, "forward_backward", spoiled)
        for step in range(3):
            trainer.step(run)
            if step != 1:
                for name, parameter in parameters.items():
                    by_hand[name] = by_hand[name].lerp(parameter.detach(), 1 - DECAY)
    assert (run.state.step, run.state.updates) == (3, 2)
    assert run.moving_average is not None
    return run.moving_average.averages, by_hand


@pytest.mark.parametrize("on_device", [False, True])
def test_skipped_steps_do_not_update_the_averages(on_device: bool) -> None:
    config = tiny_config(
        training={"local_batch_size": 8, "ema_decay": DECAY, "nonfinite_policy": "skip"},
        optimizer={"implementation": "fused"},
    )
    ((averages, by_hand),) = run_ranks(1, one_skipped_step, config, on_device)

    assert_same(averages, by_hand)


def test_only_adapters_are_averaged(tmp_path: Path) -> None:
    config = mesh_config("one", tmp_path)
    config = dataclasses.replace(
        config,
        lora=dataclasses.replace(config.lora, enable=True, rank=4, random_base=True),
    )
    (ended,) = run_ranks(1, train_whole, config)

    assert ended.error is None

    averages = stored(tmp_path)
    assert averages
    assert all("lora_" in name for name in averages)


def validated(folder: Path, use_ema: bool, mesh: str = "one") -> float:
    folder.mkdir()
    held_out = folder / "held_out.txt"
    held_out.write_text(Path(text_file()).read_text()[:1000])
    config = mesh_config(mesh, folder)
    validation = dataclasses.replace(
        config.validation,
        enable=True,
        freq=STEPS,
        dataset="text",
        dataset_path=str(held_out),
        seq_len=64,
        local_batch_size=2,
        use_ema=use_ema,
    )
    for ended in run_ranks(
        MESHES[mesh][0], train_whole, dataclasses.replace(config, validation=validation)
    ):
        assert ended.error is None
    line = (folder / "validation.jsonl").read_text().splitlines()[-1]
    return float(json.loads(line)["loss"])


def test_validation_evaluates_the_averages(tmp_path: Path) -> None:
    plain = validated(tmp_path / "plain", False)
    averaged = validated(tmp_path / "averaged", True)
    assert abs(plain - averaged) > 1e-4
    # the validation did not change the weights
    assert_bitwise(
        stored(tmp_path / "plain", WEIGHTS_PREFIX), stored(tmp_path / "averaged", WEIGHTS_PREFIX)
    )


@pytest.mark.parametrize("mesh", cases(["fsdp"], nightly=["tp", "pp", "zero"]))
def test_validation_of_averages_agrees_on_meshes(mesh: str, tmp_path: Path) -> None:
    one_process = validated(tmp_path / "one", True)
    # float32 sums in a different order
    assert validated(tmp_path / mesh, True, mesh) == pytest.approx(one_process, abs=1e-5)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a decay of 1": (
        {"training": {"ema_decay": 1.0}},
        "training.ema_decay=1.0 must be above 0 and below 1",
    ),
    "a decay of 0": (
        {"training": {"ema_decay": 0.0}},
        "training.ema_decay=0.0 must be above 0 and below 1",
    ),
    "no number": (
        {"training": {"ema_decay": float("nan")}},
        "training.ema_decay=nan must be a finite number",
    ),
    "no user": (
        {"training": {"ema_decay": 0.9}},
        "training.ema_decay=0.9 has no effect without a checkpoint or a validation",
    ),
    "no averages": (
        {"validation": {"use_ema": True}},
        "validation.use_ema=true requires training.ema_decay",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_one_line(name: str) -> None:
    sections, message = WRONG[name]
    problems = [str(problem) for problem in check(Loaded(tiny_config(**sections)))]
    assert any(message in problem and "\n" not in problem for problem in problems), problems


def test_averages_count_as_memory_and_storage() -> None:
    without = shallow_config()
    config = shallow_config(training={"ema_decay": DECAY})
    parameters = [memory_fit.ParameterMemory(1000, tensor=False, expert=False, trained=True)]

    for count in (
        lambda c: memory_fit.state_bytes(c, 1, parameters),
        lambda c: memory_fit.checkpoint_bytes(c, parameters),
    ):
        assert count(config) - count(without) == 4000
