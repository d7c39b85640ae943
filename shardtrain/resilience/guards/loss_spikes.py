"""Detect steps whose loss or gradient norm is far above that of earlier steps, and react to them.

The decision is made before the update, from numbers that all ranks have. The history is saved with the run,
so a resumed run makes the same decisions. ``train/rollback.py`` returns to an older checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from shardtrain.resilience.watched_run import WatchedRun
from shardtrain.utils.checked_json import is_count
from shardtrain.utils.errors import CheckpointError, NumericalError, fix_first
from shardtrain.utils.log import logger

RECENT_STEPS = 1000
"""Number of steps to which ``training.nonfinite_max_skip_fraction`` applies."""
MIN_VALUES = 20
"""Minimum number of values in a window before it is used. A shorter window must be full."""
NORM_FACTOR = 10.0
"""A gradient norm is a spike only above this multiple of the mean. Single batches of healthy runs reach five."""
_ROUNDING = 1e-6
"""Minimum standard deviation as a fraction of the mean, so rounding differences do not count as spikes."""


class Rewind(NamedTuple):
    """Rollback to the end of step ``to`` after a spike in step ``step``.

    Steps with rows in [first_row, end_row) are skipped.
    """

    step: int
    to: int
    first_row: int
    end_row: int


@dataclass
class Guard:
    """History of losses, norms, skipped steps and rollbacks. Equal on all ranks."""

    losses: list[float] = field(default_factory=list)
    """Global mean losses of the last steps, oldest first."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norms of the same steps."""
    skipped_steps: list[int] = field(default_factory=list)
    """Steps among the last RECENT_STEPS whose update was skipped because a number was not finite."""
    spikes: int = 0
    """Number of spikes since the start of the run."""
    rewinds: list[Rewind] = field(default_factory=list)

    def may_skip(self, step: int, max_fraction: float) -> bool:
        """Return True if the update of ``step`` may be skipped, and record the skip."""
        recent = [skipped for skipped in self.skipped_steps if skipped > step - RECENT_STEPS]
        if len(recent) + 1 > max_fraction * RECENT_STEPS:
            return False
        self.skipped_steps = [*recent, step]
        return True

    def find_spike(self, loss: float, grad_norm: float, window: int, sigmas: float) -> str:
        """Describe the values that are spikes, or return "" if there are none.

        A value is a spike if it is more than ``sigmas`` standard deviations above the mean of the window.
        This is the rule of OLMo-core's SkipStepOptimizer, applied only to upward deviations. A spike enters
        the window like any other value, so a lasting change becomes the new level after a few steps. Gradient
        norms have a long tail: this rule would find one spike in 250 steps of a healthy run. Therefore a norm
        must also exceed ``NORM_FACTOR`` times the mean.
        """
        # Too few values do not show the usual spread.
        min_values = min(window, max(MIN_VALUES, window // 2))
        series = (
            ("loss", loss, self.losses, 0.0),
            ("gradient norm", grad_norm, self.grad_norms, NORM_FACTOR),
        )
        spikes = []
        for name, value, values, factor in series:
            if len(values) < min_values:
                continue
            mean = math.fsum(values) / len(values)
            sum_of_squares = math.fsum((v - mean) ** 2 for v in values)
            spread = math.sqrt(sum_of_squares / (len(values) - 1))
            threshold = sigmas * max(spread, _ROUNDING * abs(mean))
            if value - mean > threshold and value > factor * mean:
                usual = f"{mean:.6g} ± {spread:.2g} of {len(values)} steps"
                spikes.append(f"the {name} {value:.6g} is far above the {usual}")
        return " and ".join(spikes)

    def add(self, loss: float, grad_norm: float, window: int) -> None:
        """Add the values of a step to the window."""
        self.losses = [*self.losses, loss][-window:]
        self.grad_norms = [*self.grad_norms, grad_norm][-window:]

    def excludes(self, first_row: int, end_row: int) -> bool:
        """True if a rollback excluded any row in [first_row, end_row). The entire step is then skipped."""
        return any(
            rewind.first_row < end_row and first_row < rewind.end_row for rewind in self.rewinds
        )

    def num_excluded_steps(
        self, first_row: int, end_row: int, step_of: Callable[[int], int]
    ) -> int:
        """Return the number of skipped steps among the steps that consist of the rows [first_row, end_row).

        ``step_of`` returns the step that uses a row.
        """
        steps: set[int] = set()
        for rewind in self.rewinds:
            begin = max(rewind.first_row, first_row)
            end = min(rewind.end_row, end_row)
            if begin < end:
                steps.update(range(step_of(begin), step_of(end - 1) + 1))
        return len(steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "skipped_steps": self.skipped_steps,
            "spikes": self.spikes,
            "rewinds": [list(rewind) for rewind in self.rewinds],
        }

    def load(self, values: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint.

        Raises:
            CheckpointError: the values do not have the form that ``to_dict`` writes.
        """
        losses: Any = values.get("losses")
        norms: Any = values.get("grad_norms")
        skipped: Any = values.get("skipped_steps")
        spikes: Any = values.get("spikes")
        rewinds: Any = values.get("rewinds")
        has_history = _are_finite(losses) and _are_finite(norms) and len(losses) == len(norms)
        has_counts = _are_counts(skipped) and _are_counts([spikes])
        if not has_history or not has_counts or not _are_rewinds(rewinds):
            raise CheckpointError(
                "the guard's state in the checkpoint is invalid; use another checkpoint"
            )
        self.losses = list(losses)
        self.grad_norms = list(norms)
        self.skipped_steps = list(skipped)
        self.spikes = int(spikes)
        self.rewinds = [Rewind(*rewind) for rewind in rewinds]


class RollbackRequested(Exception):
    """Ends a step without its update, on all ranks. ``train/rollback.py`` catches it."""


def may_apply(run: WatchedRun, guard: Guard, loss: float, grad_norm: float) -> bool:
    """Return True if a step's update may be applied. Also record its loss and norm.

    Args:
        run: the run.
        guard: the history.
        loss: global mean loss, finite and equal on all ranks.
        grad_norm: global gradient norm, finite and equal on all ranks.

    Raises:
        RollbackRequested: the step is a spike and ``training.spike_policy = "rewind"``.
        NumericalError: the run has rolled back too often from near this step.
    """
    training = run.config.training
    step = run.state.step + 1
    if training.spike_policy == "off":
        return True
    is_skipped = False
    spike = guard.find_spike(loss, grad_norm, training.spike_window, training.spike_sigmas)
    if spike:
        guard.spikes += 1
        if training.spike_policy == "rewind":
            _roll_back(run, guard, step, spike)
        is_skipped = training.spike_policy == "skip"
        suffix = "; the update is skipped" if is_skipped else ""
        logger.warning(f"step {step}: spike: {spike}{suffix}")
    guard.add(loss, grad_norm, training.spike_window)
    return not is_skipped


def _roll_back(run: WatchedRun, guard: Guard, step: int, spike: str) -> NoReturn:
    """Raise RollbackRequested, or NumericalError if the run has rolled back too often from near this step."""
    training = run.config.training
    # Repeated rollbacks from nearly the same step would never end.
    near = 0
    for rewind in guard.rewinds:
        if abs(step - rewind.step) <= training.spike_rewind_steps:
            near += 1
    if near < training.max_rewinds:
        raise RollbackRequested(f"step {step}: {spike}")
    raise NumericalError(
        fix_first(
            f"step {step}: {spike}",
            "lower optimizer.lr, or check the data",
            f"the run rolled back from here {near} times (training.max_rewinds)",
            f"the weights are still those of step {run.state.step}",
        )
    )


def _are_finite(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_count, values))


def _are_rewinds(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    num_fields = len(Rewind._fields)
    return all(_are_counts(value) and len(value) == num_fields for value in values)
