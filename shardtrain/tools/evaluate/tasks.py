"""Run lm-eval tasks (Gao et al., github.com/EleutherAI/lm-evaluation-harness) on a trained model."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

from shardtrain.tools.evaluate.evaluate_request import EvaluateOptions
from shardtrain.tools.generate.trained_model import OpenedModel
from shardtrain.utils.errors import ConfigError, Problem

_BOOTSTRAP = 1000
"""Number of bootstrap samples for the standard error of metrics without a formula."""


def measure(opened: OpenedModel, options: EvaluateOptions, is_first: bool = True) -> dict[str, Any]:
    """Return the results by task name. Collective. lm-eval returns them only on the first rank of a node.

    Raises:
        ConfigError: lm-eval is not installed, or does not have a task.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            Problem(
                "--tasks",
                ",".join(options.tasks),
                rule="requires the lm-eval library, which is not installed",
                fix='pip install "shardtrain[eval]"',
            )
        )
    with _without_planted_metrics():
        return _measure(opened, options, is_first)


def _measure(opened: OpenedModel, options: EvaluateOptions, is_first: bool) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from shardtrain.tools.evaluate.harness import Engine

    # Try the user's folder first, because indexing the library's thousands of files takes half a minute.
    folder = None
    manager = None
    if options.include_path is not None:
        folder = str(options.include_path)
        manager = TaskManager(include_path=folder, include_defaults=False)
    if manager is None or not set(options.tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folder)
    check_known(options.tasks, manager.all_tasks)
    results = simple_evaluate(
        model=Engine(opened, options.batch_size, is_first),
        tasks=list(options.tasks),
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        log_samples=False,
        task_manager=manager,
        bootstrap_iters=_BOOTSTRAP,
    )
    if not results:
        return {}
    return _plain(results["results"])  # type: ignore[no-any-return]


@contextlib.contextmanager
def _without_planted_metrics() -> Iterator[None]:
    """Refuse metrics of the library ``evaluate`` that the current directory replaces.

    Tasks load metrics by name. The library runs ``NAME/NAME.py`` of the current directory instead of its own
    file if there is one. A path that starts with "." or "/" is code that the user's task names.
    """
    from evaluate import loading

    find = loading.evaluation_module_factory

    def guarded(path: str, *arguments: Any, **options: Any) -> Any:
        is_name = not path.startswith((".", os.sep)) and not path.endswith(".py")
        planted = os.path.join(path, f"{os.path.basename(path)}.py")
        if is_name and os.path.isfile(planted):
            rule = "is a metric that a file in the current directory would replace"
            fix = f'remove {planted}, or load your own metric by the path "./{path}"'
            raise ConfigError(Problem("--tasks", path, rule, fix))
        return find(path, *arguments, **options)

    loading.evaluation_module_factory = guarded
    try:
        yield
    finally:
        loading.evaluation_module_factory = find


def check_known(tasks: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for an unknown task. The message suggests a similar name."""
    for name in tasks:
        if name in known:
            continue
        fix = "for your own tasks, set --include_path to their folder"
        similar = difflib.get_close_matches(name, known, 1)
        if similar:
            fix = f"did you mean {similar[0]}?"
        raise ConfigError(Problem("--tasks", name, rule="is not a task of lm-eval", fix=fix))


def _plain(value: Any) -> Any:
    """Convert results for JSON. NaN becomes None, and other types become str."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, str | int | float | bool | None):
        return value
    return str(value)
