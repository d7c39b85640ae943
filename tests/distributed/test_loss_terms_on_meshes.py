"""Runs with label smoothing and z-loss: the numbers of one process on every mesh, and a plain validation loss."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiers import cases
from tiny import assert_same_numbers, run_tiny, text_file, tiny_config, train_whole

from shardtrain.config import Loaded
from shardtrain.config.rules import check

TERMS = {"label_smoothing": 0.1, "z_loss_weight": 1e-3}
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp": (2, {"tensor_parallel_degree": 2}, {}),
    "tp without loss parallelism": (
        2,
        {"tensor_parallel_degree": 2, "disable_loss_parallel": True},
        {},
    ),
    "pp": (2, {"pipeline_parallel_degree": 2}, {}),
    "dp with accumulation": (2, {"data_parallel_shard_degree": 2}, {"local_batch_size": 2}),
    "cp": (2, {"context_parallel_degree": 2}, {}),
}


@pytest.mark.parametrize(
    "mesh", cases(["tp", "pp"], nightly=[name for name in MESHES if name not in ("tp", "pp")])
)
def test_meshes_change_no_number(mesh: str) -> None:
    ranks, parallelism, training = MESHES[mesh]
    alone = run_tiny(1, tiny_config(training={"local_batch_size": 8, **TERMS}))[0]
    without_terms = run_tiny(1, tiny_config(training={"local_batch_size": 8}))[0]

    # The terms change the loss.
    assert abs(alone.losses[0] - without_terms.losses[0]) > 1e-3

    options = {"local_batch_size": 8, **training, **TERMS}
    for result in run_tiny(ranks, tiny_config(parallelism=parallelism, training=options)):
        # a pipeline stage has a part of the weights
        initial = {name: alone.initial[name] for name in result.initial if name in alone.initial}
        assert_same_numbers(result, dataclasses.replace(alone, initial=initial))


@pytest.mark.parametrize("compiled", cases([False], nightly=[True]))
def test_validation_loss_is_the_plain_cross_entropy(compiled: bool, tmp_path: Path) -> None:
    """Before training, runs with and without terms have the same weights, hence the same validation loss."""
    losses = []
    for name, terms in (("plain", {}), ("terms", TERMS)):
        config = tiny_config(
            job={"dump_folder": str(tmp_path / name)},
            # a learning rate near zero keeps the weights
            optimizer={"lr": 1e-30},
            training={"steps": 1, **terms},
            compile={"enable": compiled},
            validation={"enable": True, "freq": 1, "dataset": "text", "dataset_path": text_file(), "seq_len": 32,
                        "steps": 2, "local_batch_size": 2},
        )  # fmt: skip
        (ended,) = run_ranks(1, train_whole, config, None)
        assert ended.error is None
        line = (tmp_path / name / "validation.jsonl").read_text().splitlines()[-1]
        losses.append((ended.losses[0], json.loads(line)["loss"]))
    (plain_training, plain_validation), (training, validation) = losses

    assert validation == plain_validation
    assert training > plain_training + 1e-3


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "smoothing of 1": ({"training": {"label_smoothing": 1.0}}, "training.label_smoothing=1.0"),
    "negative smoothing": (
        {"training": {"label_smoothing": -0.1}},
        "training.label_smoothing=-0.1",
    ),
    "no number": ({"training": {"z_loss_weight": float("nan")}}, "training.z_loss_weight"),
    "negative z-loss": ({"training": {"z_loss_weight": -1.0}}, "training.z_loss_weight=-1.0"),
    "another task": (
        {"training": {"label_smoothing": 0.1}, "task": {"name": "orpo"}},
        'has no effect on the loss of task.name = "orpo"',
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_one_line(name: str) -> None:
    sections, message = WRONG[name]
    problems = [str(problem) for problem in check(Loaded(tiny_config(**sections)))]
    assert any(message in problem and "\n" not in problem for problem in problems), problems
