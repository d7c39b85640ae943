"""Read the metrics and parallel degrees of a task from the source of its file, without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.config.options import nearest
from shardtrain.config.schema import Config
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem

TASKS_FOLDER = Path(__file__).parent.parent / "tasks"
_PACKAGE = "shardtrain.tasks."
_SHARED = ("task", "text_task")
"""Modules of the tasks folder that define no task."""


@dataclass(frozen=True)
class TaskFacts:
    """Facts about a task.

    Attributes:
        metrics: "max" or "min" for each metric: the better direction.
        degrees: Parallel degrees that the task supports.
    """

    metrics: dict[str, str]
    degrees: tuple[str, ...]


def task_names() -> list[str]:
    """Return the names of the package's tasks."""
    return sorted(
        file.stem
        for file in TASKS_FOLDER.glob("*.py")
        if not file.stem.startswith("_") and file.stem not in _SHARED
    )


def read_task_file(name: str) -> TaskFacts:
    """Read the facts of a task. Raise ConfigError if its file does not exist or cannot be parsed."""
    module = _parse(name)
    variables: dict[str, Any] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            variable = node.targets[0].id
            if variable in ("METRICS", "DEGREES"):
                try:
                    variables[variable] = ast.literal_eval(node.value)
                except ValueError:
                    variables[variable] = None
    # Inherit missing values from the task that the file imports.
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            base = (node.module or "").removeprefix(_PACKAGE)
            if base in task_names() and base != name:
                facts = read_task_file(base)
                variables = {"METRICS": facts.metrics, "DEGREES": facts.degrees, **variables}
    metrics = variables.get("METRICS", {})
    degrees = variables.get("DEGREES", ())
    if (
        not isinstance(metrics, dict)
        or not set(metrics.values()) <= {"max", "min"}
        or not isinstance(degrees, tuple)
    ):
        raise ConfigError(
            Problem(
                "task.name",
                name,
                rule="has METRICS or DEGREES that are not literals of names",
                fix='write METRICS = {"accuracy": "max"} and DEGREES = ("tensor_parallel_degree",)',
            )
        )
    return TaskFacts({"loss": "min", **metrics}, degrees)


# Names of tasks in other programs.
_OTHER_NAMES = {
    "causal_lm": "language_model",
    "dpo": "preference",
    "ipo": "preference",
    "mlm": "masked_language_model",
    "pretrain": "language_model",
    "reward": "reward_model",
    "rm": "reward_model",
    "seq2seq": "sequence_to_sequence",
    "sft": "language_model",
    "vlm": "image_text",
}


def has_task(name: str) -> bool:
    """True if the source of a task file may bind ``Task``. Raises ConfigError like ``read_task_file``."""
    return any(own_file.binds(node, "Task") for node in ast.walk(_parse(name)))


def _parse(name: str) -> ast.Module:
    path = Path(name) if name.endswith(".py") else TASKS_FOLDER / f"{name}.py"
    if not path.is_file() or (not name.endswith(".py") and name not in task_names()):
        near = _OTHER_NAMES.get(name.lower()) or nearest(name, task_names())
        hint = f"did you mean {near}? " if near else ""
        raise ConfigError(
            Problem(
                "task.name",
                name,
                rule="is not a task",
                fix=f"{hint}tasks are {', '.join(task_names())}, and paths that end in .py",
            )
        )
    return own_file.read(path, "task.name", name)


def best_metric(config: Config) -> str:
    """Return the metric that selects the best checkpoint: checkpoint.keep_best, or the loss."""
    return (config.checkpoint.keep_best or "validation.loss").removeprefix("validation.")


def best_mode(config: Config) -> str:
    """Return "max" or "min" for the best metric: checkpoint.best_mode, or the task's own."""
    if config.checkpoint.best_mode != "auto":
        return config.checkpoint.best_mode
    return read_task_file(config.task.name).metrics.get(best_metric(config), "min")
