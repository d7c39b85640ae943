"""The facts of a task without importing it: its metrics and degrees, read from the text of its file, never run."""

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
"""Files that tasks build on, and that are none."""


@dataclass(frozen=True)
class TaskFacts:
    """What a task file says: metrics beside the loss with "max" or "min", and degrees that it can run with."""

    metrics: dict[str, str]
    degrees: tuple[str, ...]


def task_names() -> list[str]:
    """Return the tasks of this package: files of the tasks folder."""
    return sorted(
        file.stem for file in TASKS_FOLDER.glob("*.py") if not file.stem.startswith("_") and file.stem not in _SHARED
    )


def read_task_file(name: str) -> TaskFacts:
    """Read the facts of the task ``name``; raises ConfigError where there is no such file or it cannot be read."""
    module = _parse(name)
    found: dict[str, Any] = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            variable = node.targets[0].id
            if variable in ("METRICS", "DEGREES"):
                try:
                    found[variable] = ast.literal_eval(node.value)
                except ValueError:
                    found[variable] = None
    # What it does not say itself, the task that it builds on says
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            base = (node.module or "").removeprefix(_PACKAGE)
            if base in task_names() and base != name:
                facts = read_task_file(base)
                found = {"METRICS": facts.metrics, "DEGREES": facts.degrees, **found}
    metrics = found.get("METRICS", {})
    degrees = found.get("DEGREES", ())
    if not isinstance(metrics, dict) or not set(metrics.values()) <= {"max", "min"} or not isinstance(degrees, tuple):
        rule = "has METRICS or DEGREES that are not literals of names"
        fix = 'write METRICS = {"accuracy": "max"} and DEGREES = ("tensor_parallel_degree",)'
        raise ConfigError(Problem("task.name", name, rule, fix))
    return TaskFacts({"loss": "min", **metrics}, degrees)


def has_task(name: str) -> bool:
    """Whether the file of a task may define one, as its text tells; raises ConfigError as ``read_task_file``."""
    return any(own_file.binds(node, "Task") for node in ast.walk(_parse(name)))


def _parse(name: str) -> ast.Module:
    path = Path(name) if name.endswith(".py") else TASKS_FOLDER / f"{name}.py"
    if not path.is_file() or (not name.endswith(".py") and name not in task_names()):
        near = nearest(name, task_names())
        hint = f"did you mean {near}? " if near else ""
        fix = f"{hint}tasks are {', '.join(task_names())}, and paths that end in .py"
        raise ConfigError(Problem("task.name", name, "is not a task", fix))
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError) as error:
        rule = f"cannot be read as Python ({error})"
        raise ConfigError(Problem("task.name", name, rule, "correct the file")) from error


def best_metric(config: Config) -> str:
    """The metric by which a validation is better: checkpoint.keep_best, or the loss."""
    return (config.checkpoint.keep_best or "validation.loss").removeprefix("validation.")


def best_mode(config: Config) -> str:
    """Whether a larger or a smaller value is better: checkpoint.best_mode, or what the task says of the metric."""
    if config.checkpoint.best_mode != "auto":
        return config.checkpoint.best_mode
    return read_task_file(config.task.name).metrics.get(best_metric(config), "min")
