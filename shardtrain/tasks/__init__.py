"""What a batch means, one file each, whose name is ``task.name``; a path ending in .py points outside the package.

A task file holds a class ``Task``: a ``RowTask`` (``task.py``), which says in a handful of small methods what a row is,
how rows become a batch, what the loss is, what is predicted and how that is measured. ``language_model.py`` is the
default. What a configuration must know of the file without running it are two literals in it, both optional:
``METRICS``, from the name of a metric to "max" or "min", and ``DEGREES``, the degrees of [parallelism] above 1 that the
task can run with beside those of the data-parallel axes.
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
        fix = f"use {', '.join(task_names())} or a path to a .py"
        raise ConfigError(Problem("task.name", name, "is not a task", fix))
    return importlib.import_module(f"{__name__}.{name}")


def open_task(config: Config) -> LanguageModel | RowTask:
    """Return the task of a config; raises what ``find`` raises."""
    task: LanguageModel | RowTask = find(config.task.name).Task(config)
    return task


def labels_of(config: Config) -> list[str]:
    """Return the names of the labels of the task's head, numbered unless ``task.labels`` names them."""
    num_labels = open_task(config).num_labels
    names = list(config.task.labels) or [f"LABEL_{number}" for number in range(num_labels)]
    return names if num_labels else []
