"""Tasks: one file per value of ``task.name``. A path ending in .py names a task file outside the package.

A task file contains a class ``Task``, usually a ``RowTask`` (``task.py``). Its methods define rows,
batches, the loss, predictions and metrics. ``language_model.py`` is the default task. The configuration
reads two optional literals from the file without executing it:

- ``METRICS`` maps the names of metrics to "max" or "min".
- ``DEGREES`` lists the options of [parallelism] that the task supports with values above 1. Data
  parallelism is always supported.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from shardtrain.config.schema import Config
from shardtrain.config.task_file import task_names
from shardtrain.tasks.language_model import LanguageModel
from shardtrain.tasks.task import RowTask
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem

__all__ = ["LanguageModel", "RowTask", "find", "labels_of", "open_task"]


def find(name: str) -> ModuleType:
    """Return the module of a task file of this package, or of a user's file by its path.

    Raises:
        ConfigError: the file does not exist, or has no class Task.
    """
    if name.endswith(".py"):
        return own_file.load(name, own_file.TASK, "task.name")
    if name not in task_names():
        raise ConfigError(
            Problem(
                "task.name",
                name,
                rule="is not a task",
                fix=f"use {', '.join(task_names())} or the path of a .py file",
            )
        )
    return importlib.import_module(f"{__name__}.{name}")


def open_task(config: Config) -> LanguageModel | RowTask:
    """Return the task of a config; raises what ``find`` raises."""
    task: LanguageModel | RowTask = find(config.task.name).Task(config)
    return task


def labels_of(config: Config) -> list[str]:
    """Return the label names of the task's head: ``task.labels``, or LABEL_0, LABEL_1, ...

    Empty without a head.
    """
    num_labels = open_task(config).num_labels
    if not num_labels:
        return []
    return list(config.task.labels) or [f"LABEL_{number}" for number in range(num_labels)]
