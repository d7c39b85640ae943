"""Checkpoints of entire runs on two ranks: all ranks reject what one rank cannot read; exports contain the weights."""

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


def run(
    rank: int, folder: Path, checkpoint: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Ended:
    training = {"steps": 3, "local_batch_size": 4, **sections.pop("training", {})}
    options = {"enable": True, "interval": 2, **(checkpoint or {})}
    job = {"dump_folder": str(folder)}
    config = tiny_config(job=job, training=training, checkpoint=options, **sections)
    return train_whole(rank, config)


def copy_of_good_run(rank: int, root: Path, name: str, damage: Any) -> Path:
    """Copy the good run. Rank 0 damages its newest checkpoint with ``damage``."""
    folder = root / name
    if rank == 0:
        shutil.copytree(root / "good", folder)
        damage(folder / "checkpoint/step-3")
    dist.barrier()
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def all_runs(rank: int, root: Path) -> dict[str, Ended]:
    longer = root / "longer.txt"
    if rank == 0:
        longer.write_text(Path(text_file()).read_text() + " mesh")
    dist.barrier()
    four_steps = {"training": {"steps": 4}}

    def keep(path: Path) -> None:
        pass

    # The run of three steps, with checkpoints of steps 2 and 3.
    runs_by_name = {"good": run(rank, root / "good")}

    # Copies of it whose newest checkpoint is damaged.
    damages = {
        "shard cut": lambda path: cut(path / "rank-00001.bin"),
        "shard missing": lambda path: (path / "rank-00001.bin").unlink(),
        "manifest missing": lambda path: (path / "manifest.json").unlink(),
    }
    for name, damage in damages.items():
        damaged_run = copy_of_good_run(rank, root, name, damage)
        runs_by_name[name] = run(rank, damaged_run, {"load_step": 3}, **four_steps)
        runs_by_name[f"{name}, any step"] = run(rank, damaged_run)

    # Runs that do not fit the checkpoint. They share one copy, because none of them may write to it.
    same = copy_of_good_run(rank, root, "same", keep)
    other_data = {"steps": 4, "dataset_path": str(longer)}
    runs_by_name["other data"] = run(rank, same, training=other_data)
    runs_by_name["other seed"] = run(rank, same, debug={"seed": 1}, **four_steps)
    sizes = {
        "other width": {"ffn_dim": 64},
        "fewer layers": {"num_layers": 1},
        "more layers": {"num_layers": 3},
    }
    for name, overrides in sizes.items():
        runs_by_name[name] = run(rank, same, model={"overrides": overrides}, **four_steps)
    runs_by_name["no such step"] = run(rank, same, {"load_step": 1}, **four_steps)
    runs_by_name["an older step"] = run(rank, same, {"load_step": 2})
    runs_by_name["finished"] = run(rank, same)

    # The last checkpoint has only the weights, so the run cannot resume from it.
    model_only = {"last_save_model_only": True}
    bfloat16 = {**model_only, "export_dtype": "bfloat16"}
    runs_by_name["export"] = run(rank, root / "export", bfloat16)
    runs_by_name["export continued"] = run(rank, root / "export", model_only, **four_steps)

    # Options that change the course of the run
    lr = {"optimizer": {"lr": 0.02}}
    runs_by_name["other course"] = run(
        rank,
        same,
        **lr,
        lr_scheduler={"min_lr_factor": 0.1},
        training={"steps": 4, "max_norm": 0.5},
    )
    accept_max_norm = {"accept_changes": ["training.max_norm"]}
    runs_by_name["part accepted"] = run(
        rank, same, accept_max_norm, **lr, training={"max_norm": 0.5}
    )
    freed = copy_of_good_run(rank, root, "freed", keep)
    new_optimizer = {"beta1": 0.5, "lr": 0.02}
    runs_by_name["freed"] = run(
        rank,
        freed,
        {"exclude_from_loading": ["optimizer"]},
        optimizer=new_optimizer,
        **four_steps,
    )
    changed = copy_of_good_run(rank, root, "changed", keep)
    accept_lr = {"accept_changes": ["optimizer.lr"]}
    runs_by_name["accepted"] = run(rank, changed, accept_lr, **lr, **four_steps)
    runs_by_name["accepted, continued"] = run(rank, changed, **lr, training={"steps": 5})

    # A run that begins to scale its loss, and then continues without the state of the scaler
    accept_all = {"accept_changes": ["all"]}
    float16 = {"mixed_precision_param": "float16"}
    runs_by_name["precision accepted"] = run(
        rank, same, accept_all, training={"steps": 4, **float16}
    )
    if rank == 0:
        remove_scaler(same / "checkpoint/step-4")
    dist.barrier()
    runs_by_name["scaler missing"] = run(rank, same, training={"steps": 5, **float16})
    return runs_by_name


def remove_scaler(path: Path) -> None:
    """Remove the loss scaler's state from a checkpoint."""
    stored = manifest.read(path)
    facts = {name: value for name, value in stored.facts.items() if name != "scaler"}
    (path / "manifest.json").write_bytes(dataclasses.replace(stored, facts=facts).to_bytes())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(
        tmp_path_factory, "checkpoints", lambda: tmp_path_factory.mktemp("checkpoints")
    )


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
    "fewer layers": "tensors that this run does not have, such as model.layers.1.",
    "more layers": "has no model.layers.2.",
    "no such step": "checkpoint.load_step=1: ",
    "export continued": "contains only weights",
    "part accepted": "optimizer.lr: 0.01 -> 0.02",
    "scaler missing": "loss scaler",
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_rejects_in_one_line_before_the_first_step(
    runs: list[dict[str, Ended]], name: str
) -> None:
    is_config_error = name in ("other data", "other seed", "part accepted")
    kind = ConfigError if is_config_error else CheckpointError
    for rank in runs:
        error = rank[name].error
        assert isinstance(error, kind), error
        assert error.exit_code == kind.exit_code
        assert REFUSED[name] in str(error)
        assert "\n" not in str(error)
        assert rank[name].losses == []


@pytest.mark.parametrize("name", ["shard cut", "shard missing", "manifest missing"])
def test_damaged_newest_checkpoint_is_skipped_with_a_log_line(
    root: Path, runs: list[dict[str, Ended]], name: str
) -> None:
    for rank in runs:
        assert rank[f"{name}, any step"].error is None
        assert rank[f"{name}, any step"].losses == rank["good"].losses[2:]

    log = (root / name / "logs/rank-0.log").read_text()
    damaged = "step-3 has no manifest.json" if name == "manifest missing" else "rank-00001.bin"
    assert damaged in log
    assert "skipped, continuing from step-2" in log


def test_all_changed_options_are_reported_together(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        error = rank["other course"].error
        assert isinstance(error, ConfigError)
        assert rank["other course"].losses == []
        changes = [
            "optimizer.lr: 0.01 -> 0.02",
            "lr_scheduler.min_lr_factor: 0.0 -> 0.1",
            "training.max_norm: 1.0 -> 0.5",
        ]
        assert len(error.problems) == len(changes)
        for line, change in zip(error.problems, changes, strict=True):
            assert change in str(line)
            assert f'checkpoint.accept_changes = ["{change.partition(":")[0]}"]' in str(line)


def test_accepted_change_takes_effect_and_is_recorded_in_later_checkpoints(
    root: Path, runs: list[dict[str, Ended]]
) -> None:
    expected_lr = learning_rate(Optimizer(lr=0.02), LRScheduler(warmup_steps=2), 4, 3)
    for rank in runs:
        # a change needs to be accepted only once
        assert rank["accepted"].error is None
        assert rank["accepted, continued"].error is None
        assert rank["accepted"].lrs == [expected_lr]
        assert rank["precision accepted"].error is None
        assert rank["precision accepted"].scaler["scale"] > 1
        assert rank["freed"].error is None

    history = manifest.read(root / "changed/checkpoint/step-5").facts["accepted_changes"]
    assert [(entry["step"], entry["option"], entry["old"], entry["new"]) for entry in history] == [
        (3, "optimizer.lr", 0.01, 0.02),
        (3, "training.steps", 3, 4),
        (4, "training.steps", 4, 5),
    ]
    assert "training.steps: 3 -> 4" in (root / "changed/logs/rank-0.log").read_text()


def test_run_resumes_an_older_step(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        assert rank["an older step"].error is None
        assert rank["an older step"].losses == rank["good"].losses[2:]


def test_finished_run_that_is_started_again_does_nothing(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        assert rank["finished"].error is None
        assert rank["finished"].losses == []
        assert rank["finished"].state == rank["good"].state


def test_export_contains_the_weights_of_the_run(root: Path, runs: list[dict[str, Ended]]) -> None:
    weights_file.write(root / "export/checkpoint/step-3", root / "weights.safetensors")
    opened = load_file(root / "weights.safetensors")
    weights = runs[0]["export"].weights

    assert sorted(opened) == sorted(weights)
    for name, weight in weights.items():
        assert torch.equal(opened[name], weight.to(torch.bfloat16)), name
    # The weights-only save left the full checkpoint of step 2, from which the run can resume.
    assert (root / "export/checkpoint/step-2/manifest.json").is_file()
