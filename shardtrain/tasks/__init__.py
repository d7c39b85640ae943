"""What a batch means, one file each, whose name is ``task.name``; a path ending in .py points outside the package.

A task file holds a class ``Task``: a ``RowTask`` (``task.py``), which says in a handful of small methods what a row is,
how rows become a batch, what the loss is, what is predicted and how that is measured. ``language_model.py`` is the
default. What a configuration must know of the file without running it are two literals in it, both optional:
``METRICS``, from the name of a metric to "max" or "min", and ``DEGREES``, the degrees of [parallelism] above 1 that the
task can run with beside those of the data-parallel axes.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from shardtrain.config.schema import Config
from shardtrain.config.task_file import task_names
from shardtrain.tasks.language_model import LanguageModel
from shardtrain.tasks.task import RowTask
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem

__all__ = ["LanguageModel", "RowTask", "find", "labels_of", "open_task"]


def find(name: str) -> ModuleType:
    """The module of a task file of this package, or of the path of a user's file.

    Raises:
        ConfigError: when there is no such file, or it has no class Task.
    """
    if name.endswith(".py"):
        path = Path(name)
        # A path in the user's own config is code that the user chose; names inside artefacts are never imported.
        if not path.is_file():
            raise ConfigError(
                Problem("task.name", str(path), "is not a file", "give the path of an existing task file")
            )
        module = own_file.run(path, "task", "task.name")
    elif name in task_names():
        module = importlib.import_module(f"{__name__}.{name}")
    else:
        raise ConfigError(
            Problem("task.name", name, "is not a task", f"use {', '.join(task_names())} or a path to a .py")
        )
    if not isinstance(getattr(module, "Task", None), type):
        fix = "define a class Task(RowTask), as shardtrain/tasks/classification.py does"
        raise ConfigError(Problem("task.name", name, "has no class Task", fix))
    return module


def open_task(config: Config) -> LanguageModel | RowTask:
    """The task of a config; raises what ``find`` raises."""
    task: LanguageModel | RowTask = find(config.task.name).Task(config)
    return task


def labels_of(config: Config) -> list[str]:
    """Return the names of the labels of the task's head, numbered unless ``task.labels`` names them."""
    num_labels = open_task(config).num_labels
    names = list(config.task.labels) or [f"LABEL_{number}" for number in range(num_labels)]
    return names if num_labels else []
