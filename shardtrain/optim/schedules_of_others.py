"""Learning rates as other programs count them: torchtrain, Hugging Face's linear schedule, DeepSpeed. No torch here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardtrain.config.schema import LRScheduler


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


SCHEDULES: dict[str, Callable[[LRScheduler, int, int], float]] = {
    "linear_linear": _linear_linear,
    "linear_by_proportion": _linear_by_proportion,
    "deepspeed_warmup": _deepspeed_warmup,
    "deepspeed_warmup_decay": _deepspeed_warmup_decay,
    "deepspeed_warmup_cosine": _deepspeed_warmup_cosine,
}
