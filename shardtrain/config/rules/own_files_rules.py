"""Rules of Python files that options name: they exist and define what they must. Files are parsed, not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import PurePath

from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest
from shardtrain.config.rules.values import problem
from shardtrain.config.schema import Config, LRScheduler
from shardtrain.facts import lr_schedules
from shardtrain.facts.optimizers import OPTIMIZERS
from shardtrain.utils import own_file
from shardtrain.utils.errors import Problem
from shardtrain.utils.own_file import FileKind

SCHEDULE_OPTIONS = tuple(
    field.name for field in fields(LRScheduler) if field.name not in ("name", "total_steps")
)
"""Options of [lr_scheduler] that a schedule may read; ``total_steps`` is an argument of every schedule."""


def named_files(config: Config) -> list[tuple[str, str]]:
    """Return every option that may be the path of a Python file, with its value, path or not."""
    files = [
        ("model.name", config.model.name),
        ("model.tokenizer_path", config.model.tokenizer_path or ""),
        ("task.name", config.task.name),
        ("optimizer.name", config.optimizer.name),
        ("lr_scheduler.name", config.lr_scheduler.name),
        ("training.dataset", config.training.dataset),
        ("validation.dataset", config.validation.dataset),
    ]
    for name, source in config.data.sources.items():
        files.append((f"data.sources.{name}.dataset", source.dataset))
    files += [("metrics.sinks", path) for path in config.metrics.sinks]
    files += [("metrics.token_metrics", path) for path in config.metrics.token_metrics]
    return files


def check_own_files(loaded: Loaded) -> Iterator[Problem]:
    """Check the files of optimizer and schedule (or their names), tokenizer, sinks and token metrics."""
    config = loaded.config
    tokenizer = config.model.tokenizer_path
    if tokenizer is not None and tokenizer.endswith(".py"):
        yield from _check(loaded, "model.tokenizer_path", tokenizer, own_file.TOKENIZER)
    for path in config.metrics.sinks:
        yield from _check(loaded, "metrics.sinks", path, own_file.SINK)
    metrics = config.metrics.token_metrics
    for path in metrics:
        yield from _check(loaded, "metrics.token_metrics", path, own_file.TOKEN_METRIC)
    if len({PurePath(path).stem for path in metrics}) < len(metrics):
        yield problem(
            loaded,
            "metrics.token_metrics",
            rule="must not contain two files with the same name, which is used in logs",
            fix="rename one",
        )
    if metrics and config.task.name != "language_model":
        yield problem(
            loaded,
            "metrics.token_metrics",
            rule=f'is not supported with task.name="{config.task.name}", which has its own metrics',
            fix='remove it, or set task.name = "language_model"',
        )
    yield from _check_named(loaded, "optimizer.name", tuple(OPTIMIZERS), own_file.OPTIMIZER)
    yield from _check_named(
        loaded, "lr_scheduler.name", tuple(lr_schedules.SCHEDULES), own_file.SCHEDULE
    )
    unknown = set(schedule_options(config.lr_scheduler.name) or ()) - set(SCHEDULE_OPTIONS)
    if unknown:
        yield problem(
            loaded,
            "lr_scheduler.name",
            rule=f"defines factor() with the parameter {min(unknown)}, which is not an option of [lr_scheduler]",
            fix=f"use step, total_steps and {', '.join(SCHEDULE_OPTIONS)}",
        )


def schedule_options(name: str) -> tuple[str, ...] | None:
    """Return the options that a schedule reads, or None if the name or the file is not valid."""
    if name in lr_schedules.SCHEDULES:
        return lr_schedules.options_of(lr_schedules.SCHEDULES[name])
    if not name.endswith(".py") or own_file.fault(name, own_file.SCHEDULE):
        return None
    for node in own_file.parse(name).body:
        if isinstance(node, ast.FunctionDef) and node.name == "factor":
            # All parameters after step and total_steps, including *args and **kwargs.
            signature = node.args
            parameters = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs][2:]
            for variadic in (signature.vararg, signature.kwarg):
                if variadic is not None:
                    parameters.append(variadic)
            return tuple(parameter.arg for parameter in parameters)
    return None


def _check_named(
    loaded: Loaded, option: str, known: tuple[str, ...], kind: FileKind
) -> Iterator[Problem]:
    value = loaded.value(option)
    if value.endswith(".py"):
        yield from _check(loaded, option, value, kind)
    elif value not in known:
        near = nearest(value, known)
        suggestion = f'did you mean "{near}"? ' if near else f'use "{known[0]}", '
        yield problem(
            loaded,
            option,
            rule=f"must be one of {', '.join(known)}",
            fix=f"{suggestion}or a path that ends in .py: docs/extend.md",
        )


def _check(loaded: Loaded, option: str, path: str, kind: FileKind) -> Iterator[Problem]:
    rule_and_fix = own_file.fault(path, kind)
    if rule_and_fix is not None:
        yield Problem(option, path, *rule_and_fix, loaded.where(option))
