"""Rules of the tasks that hide tokens or have a source and a target: the options that they read, and no others."""

from __future__ import annotations

from collections.abc import Iterator

from shardtrain.config.load import Loaded
from shardtrain.config.rules.data import is_changed
from shardtrain.config.rules.task import OF_DOCUMENTS
from shardtrain.config.rules.values import problem
from shardtrain.utils.errors import Problem

MASKED = "masked_language_model"
SEQUENCES = "sequence_to_sequence"
_LABELS = ("task.labels", "task.num_labels", "task.label_field", "task.pair_field")
_COLUMNS = {MASKED: ("data.prompt_field", "data.completion_field"), SEQUENCES: ("data.text_field",)}


def check_text_tasks(loaded: Loaded) -> Iterator[Problem]:
    """Options of labels and documents have no effect; those of ``task.options`` are known and in range."""
    task = loaded.config.task
    if task.name not in _COLUMNS:
        return
    for option in (*_LABELS, *OF_DOCUMENTS, *_COLUMNS[task.name]):
        if is_changed(loaded, option):
            yield problem(loaded, option, f"has no effect with task.name={task.name}", "remove it")
    known = ("mask_fraction", "mask_token_id") if task.name == MASKED else ()
    for name, value in task.options.items():
        where = loaded.origins.get(f"task.options.{name}", loaded.where("task.options"))
        if name not in known:
            fix = f"use {' or '.join(known)}" if known else "remove it"
            yield Problem(f"task.options.{name}", value, f"is not an option of {task.name}", fix, where)
        elif name == "mask_fraction" and not (type(value) in (int, float) and 0 < float(value) < 1):
            yield Problem(f"task.options.{name}", value, "must lie between 0 and 1", "use 0.15", where)
        elif name == "mask_token_id" and not (type(value) is int and value >= 0):
            yield Problem(f"task.options.{name}", value, "must be the id of a token", "use 0 or more", where)
