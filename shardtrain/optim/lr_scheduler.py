"""The learning rate as a pure function of the step. Nothing to save, nothing to restore; no torch here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shardtrain.config.schema import LRScheduler, Optimizer
from shardtrain.optim.schedules_of_others import SCHEDULES as SCHEDULES_OF_OTHERS


def learning_rate(optimizer: Optimizer, scheduler: LRScheduler, steps: int, step: int) -> float:
    """Learning rate of one optimizer step, between 0 and ``optimizer.lr``.

    ``step`` counts from 0; ``steps`` is the length of the run, and of the schedule unless ``scheduler.total_steps`` is
    set. Steps after the schedule keep its last rate.
    """
    total = scheduler.total_steps or steps
    factor = _SCHEDULES[scheduler.name](scheduler, total, min(step, total - 1))
    return optimizer.lr * min(1.0, max(0.0, factor))


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the rate of the next update in every group of parameters of a ``torch.optim.Optimizer``."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _warmup_stable_decay(scheduler: LRScheduler, total: int, step: int) -> float:
    """Linear warmup, peak, decay; the last rate is one step short of the end, as torchtitan v0.2 counts.

    W=2, N=10, linear: 1/2, 1, 1, 7/8, 6/8, ..., 1/8.
    """
    warmup = min(scheduler.warmup_steps, total)
    decay = total - warmup
    if scheduler.decay_ratio is not None:
        decay = min(decay, round(total * scheduler.decay_ratio))
    stable_end = total + 1 - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < stable_end:
        return 1.0
    return _decayed(scheduler, (step + 1 - stable_end) / decay)


def _decayed(scheduler: LRScheduler, progress: float) -> float:
    """From the peak at 0 to the lowest rate at 1."""
    shapes = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }
    return scheduler.min_lr_factor + (1 - scheduler.min_lr_factor) * shapes[scheduler.decay_type]


def _transformers(scheduler: LRScheduler, total: int, step: int) -> float:
    """Linear from 0 over the warmup, then the decay (get_linear_ and get_cosine_schedule_with_warmup of transformers).

    W=2, N=10, linear: 0, 1/2, 1, 7/8, ..., 1/8. A share of the steps is rounded up, as TrainingArguments does.
    """
    warmup = scheduler.warmup_steps or math.ceil(scheduler.warmup_proportion * total)
    if step < warmup:
        return step / max(1, warmup)
    return _decayed(scheduler, (step - warmup) / max(1, total - warmup))


_SCHEDULES: dict[str, Callable[[LRScheduler, int, int], float]] = {
    "warmup_stable_decay": _warmup_stable_decay,
    "transformers": _transformers,
    **SCHEDULES_OF_OTHERS,
}
