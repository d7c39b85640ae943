"""Track the best validation result, to keep its checkpoint and to stop early."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.checkpoint import files, retention
from shardtrain.checkpoint.storage import Place
from shardtrain.config import task_file
from shardtrain.config.schema import Config
from shardtrain.utils import bounded_reads, checked_json, storage_errors
from shardtrain.utils.log import logger

POINTER = "best.json"
DEFAULT_METRIC = "validation.loss"


class Best:
    """The best validation result of a run. Checkpoints contain it. Equal on all ranks, except ``kept``.

    Attributes:
        step: First step with the best value. -1 before a validation.
        value: The best value.
        without_improvement: Number of validations since then.
        kept: Step of the best checkpoint, or -1. Only rank 0 knows it.
    """

    def __init__(self, config: Config) -> None:
        self.metric = config.checkpoint.keep_best or DEFAULT_METRIC
        self.mode = task_file.best_mode(config)
        self.patience = config.validation.patience
        self._keeps = bool(config.checkpoint.keep_best)
        self.step = -1
        self.value = math.nan
        self.without_improvement = 0
        self.kept = -1

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Record a validation's values, which are equal on all ranks. NaN and infinity are never the best."""
        value = values[self.metric.removeprefix("validation.")]
        is_better = value > self.value if self.mode == "max" else value < self.value
        is_first = self.step < 0
        if math.isfinite(value) and (is_first or is_better):
            self.step = step
            self.value = value
            self.without_improvement = 0
        else:
            self.without_improvement += 1

    def is_new(self, step: int) -> bool:
        """True if a checkpoint of this step must be saved because its validation is the best so far."""
        return self._keeps and step == self.step

    @property
    def exhausted(self) -> bool:
        """True if the last ``validation.patience`` validations were no improvement."""
        return 0 < self.patience <= self.without_improvement

    def to_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        state = {"metric": self.metric, "mode": self.mode, "step": self.step, "kept": self.kept}
        value = self.value if self.step >= 0 else None
        return {**state, "value": value, "without_improvement": self.without_improvement}

    def load(self, state: Any, folder: Place | None) -> None:
        """Continue from a checkpoint's state. Ignore it if it is from another run (``folder`` is None).

        Warn and ignore it if it is invalid or of another metric. Nothing else depends on it.

        Args:
            folder: The folder of this run's checkpoints.
        """
        if state is None or folder is None:
            return
        if not _is_state(state):
            logger.warning(
                "the checkpoint's best validation result is invalid: starting without one"
            )
            return
        if (state["metric"], state["mode"]) != (self.metric, self.mode):
            if state["step"] >= 0 and (self._keeps or self.patience):
                logger.warning(
                    f"the checkpoint's best validation result is of {state['metric']} "
                    f"({state['mode']}), and this run compares {self.metric} ({self.mode}): "
                    "starting without one"
                )
            return
        self.step = state["step"]
        self.without_improvement = state["without_improvement"]
        self.value = math.nan
        if self.step >= 0:
            self.value = float(state["value"])
        # Try the checkpoint of the best step. If it is incomplete, try the previous best checkpoint.
        candidates = (self.step, state["kept"])
        complete = [step for step in candidates if retention.is_complete(folder / f"step-{step}")]
        self.kept = complete[0] if complete else -1

    def point(self, folder: Place, saved: Mapping[str, Any] | None) -> None:
        """Write the best checkpoint's name to ``best.json``, from the state in the latest
        checkpoint (rank 0).
        """
        step = saved["step"] if saved else -1
        if not saved or not self._keeps or step < 0:
            return
        is_written = step == self.kept and read_pointer(folder).get("step") == step
        if is_written or not retention.is_complete(folder / f"step-{step}"):
            return
        fields = {
            "step": step,
            "metric": saved["metric"],
            "mode": saved["mode"],
            "value": saved["value"],
        }
        try:
            files.replace_durable(folder / POINTER, (json.dumps(fields) + "\n").encode())
        except OSError as error:
            # The checkpoint is complete, and its state records that it is the best.
            # The next save tries again.
            logger.warning(str(storage_errors.cannot("write", folder / POINTER, error)))
            return
        self.kept = step


def read_pointer(folder: Place) -> dict[str, Any]:
    """Return the content of ``best.json``, or {} if it is missing or invalid. Resuming does not
    depend on it.
    """
    pointer, _ = pointer_and_damage(folder)
    return pointer


def pointer_and_damage(folder: Place) -> tuple[dict[str, Any], str]:
    """Return the content of ``best.json``, and why it cannot be used.

    The content is {} if the file is missing or invalid. The reason is "" unless it is invalid.
    """
    path = folder / POINTER
    try:
        pointer = checked_json.parse(files.read_small(path))
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        if is_missing and not (isinstance(path, Path) and bounded_reads.is_present(path)):
            return {}, ""
        return {}, f"{path} cannot be read ({error.strerror or error})"
    except ValueError as error:
        return {}, f"{path} is not JSON ({error})"
    types = {"step": int, "metric": str, "value": int | float}
    is_valid = isinstance(pointer, dict) and all(
        isinstance(pointer.get(name), kind) for name, kind in types.items()
    )
    if not is_valid:
        return {}, f"{path} does not name a step, its metric and its value"
    return pointer, ""


def describe(pointer: Mapping[str, Any]) -> str:
    """Return metric and value of ``best.json``, safe to print."""
    # The file may come from someone else, and control characters could change what a terminal shows.
    characters = [char for char in str(pointer["metric"])[:80] if char.isprintable()]
    return f"{''.join(characters)} {float(pointer['value']):.6g}"


def _is_state(state: Any) -> bool:
    if not isinstance(state, dict):
        return False
    for name in ("step", "kept", "without_improvement"):
        count = state.get(name)
        if not isinstance(count, int) or isinstance(count, bool):
            return False
    if not isinstance(state.get("metric"), str) or not isinstance(state.get("mode"), str):
        return False
    # Without a best step there is no value.
    has_value = state["step"] < 0 or isinstance(state.get("value"), int | float)
    return has_value and state["without_improvement"] >= 0
