"""The learning rate as a pure function of the step. Nothing to save, nothing to restore; no torch here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardtrain.config.schema import LRScheduler, Optimizer


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


def _linear_linear(scheduler: LRScheduler, total: int, step: int) -> float:
    """Linear warmup that reaches the peak one step after it, then linear decay (torchtrain, 2024).

    W=2, N=10: 1/3, 2/3, 1, 7/8, ..., 1/8.
    """
    warmup = scheduler.warmup_steps
    return (step + 1) / (warmup + 1) if step < warmup else 1 - (step - warmup) / (total - warmup)


def _linear_by_proportion(scheduler: LRScheduler, total: int, step: int) -> float:
    """Linear from 0 over a share of the steps, then linear to 0 (Hugging Face's linear schedule)."""
    warmup = int(scheduler.warmup_proportion * total)
    return step / max(1, warmup) if step < warmup else (total - step) / max(1, total - warmup)


def _transformers(scheduler: LRScheduler, total: int, step: int) -> float:
    """Linear from 0 over the warmup, then the decay (get_linear_ and get_cosine_schedule_with_warmup of transformers).

    W=2, N=10, linear: 0, 1/2, 1, 7/8, ..., 1/8. A share of the steps is rounded up, as TrainingArguments does.
    """
    warmup = scheduler.warmup_steps or math.ceil(scheduler.warmup_proportion * total)
    if step < warmup:
        return step / max(1, warmup)
    return _decayed(scheduler, (step - warmup) / max(1, total - warmup))


def _deepspeed_warmup(scheduler: LRScheduler, total: int, step: int) -> float:
    """From min_lr_factor to the peak, by the logarithm of the step or linearly, then the peak (DeepSpeed's WarmupLR).

    Like there, a warmup takes at least 2 steps.
    """
    warmup = max(2, scheduler.warmup_steps)
    if step >= warmup:
        return 1.0
    share = math.log(step + 1) / math.log(warmup) if scheduler.warmup_type == "log" else step / warmup
    return scheduler.min_lr_factor + (1 - scheduler.min_lr_factor) * share


def _deepspeed_warmup_decay(scheduler: LRScheduler, total: int, step: int) -> float:
    """DeepSpeed's WarmupLR, and from its peak linearly back to min_lr_factor at the end (WarmupDecayLR)."""
    warmup = max(2, scheduler.warmup_steps)
    if step < warmup:
        return _deepspeed_warmup(scheduler, total, step)
    share = max(0.0, (total - step) / max(1, total - warmup))
    return scheduler.min_lr_factor + (1 - scheduler.min_lr_factor) * share


def _deepspeed_warmup_cosine(scheduler: LRScheduler, total: int, step: int) -> float:
    """A warmup from 0, then half a cosine from the step after the peak down to min_lr_factor (WarmupCosineLR)."""
    warmup = max(2, scheduler.warmup_steps)
    if step < warmup:
        return _deepspeed_warmup(replace(scheduler, min_lr_factor=0.0), total, step)
    share = (1 + math.cos(math.pi * (step - warmup + 1) / max(1, total - warmup))) / 2
    return scheduler.min_lr_factor + (1 - scheduler.min_lr_factor) * share


_SCHEDULES: dict[str, Callable[[LRScheduler, int, int], float]] = {
    "warmup_stable_decay": _warmup_stable_decay,
    "linear_linear": _linear_linear,
    "linear_by_proportion": _linear_by_proportion,
    "deepspeed_warmup": _deepspeed_warmup,
    "deepspeed_warmup_decay": _deepspeed_warmup_decay,
    "deepspeed_warmup_cosine": _deepspeed_warmup_cosine,
    "transformers": _transformers,
}
