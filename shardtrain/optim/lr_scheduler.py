"""The learning rate as a pure function of the step, without state and without torch."""

from __future__ import annotations

from typing import Any

from shardtrain.config.schema import LRScheduler, Optimizer
from shardtrain.facts.lr_schedules import SCHEDULES, Schedule, options_of
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.units import real_number

# Number of steps at which a user's schedule is called twice.
_CHECKED_STEPS = 1000
_CHECKED_AT_AN_EDGE = 10


def find(name: str) -> Schedule:
    """Return the schedule that ``lr_scheduler.name`` names. Runs the file if it is a path.

    Raises:
        ConfigError: the file does not exist or has no function ``factor``.
    """
    if not name.endswith(".py"):
        return SCHEDULES[name]
    return own_file.load_function(name, own_file.SCHEDULE, "lr_scheduler.name")


def learning_rate(
    optimizer: Optimizer,
    scheduler: LRScheduler,
    steps: int,
    step: int,
    schedule: Schedule | None = None,
) -> float:
    """Return the learning rate of one optimizer step, between 0 and ``optimizer.lr``.

    ``step`` counts from 0. ``steps`` is the length of the run, and of the schedule unless
    ``scheduler.total_steps`` is set. Steps after the schedule keep its last rate. ``schedule`` is the
    result of ``find(scheduler.name)``, which spares a user's file from being run at every step.

    Raises:
        ConfigError: a user's schedule returns something other than a number between 0 and 1.
    """
    if schedule is None:
        schedule = find(scheduler.name)
    total = scheduler.total_steps or steps
    options = {name: getattr(scheduler, name) for name in options_of(schedule)}
    returned = schedule(min(step, total - 1), total, **options)
    # a user's schedule may return a NumPy scalar or a tensor
    factor = returned if type(returned) is float else real_number(returned)
    # the margin is for rounding; the comparison is false for NaN
    if factor is None or not -1e-6 <= factor <= 1 + 1e-6:
        raise ConfigError(
            Problem(
                "lr_scheduler.name",
                scheduler.name,
                rule=f"returns {' '.join(repr(returned).split()):.60} at step {step} of {total}",
                fix="return the share of the peak rate, a number between 0 and 1",
            )
        )
    return optimizer.lr * min(1.0, max(0.0, factor))


def check_own(
    optimizer: Optimizer, scheduler: LRScheduler, steps: int, schedule: Schedule, again: Schedule
) -> None:
    """Check that a user's schedule depends only on the step: call it for about 1,000 steps in
    order, and ``again`` for the same steps in reverse order.

    A resumed run starts in the middle, without values that the file remembers from earlier steps.

    Args:
        schedule: the result of ``find``.
        again: the result of another call of ``find``, which has run the file again.

    Raises:
        ConfigError: a step has another rate the second time, or a rate is not a number between 0 and 1.
    """
    checked_steps = _steps_to_check(scheduler, steps)
    rates = {}
    for step in checked_steps:
        rates[step] = learning_rate(optimizer, scheduler, steps, step, schedule)
    for step in reversed(checked_steps):
        if learning_rate(optimizer, scheduler, steps, step, again) != rates[step]:
            rule = (
                f"returns another value when it is called again for step {step}, "
                "so a resumed run would differ"
            )
            fix = "compute it from the arguments only"
            raise ConfigError(Problem("lr_scheduler.name", scheduler.name, rule, fix))


def _steps_to_check(scheduler: LRScheduler, steps: int) -> list[int]:
    """Return steps spread over the run, and all steps near its start, its end and the end of the warmup."""
    spacing = max(1, steps // _CHECKED_STEPS)
    # Schedules change their formula at these steps.
    chosen = set(range(0, steps, spacing))
    for edge in (0, scheduler.warmup_steps, scheduler.total_steps or steps, steps):
        first = max(0, edge - _CHECKED_AT_AN_EDGE)
        stop = min(steps, edge + _CHECKED_AT_AN_EDGE)
        chosen.update(range(first, stop))
    return sorted(chosen)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the rate of the next update in every group of parameters of a ``torch.optim.Optimizer``."""
    for group in optimizer.param_groups:
        group["lr"] = lr
