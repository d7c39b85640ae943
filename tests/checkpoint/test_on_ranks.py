"""Checkpoints of whole runs on two ranks: every rank refuses what one cannot read, and an export is the weights."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from once import made_once
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import Ended, text_file, tiny_config, train_whole

from shardtrain.checkpoint import manifest, weights_file
from shardtrain.config.schema import LRScheduler, Optimizer
from shardtrain.optim.lr_scheduler import learning_rate
from shardtrain.utils.errors import CheckpointError, ConfigError


def run(rank: int, folder: Path, checkpoint: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Ended:
    training = {"steps": 3, "local_batch_size": 4, **sections.pop("training", {})}
    options = {"enable": True, "interval": 2, **(checkpoint or {})}
    return train_whole(
        rank, tiny_config(job={"dump_folder": str(folder)}, training=training, checkpoint=options, **sections)
    )


def spoil(rank: int, root: Path, name: str, how: Any) -> Path:
    """A copy of the good run with its newest checkpoint spoilt by the first rank."""
    folder = root / name
    if rank == 0:
        shutil.copytree(root / "good", folder)
        how(folder / "checkpoint/step-3")
    dist.barrier()
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def all_runs(rank: int, root: Path) -> dict[str, Ended]:
    longer = root / "longer.txt"
    if rank == 0:
        longer.write_text(Path(text_file()).read_text() + " mesh")
    dist.barrier()
    model, four = {"last_save_model_only": True}, {"training": {"steps": 4}}

    def nothing(path: Path) -> None:
        pass

    found = {"good": run(rank, root / "good")}
    for name, how in {
        "shard cut": lambda path: cut(path / "rank-00001.bin"),
        "shard missing": lambda path: (path / "rank-00001.bin").unlink(),
        "manifest missing": lambda path: (path / "manifest.json").unlink(),
    }.items():
        spoilt = spoil(rank, root, name, how)
        found[name] = run(rank, spoilt, {"load_step": 3}, **four)
        found[f"{name}, any step"] = run(rank, spoilt)
    same = spoil(rank, root, "same", nothing)
    found["other data"] = run(rank, same, training={"steps": 4, "dataset_path": str(longer)})
    found["other seed"] = run(rank, same, debug={"seed": 1}, **four)
    found["other width"] = run(rank, same, model={"overrides": {"ffn_dim": 64}}, **four)
    found["fewer layers"] = run(rank, same, model={"overrides": {"num_layers": 1}}, **four)
    found["more layers"] = run(rank, same, model={"overrides": {"num_layers": 3}}, **four)
    found["no such step"] = run(rank, same, {"load_step": 1}, **four)
    found["an older step"] = run(rank, same, {"load_step": 2})
    found["finished"] = run(rank, same)
    found["export"] = run(rank, root / "export", {**model, "export_dtype": "bfloat16"})
    found["export continued"] = run(rank, root / "export", model, **four)
    found["other course"] = run(
        rank, same, optimizer={"lr": 0.02}, lr_scheduler={"min_lr_factor": 0.1}, training={"steps": 4, "max_norm": 0.5}
    )
    found["part accepted"] = run(
        rank, same, {"accept_changes": ["training.max_norm"]}, optimizer={"lr": 0.02}, training={"max_norm": 0.5}
    )
    freed = spoil(rank, root, "freed", nothing)
    found["freed"] = run(
        rank, freed, {"exclude_from_loading": ["optimizer"]}, optimizer={"beta1": 0.5, "lr": 0.02}, **four
    )
    lr = {"optimizer": {"lr": 0.02}}
    changed = spoil(rank, root, "changed", nothing)
    found["accepted"] = run(rank, changed, {"accept_changes": ["optimizer.lr"]}, **lr, **four)
    found["accepted, continued"] = run(rank, changed, **lr, training={"steps": 5})
    found["precision accepted"] = run(
        rank, same, {"accept_changes": ["all"]}, training={"steps": 4, "mixed_precision_param": "float16"}
    )
    if rank == 0:
        forget_scaler(same / "checkpoint/step-4")
    dist.barrier()
    found["scaler missing"] = run(rank, same, training={"steps": 5, "mixed_precision_param": "float16"})
    return found


def forget_scaler(path: Path) -> None:
    """A checkpoint whose facts have lost the loss scaler's state."""
    stored = manifest.read(path)
    facts = {name: value for name, value in stored.facts.items() if name != "scaler"}
    (path / "manifest.json").write_bytes(dataclasses.replace(stored, facts=facts).to_bytes())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "checkpoints", lambda: tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ended]]:
    return made_once(tmp_path_factory, "checkpoints-runs", lambda: run_ranks(2, all_runs, root))


REFUSED = {
    "shard cut": "rank-00001.bin has 1000 bytes instead of",
    "shard missing": "rank-00001.bin cannot be read",
    "manifest missing": "has no such step; use one of 2,",
    "other data": "was trained on other data",
    "other seed": "was trained on other data",
    "other width": "of shape [128, 64], and this run has [64, 64]",
    "fewer layers": "tensors that this run has not, such as model.layers.1.",
    "more layers": "has no model.layers.2.",
    "no such step": "checkpoint.load_step=1: ",
    "export continued": "contains only weights",
    "part accepted": "optimizer.lr: 0.01 -> 0.02",
    "scaler missing": "loss scaler",
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses_in_one_line_and_before_a_step(runs: list[dict[str, Ended]], name: str) -> None:
    for rank in runs:
        error = rank[name].error
        kind = ConfigError if name in ("other data", "other seed", "part accepted") else CheckpointError
        assert isinstance(error, kind) and error.exit_code == kind.exit_code, error
        assert REFUSED[name] in str(error) and "\n" not in str(error)
        assert rank[name].losses == []


@pytest.mark.parametrize("name", ["shard cut", "shard missing", "manifest missing"])
def test_a_run_without_a_known_step_falls_back_to_the_newest_good_one_and_says_so(
    root: Path, runs: list[dict[str, Ended]], name: str
) -> None:
    for rank in runs:
        assert rank[f"{name}, any step"].error is None
        assert rank[f"{name}, any step"].losses == rank["good"].losses[2:]
    log = (root / name / "logs/rank-0.log").read_text()
    damaged = "step-3 has no manifest.json" if name == "manifest missing" else "rank-00001.bin"
    assert damaged in log and "skipped, continuing from step-2" in log


def test_every_option_that_would_change_the_course_is_named_at_once(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        error = rank["other course"].error
        assert isinstance(error, ConfigError) and rank["other course"].losses == []
        changes = [
            "optimizer.lr: 0.01 -> 0.02",
            "lr_scheduler.min_lr_factor: 0.0 -> 0.1",
            "training.max_norm: 1.0 -> 0.5",
        ]
        assert len(error.problems) == len(changes)
        for line, change in zip(error.problems, changes, strict=True):
            assert change in str(line) and f'checkpoint.accept_changes = ["{change.partition(":")[0]}"]' in str(line)


def test_an_accepted_change_takes_effect_and_is_kept_in_later_checkpoints(
    root: Path, runs: list[dict[str, Ended]]
) -> None:
    for rank in runs:
        assert rank["accepted"].error is None and rank["accepted, continued"].error is None, "accepted once for all"
        assert rank["accepted"].lrs == [learning_rate(Optimizer(lr=0.02), LRScheduler(warmup_steps=2), 4, 3)]
        assert rank["precision accepted"].error is None and rank["precision accepted"].scaler["scale"] > 1
        assert rank["freed"].error is None
    history = manifest.read(root / "changed/checkpoint/step-5").facts["accepted_changes"]
    assert [(entry["step"], entry["option"], entry["old"], entry["new"]) for entry in history] == [
        (3, "optimizer.lr", 0.01, 0.02),
        (3, "training.steps", 3, 4),
        (4, "training.steps", 4, 5),
    ]
    assert "training.steps: 3 -> 4" in (root / "changed/logs/rank-0.log").read_text()


def test_a_run_goes_back_to_an_older_step(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        assert rank["an older step"].error is None
        assert rank["an older step"].losses == rank["good"].losses[2:]


def test_a_finished_run_that_is_started_again_has_nothing_to_do(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        assert rank["finished"].error is None and rank["finished"].losses == []
        assert rank["finished"].state == rank["good"].state


def test_an_export_holds_the_weights_of_the_run(root: Path, runs: list[dict[str, Ended]]) -> None:
    weights_file.write(root / "export/checkpoint/step-3", root / "weights.safetensors")
    opened = load_file(root / "weights.safetensors")
    weights = runs[0]["export"].weights
    assert sorted(opened) == sorted(weights)
    for name, weight in weights.items():
        assert torch.equal(opened[name], weight.to(torch.bfloat16)), name
    # the other checkpoint of that run can still be continued
    assert (root / "export/checkpoint/step-2/manifest.json").is_file()
