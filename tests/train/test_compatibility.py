"""The global batch size of a resumed run is that of its checkpoint, unless the user sets one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from once import made_once
from ranks import run_ranks
from tiny import tiny_config, train_whole

from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.distributed.process_group import World
from shardtrain.train import compatibility

SAVED = 8
"""Sequences per step of the run that wrote the checkpoint."""


def config(folder: Path, **sections: dict[str, Any]) -> Config:
    """Configuration without a global batch size, and with 4 sequences per rank."""
    parts = {name: dict(values) for name, values in sections.items()}
    parts["training"] = {
        "steps": 1,
        "local_batch_size": 4,
        "global_batch_size": -1,
        **parts.get("training", {}),
    }
    parts["checkpoint"] = {"enable": True, "interval": 1, **parts.get("checkpoint", {})}
    return tiny_config(job={"dump_folder": str(folder)}, **parts)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run with one checkpoint."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("saved")
        run_ranks(1, train_whole, config(folder, training={"local_batch_size": SAVED}))
        return folder

    return made_once(tmp_path_factory, "run-with-one-checkpoint", make)


CASES: dict[str, tuple[int, dict[str, dict[str, Any]], int]] = {
    # ranks, options, training.global_batch_size
    "fewer ranks": (1, {}, SAVED),
    "the same number of sequences": (2, {}, -1),
    "more ranks with fewer sequences each": (4, {"training": {"local_batch_size": 1}}, SAVED),
    "more ranks than the batch has room for": (4, {}, -1),
    "ranks that do not divide the batch": (3, {"training": {"local_batch_size": 1}}, -1),
    "a size set by the user": (1, {"training": {"global_batch_size": 4}}, 4),
    "a change that the user accepts": (
        1,
        {"checkpoint": {"accept_changes": ["training.global_batch_size"]}},
        -1,
    ),
    "all changes accepted": (1, {"checkpoint": {"accept_changes": ["all"]}}, -1),
    "a restarted training state": (
        1,
        {"checkpoint": {"exclude_from_loading": ["train_state"]}},
        -1,
    ),
    "an update in each backward pass": (1, {"optimizer": {"early_step_in_backward": True}}, -1),
    "no checkpoints": (1, {"checkpoint": {"enable": False}}, -1),
    "the step by its number": (1, {"checkpoint": {"load_step": 1}}, SAVED),
    "a step that does not exist": (1, {"checkpoint": {"load_step": 7}}, -1),
}


@pytest.mark.parametrize("name", CASES)
def test_resumed_run_keeps_its_batch_size_unless_set(name: str, run: Path) -> None:
    ranks, options, expected = CASES[name]
    assert batch_size_of_run(config(run, **options), ranks) == expected


@pytest.mark.parametrize(("model_only", "expected"), [(False, SAVED), (True, -1)])
def test_run_that_continues_another_one_keeps_its_batch_size(
    model_only: bool, expected: int, run: Path, tmp_path: Path
) -> None:
    start = {
        "initial_load_path": str(run / "checkpoint/step-1"),
        "initial_load_model_only": model_only,
    }
    assert batch_size_of_run(config(tmp_path, checkpoint=start), 1) == expected


@pytest.mark.parametrize("manifest", ["", "{}", "not JSON"])
def test_damaged_checkpoint_does_not_hide_an_older_one(
    manifest: str, run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "step-2").mkdir(parents=True)
    (folder / "step-2/manifest.json").write_text(manifest)
    (folder / "step-1").symlink_to(run / "checkpoint/step-1")
    assert batch_size_of_run(config(tmp_path), 1) == SAVED


def test_seed_checkpoint_of_one_process_does_not_set_the_batch_size(tmp_path: Path) -> None:
    """torchtitan's recipe for equal initial weights: one process writes step 0, and any mesh trains from it."""
    run_ranks(1, train_whole, config(tmp_path, checkpoint={"create_seed_checkpoint": True}))
    assert batch_size_of_run(config(tmp_path), 2) == -1
    ended = run_ranks(2, train_whole, config(tmp_path))[0]
    assert ended.error is None
    assert ended.state["samples_consumed"] == 8


def batch_size_of_run(config: Config, ranks: int) -> int:
    """Return the ``training.global_batch_size`` that rank 0 decides."""
    world = World(0, ranks, 0, torch.device("cpu"))
    return compatibility.keep_batch_size(Loaded(config), world).config.training.global_batch_size


def test_error_suggests_a_local_batch_size_for_more_ranks(run: Path) -> None:
    (message,) = {str(ended_rank.error) for ended_rank in run_ranks(4, train_whole, config(run))}
    assert (
        "training.global_batch_size: 8 -> 16; 4 data-parallel ranks x training.local_batch_size=4 make 16"
        in message
    )
    assert "set training.local_batch_size=2, or accept the change with" in message
