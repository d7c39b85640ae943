"""Run lm-eval tasks (Gao et al., github.com/EleutherAI/lm-evaluation-harness) on a trained model."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence
from typing import Any

from shardtrain.tools.evaluate.evaluate_request import EvaluateOptions
from shardtrain.tools.generate.trained_model import OpenedModel
from shardtrain.utils.errors import ConfigError, Problem

_BOOTSTRAP = 1000
"""Number of bootstrap samples for the standard error of metrics without a formula."""


def measure(opened: OpenedModel, asked: EvaluateOptions, is_first: bool = True) -> dict[str, Any]:
    """Return the results by task name. Collective. lm-eval returns them only on the first rank of a node.

    Raises:
        ConfigError: lm-eval is not installed, or does not have a task.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            Problem(
                "--tasks",
                ",".join(asked.tasks),
                rule="requires the lm-eval library, which is not installed",
                fix='pip install "shardtrain[eval]"',
            )
        )
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from shardtrain.tools.evaluate.harness import Engine

    include = str(asked.include_path) if asked.include_path is not None else None
    # Try the user's folder first, because indexing the library's thousands of files takes half a minute.
    manager = TaskManager(include_path=include, include_defaults=False) if include else None
    if manager is None or not set(asked.tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=include)
    check_known(asked.tasks, manager.all_tasks)
    results = simple_evaluate(
        model=Engine(opened, asked.batch_size, is_first),
        tasks=list(asked.tasks),
        num_fewshot=asked.num_fewshot,
        limit=asked.limit,
        log_samples=False,
        task_manager=manager,
        bootstrap_iters=_BOOTSTRAP,
    )
    return _plain(results["results"]) if results else {}  # type: ignore[no-any-return]


def check_known(tasks: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for an unknown task. The message suggests a similar name."""
    unknown = [name for name in tasks if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        raise ConfigError(
            Problem(
                "--tasks",
                unknown[0],
                rule="is not a task of lm-eval",
                fix=f"did you mean {near[0]}?" if near else "for your own tasks, set --include_path to their folder",
            )
        )


def _plain(value: Any) -> Any:
    """Convert results for JSON. NaN becomes None, and other types become str."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and value != value:
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
