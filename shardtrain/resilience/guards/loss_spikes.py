"""Detect steps whose loss or gradient norm is far above that of earlier steps, and react to them.

The decision is made before the update, from numbers that all ranks have. The history is saved with the run, so that
a resumed run makes the same decisions. ``train/rollback.py`` returns to an older checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardtrain.resilience.watched_run import WatchedRun
from shardtrain.utils.checked_json import is_count
from shardtrain.utils.errors import CheckpointError, NumericalError, fix_first
from shardtrain.utils.log import logger

RECENT_STEPS = 1000
"""Steps of which a share may be skipped; see ``training.nonfinite_max_skip_fraction``."""
MIN_VALUES = 20
"""Values that a window must hold before it judges, or all of a shorter one."""
NORM_FACTOR = 10.0
"""A gradient norm is a spike only from so many times the mean on: single batches of healthy runs reach five times."""
_ROUNDING = 1e-6
"""Smallest spread that counts, as a share of the mean: values that are equal but for rounding have no spikes."""


class Rewind(NamedTuple):
    """The run met a spike in ``step``, went back to the end of step ``to``, and leaves out some rows of the order."""

    step: int
    to: int
    first_row: int
    end_row: int


@dataclass
class Guard:
    """Equal on all ranks: it is made of numbers that all ranks know."""

    losses: list[float] = field(default_factory=list)
    """Global mean losses of the last steps, oldest first."""
    grad_norms: list[float] = field(default_factory=list)
    """Their gradient norms."""
    skipped_steps: list[int] = field(default_factory=list)
    """Those of the last RECENT_STEPS steps whose update was skipped, because a number was not finite."""
    spikes: int = 0
    """Spikes since the start of the run."""
    rewinds: list[Rewind] = field(default_factory=list)

    def may_skip(self, step: int, max_fraction: float) -> bool:
        """Whether one more update, that of ``step``, may be skipped; notes it when it may."""
        recent = [skipped for skipped in self.skipped_steps if skipped > step - RECENT_STEPS]
        if len(recent) + 1 > max_fraction * RECENT_STEPS:
            return False
        self.skipped_steps = [*recent, step]
        return True

    def find_spike(self, loss: float, grad_norm: float, window: int, sigmas: float) -> str:
        """What lies above the window, in words; empty when nothing does.

        A value is a spike when it is more than ``sigmas`` standard deviations above the mean of the window: the rule of
        OLMo-core's SkipStepOptimizer, for upward deviations alone. A spike enters the window like any other value, so
        a lasting change of level is taken for the new level after a few steps. Gradient norms have a long tail, so that
        the rule alone finds a spike in every 250 steps of a healthy run: they must be far above their mean, too.
        """
        spikes = []
        series = ("loss", loss, self.losses, 0.0), ("gradient norm", grad_norm, self.grad_norms, NORM_FACTOR)
        for name, value, values, factor in series:
            # too few values say nothing of the usual spread
            if len(values) < min(window, max(MIN_VALUES, window // 2)):
                continue
            mean = math.fsum(values) / len(values)
            spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
            if value - mean > sigmas * max(spread, _ROUNDING * abs(mean)) and value > factor * mean:
                spikes.append(
                    f"the {name} {value:.6g} is far above the {mean:.6g} ± {spread:.2g} of {len(values)} steps"
                )
        return " and ".join(spikes)

    def add(self, loss: float, grad_norm: float, window: int) -> None:
        """Take the values of a step into the window."""
        self.losses = [*self.losses, loss][-window:]
        self.grad_norms = [*self.grad_norms, grad_norm][-window:]

    def leaves_out(self, first_row: int, end_row: int) -> bool:
        """Whether one of some rows of the order of the data is to be left out; then their whole step is."""
        return any(rewind.first_row < end_row and first_row < rewind.end_row for rewind in self.rewinds)

    def steps_left_out(self, first_row: int, end_row: int, rows_per_step: int) -> int:
        """How many of the steps that rows would make are left out."""
        steps: set[int] = set()
        for rewind in self.rewinds:
            begin = max(rewind.first_row, first_row)
            end = min(rewind.end_row, end_row)
            if begin < end:
                steps |= {*range((begin - first_row) // rows_per_step, (end - 1 - first_row) // rows_per_step + 1)}
        return len(steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for a checkpoint."""
        return {
            "losses": self.losses,
            "grad_norms": self.grad_norms,
            "skipped_steps": self.skipped_steps,
            "spikes": self.spikes,
            "rewinds": [list(rewind) for rewind in self.rewinds],
        }

    def load(self, values: Mapping[str, Any]) -> None:
        """Take what a checkpoint holds; raises CheckpointError when it is not what ``to_dict`` writes."""
        losses = values.get("losses")
        norms = values.get("grad_norms")
        skipped = values.get("skipped_steps")
        spikes = values.get("spikes")
        rewinds = values.get("rewinds")
        good = (
            _are_finite(losses)
            and _are_finite(norms)
            and len(losses) == len(norms)  # type: ignore[arg-type]
            and _are_counts(skipped)
            and _are_counts([spikes])
            and isinstance(rewinds, list)
            and all(_are_counts(rewind) and len(rewind) == len(Rewind._fields) for rewind in rewinds)
        )
        if not good:
            raise CheckpointError("the guard's state does not hold losses, steps and rewinds; use another checkpoint")
        # checked above, which mypy does not follow
        self.losses = list(losses)  # type: ignore[arg-type]
        self.grad_norms = list(norms)  # type: ignore[arg-type]
        self.skipped_steps = list(skipped)  # type: ignore[arg-type]
        self.spikes = int(spikes)  # type: ignore[arg-type]
        self.rewinds = [Rewind(*rewind) for rewind in rewinds]  # type: ignore[union-attr]


class RollbackRequested(Exception):
    """Leaves a step whose update is not to be applied, on all ranks alike; see ``train/rollback.py``."""


def may_apply(run: WatchedRun, guard: Guard, loss: float, grad_norm: float) -> bool:
    """Judge a step by its global loss and gradient norm, which are finite and equal on all ranks.

    Raises:
        RollbackRequested: with ``training.spike_policy = "rewind"``, at a spike.
        NumericalError: the run has gone back from here too often.
    """
    training = run.config.training
    step = run.state.step + 1
    if training.spike_policy == "off":
        return True
    spike = guard.find_spike(loss, grad_norm, training.spike_window, training.spike_sigmas)
    if spike:
        guard.spikes += 1
        if training.spike_policy == "rewind":
            # going back from the same place again and again would never end
            near = sum(abs(step - rewind.step) <= training.spike_rewind_steps for rewind in guard.rewinds)
            if near < training.max_rewinds:
                raise RollbackRequested(f"step {step}: {spike}")
            raise NumericalError(
                fix_first(
                    f"step {step}: {spike}",
                    "lower optimizer.lr, or look at the data",
                    f"the run went back from here {near} times (training.max_rewinds)",
                    f"the weights are still those of step {run.state.step}",
                )
            )
        skips = training.spike_policy == "skip"
        logger.warning(f"step {step}: spike: {spike}{'; the update is skipped' if skips else ''}")
    guard.add(loss, grad_norm, training.spike_window)
    return not (spike and training.spike_policy == "skip")


def _are_finite(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) and math.isfinite(value) for value in values)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_count, values))
