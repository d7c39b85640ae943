"""The best result of a validation so far: which checkpoint is never deleted, and when to stop early."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from shardtrain.checkpoint import files, retention
from shardtrain.checkpoint.storage import Place
from shardtrain.config import task_file
from shardtrain.config.schema import Config
from shardtrain.utils import storage_errors
from shardtrain.utils.log import logger

POINTER = "best.json"
DEFAULT_METRIC = "validation.loss"


class Best:
    """What the validations of a run came to, part of its checkpoints; equal on all ranks but for ``kept``."""

    def __init__(self, config: Config) -> None:
        self.metric = config.checkpoint.keep_best or DEFAULT_METRIC
        self.mode = task_file.best_mode(config)
        self.patience = config.validation.patience
        self._keeps = bool(config.checkpoint.keep_best)
        self.step = -1
        self.value = math.nan
        """The first step with the best value; -1 before a validation."""
        self.without_improvement = 0
        """Validations since then."""
        self.kept = -1
        """Step of the best checkpoint, known to the first rank alone; -1 for none."""

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Note a validation's values, equal on all ranks. Of equal ones the first is best; nan and inf never are."""
        value = values[self.metric.removeprefix("validation.")]
        sign = 1 if self.mode == "max" else -1
        if math.isfinite(value) and (self.step < 0 or sign * value > sign * self.value):
            self.step = step
            self.value = value
            self.without_improvement = 0
        else:
            self.without_improvement += 1

    def is_new(self, step: int) -> bool:
        """Whether a checkpoint of this step is wanted because its validation was the best so far."""
        return self._keeps and step == self.step

    @property
    def exhausted(self) -> bool:
        """Whether validations have not improved for ``validation.patience`` times."""
        return 0 < self.patience <= self.without_improvement

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON."""
        state = {"metric": self.metric, "mode": self.mode, "step": self.step, "kept": self.kept}
        value = self.value if self.step >= 0 else None
        return {**state, "value": value, "without_improvement": self.without_improvement}

    def load(self, state: Any, folder: Place | None) -> None:
        """Continue from a checkpoint's state; ``folder`` holds the run's own checkpoints, None for another run's.

        A state that cannot be read, or is of another metric, is skipped, with a warning: only what is kept hangs on it.
        """
        if state is None or folder is None:
            return
        if not _is_state(state):
            logger.warning("the checkpoint's best validation cannot be read: looking for the best again")
            return
        if (state["metric"], state["mode"]) != (self.metric, self.mode):
            if state["step"] >= 0 and (self._keeps or self.patience):
                logger.warning(
                    f"the checkpoint knows the best by {state['metric']} ({state['mode']}), and this run looks for "
                    f"{self.metric} ({self.mode}): looking for the best again"
                )
            return
        self.step = state["step"]
        self.without_improvement = state["without_improvement"]
        self.value = math.nan if self.step < 0 else float(state["value"])
        # The best step's own checkpoint if it is whole, or else the one that was kept before it.
        whole = [step for step in (self.step, state["kept"]) if retention.is_whole(folder / f"step-{step}")]
        self.kept = whole[0] if whole else -1

    def point(self, folder: Place, saved: Mapping[str, Any] | None) -> None:
        """Let ``best.json`` name the best checkpoint, by the state that one just committed holds; first rank alone."""
        step = saved["step"] if saved else -1
        if not saved or not self._keeps or step < 0:
            return
        known = step == self.kept and read_pointer(folder).get("step") == step
        if known or not retention.is_whole(folder / f"step-{step}"):
            return
        fields = {"step": step, "metric": saved["metric"], "mode": saved["mode"], "value": saved["value"]}
        try:
            files.replace_whole(folder / POINTER, (json.dumps(fields) + "\n").encode())
        except OSError as error:
            # The checkpoint is safe, and its own facts say that it is the best; the next save tries again.
            logger.warning(str(storage_errors.cannot("write", folder / POINTER, error)))
            return
        self.kept = step


def read_pointer(folder: Place) -> dict[str, Any]:
    """What ``best.json`` says, or nothing where it cannot be read: it is a note for people."""
    try:
        pointer = json.loads(files.read_small(folder / POINTER))
    except (OSError, ValueError, RecursionError):
        return {}
    fits = isinstance(pointer, dict) and isinstance(pointer.get("step"), int) and isinstance(pointer.get("metric"), str)
    return pointer if fits and isinstance(pointer.get("value"), int | float) else {}


def describe(pointer: Mapping[str, Any]) -> str:
    """Return metric and value of ``best.json``, safe to print."""
    metric = "".join(char for char in str(pointer["metric"])[:80] if char.isprintable())
    return f"{metric} {float(pointer['value']):.6g}"


def _is_state(state: Any) -> bool:
    counts = ("step", "kept", "without_improvement")
    return (
        isinstance(state, dict)
        and all(isinstance(state.get(name), int) and not isinstance(state[name], bool) for name in counts)
        and isinstance(state.get("metric"), str)
        and isinstance(state.get("mode"), str)
        and (state["step"] < 0 or isinstance(state.get("value"), int | float))
        and state["without_improvement"] >= 0
    )
