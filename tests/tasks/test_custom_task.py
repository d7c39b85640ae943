"""The template project with a custom task and model, on one rank and on several."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import Result, assert_same_numbers, make_run, run_tiny, train_steps

from shardtrain import config, tasks
from shardtrain.config.schema import Config
from shardtrain.tasks import RowTask
from shardtrain.train import trainer, validation
from shardtrain.utils.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_task"
# AdamW amplifies rounding errors if eps is small.
EPS = ("--optimizer.eps", "1e-3")


def template(*overrides: str) -> Config:
    fixed = ["--task.name", str(EXAMPLE / "task.py"), "--model.name", str(EXAMPLE / "model.py")]
    small = ["--training.device", "cpu", "--training.global_batch_size", "64"]
    return config.load(EXAMPLE / "config.toml", [*fixed, *small, *overrides]).config


@functools.cache
def reference() -> Result:
    return run_tiny(1, template(*EPS, "--training.local_batch_size", "64"), 4)[0]


@pytest.mark.parametrize("ranks", [2, 4])
def test_custom_model_and_loss_have_the_same_numbers_on_any_number_of_ranks(ranks: int) -> None:
    for result in run_ranks(
        ranks, train_steps, template(*EPS, "--training.local_batch_size", "8"), 4
    ):
        assert_same_numbers(result, reference())


def scored(rank: int, run_config: Config) -> Any:
    run = make_run(rank, run_config)
    for _ in range(run.total_steps):
        trainer.step(run)
    evaluation = validation.evaluate(
        run.runner, validation.open_dataloader(run_config, run.mesh), run.mesh
    )
    assert evaluation is not None
    assert evaluation.metrics is not None
    return run.total_steps, evaluation.rows, evaluation.metrics["accuracy"]


def test_two_epochs_of_the_template_learn() -> None:
    for steps, rows, accuracy in run_ranks(2, scored, template()):
        assert (steps, rows) == (63, 2000)  # 2 x 2000 rows in steps of 64
        assert accuracy > 0.75


def test_single_method_of_a_task_can_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from shardtrain.tasks.classification import Classification\n"
        "class Task(Classification):\n"
        "    def metrics(self, rows):\n"
        "        return {**super().metrics(rows), 'rows': float(len(rows['label']))}\n"
    )
    run_config = dataclasses.replace(
        Config(), task=dataclasses.replace(Config().task, name=str(file))
    )
    task = tasks.open_task(run_config)

    assert isinstance(task, RowTask)

    rows = {"prediction": torch.tensor([1, 0]), "label": torch.tensor([1, 1])}
    assert task.metrics(rows)["rows"] == 2.0
    assert task.metrics(rows)["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "has no Task"),
        ("def Task(config):\n    return None\n", "has no Task"),
        (
            "from shardtrain.tasks import RowTask\nclass Task(RowTask):\n    pass\n",
            "has a Task without read_rows",
        ),
    ],
)
def test_invalid_task_file_is_a_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "lacking.py"
    file.write_text(text)
    run_config = dataclasses.replace(
        Config(), task=dataclasses.replace(Config().task, name=str(file))
    )

    with pytest.raises(ConfigError, match=message):
        task = tasks.open_task(run_config)
        task.open_dataloader(batch_rank=0, num_batch_ranks=1, accumulation=1)
