"""Losses of ``task.name = "preference"``: each equals its published formula and TRL, with any reference."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from against import assert_close, config_for, folder, in_order, options, ours, pairs, theirs
from hub_folders import build, save
from ranks import run_ranks
from tiers import cases
from tiny import train_whole

from shardtrain.config import Loaded
from shardtrain.config.rules import check
from shardtrain.config.schema import Task
from shardtrain.tasks.preference import pair_losses

BETA = 0.3
REWARDS_B2 = torch.tensor([[0.4, -0.1], [-2.0, 1.5], [30.0, -30.0]], dtype=torch.float64)
LENGTHS_B2 = torch.tensor([[3, 5], [1, 4], [10, 10]])


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def expected_loss(
    loss_type: str, smoothing: float, rewards: list[float], lengths: list[int]
) -> float:
    """Write each formula for a single pair, as in its paper."""
    difference = rewards[0] - rewards[1]
    mean_difference = rewards[0] / lengths[0] - rewards[1] / lengths[1]
    if loss_type == "hinge":
        return max(0.0, 1 - difference)
    if loss_type == "ipo":
        return (mean_difference / BETA - 1 / (2 * BETA)) ** 2
    if loss_type == "sigmoid_norm":
        return -log_sigmoid(mean_difference)
    if loss_type == "robust":
        mixed = -(1 - smoothing) * log_sigmoid(difference) + smoothing * log_sigmoid(-difference)
        return mixed / (1 - 2 * smoothing)
    return -(1 - smoothing) * log_sigmoid(difference) - smoothing * log_sigmoid(-difference)


LOSSES = [
    ("sigmoid", 0.0),
    ("sigmoid", 0.2),
    ("hinge", 0.0),
    ("ipo", 0.0),
    ("robust", 0.2),
    ("sigmoid_norm", 0.0),
]


@pytest.mark.parametrize(("loss_type", "smoothing"), LOSSES)
def test_each_loss_equals_its_formula(loss_type: str, smoothing: float) -> None:
    task = Task(name="preference", beta=BETA, loss_type=loss_type, label_smoothing=smoothing)  # type: ignore[arg-type]
    losses = pair_losses(REWARDS_B2, LENGTHS_B2, task)
    for loss, rewards, lengths in zip(
        losses.tolist(), REWARDS_B2.tolist(), LENGTHS_B2.tolist(), strict=True
    ):
        assert loss == pytest.approx(
            expected_loss(loss_type, smoothing, rewards, lengths), rel=1e-12, abs=1e-12
        )


DPO_OF_TRL = [{"loss_type": name} for name in ("hinge", "ipo", "sigmoid_norm")]
DPO_OF_TRL += [{"loss_type": "robust", "label_smoothing": 0.2}]


@pytest.mark.parametrize(
    "kind", cases(DPO_OF_TRL[1:2], nightly=[DPO_OF_TRL[0], *DPO_OF_TRL[2:]]), ids=str
)
def test_ten_losses_match_dpo_of_trl(kind: dict[str, Any]) -> None:
    trl = pytest.importorskip("trl")
    rows = pairs()
    ended = ours(rows, task={"name": "preference", "beta": BETA, **kind})
    data = in_order(rows, ended, ("prompt", "chosen", "rejected"))

    def make(model: Any, tokenizer: Any) -> Any:
        args = options(trl.DPOConfig, beta=BETA, max_length=None, **kind)
        return trl.DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)

    assert_close(ended, theirs(make))


@pytest.mark.nightly("trl's own loss", by="test_ten_losses_match_dpo_of_trl")
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "simpo"])
def test_ten_losses_match_cpo_of_trl(loss_type: str) -> None:
    """CPO is a preference loss without reference, and the mean loss of the chosen answer.

    trl takes that mean over the tokens of a micro-batch, so its micro-batch is one pair.
    """
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    rows = pairs()
    task: dict[str, Any] = {"name": "preference", "reference_free": True, "loss_type": loss_type}
    if loss_type == "simpo":
        task = {"name": "simpo", "gamma": 0.4}
    ended = ours(rows, task={**task, "beta": BETA, "nll_weight": 0.7})
    data = in_order(rows, ended, ("prompt", "chosen", "rejected"))

    def make(model: Any, tokenizer: Any) -> Any:
        sizes = {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4,
            "max_length": 96,
        }
        args = options(
            CPOConfig, loss_type=loss_type, cpo_alpha=0.7, beta=BETA, simpo_gamma=0.4, **sizes
        )
        return CPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)

    assert_close(ended, theirs(make))


def config_of(path: Path, task: dict[str, Any], **sections: dict[str, Any]) -> Any:
    rows = path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    config = config_for(path, **sections)
    return dataclasses.replace(config, task=Task(**{"name": "preference", "beta": BETA, **task}))


def other_model(path: Path) -> Path:
    """Write a model with the tokenizer of ``folder()``, but with another width and other weights."""
    place = path / "reference"
    shutil.copytree(folder(), place, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    vocab_size = json.loads((folder() / "config.json").read_text())["vocab_size"]
    return save(build("llama3-tied", seed=7, vocab_size=vocab_size, hidden_size=48), place)


def test_reference_path_is_the_reference_of_trl(tmp_path: Path) -> None:
    """The model in the folder has other sizes. A resume with another folder is refused."""
    trl = pytest.importorskip("trl")
    import transformers

    reference = other_model(tmp_path)
    rows = pairs()
    ended = ours(rows, task={"name": "preference", "beta": BETA, "reference_path": str(reference)})
    data = in_order(rows, ended, ("prompt", "chosen", "rejected"))

    def make(model: Any, tokenizer: Any) -> Any:
        args = options(trl.DPOConfig, beta=BETA, max_length=None)
        frozen = transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
        return trl.DPOTrainer(
            model, ref_model=frozen, args=args, train_dataset=data, processing_class=tokenizer
        )

    assert abs(ended.losses[0] - math.log(2)) > 1e-2, "the reference must not be the initial model"
    assert_close(ended, theirs(make))


def test_resume_with_another_reference_is_refused(tmp_path: Path) -> None:
    reference = other_model(tmp_path)
    task = {"reference_path": str(reference)}
    saves = {"checkpoint": {"interval": 2}}
    (started,) = run_ranks(1, train_whole, config_of(tmp_path, task, **saves), 3)

    assert started.error is None

    resumed = config_of(
        tmp_path, {"reference_path": str(folder())}, training={"steps": 12}, **saves
    )
    (refused,) = run_ranks(1, train_whole, resumed, None)
    assert "reference weights differ" in str(refused.error)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too much smoothing": (
        {"label_smoothing": 0.5},
        "task.label_smoothing=0.5 must be at least 0 and below 0.5",
    ),
    "negative smoothing": ({"label_smoothing": -0.1}, "must be at least 0 and below 0.5"),
    "not a number": ({"label_smoothing": math.nan}, "must be at least 0 and below 0.5"),
    "smoothing of a hinge": (
        {"label_smoothing": 0.1, "loss_type": "hinge"},
        'has no effect with task.loss_type = "hinge"',
    ),
    "robust without smoothing": (
        {"loss_type": "robust"},
        'must be above 0 with task.loss_type = "robust"',
    ),
    "negative weight": ({"nll_weight": -1.0}, "task.nll_weight=-1.0 must be 0 or above"),
    "no reference and a reference": (
        {"reference_free": True, "reference_path": "folder"},
        "has no effect with task.reference_free = true",
    ),
    "a folder without a model": (
        {"reference_path": "folder"},
        'task.reference_path="folder" has no config.json',
    ),
    "an option of another task": (
        {"name": "orpo", "loss_type": "ipo"},
        'is only read by task.name = "preference"',
    ),
    "a reference of simpo": (
        {"name": "simpo", "reference_path": "folder"},
        "is only read by task.name =",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_one_line(name: str, tmp_path: Path) -> None:
    task, message = WRONG[name]
    config = config_of(tmp_path, task)
    origins = {f"task.{option}": "command line" for option in task}
    problems = [str(problem) for problem in check(Loaded(config, origins))]
    assert any(message in problem and "\n" not in problem for problem in problems), problems
