"""Learning-rate schedules. To add one, write its function and list it in ``SCHEDULES``.

A schedule returns the learning rate of an optimizer step as a share of the peak rate. ``step`` counts from 0
and ``total_steps`` is the length of the schedule. Each further parameter is the option of ``[lr_scheduler]``
of that name: the signature is the only place that says which options a schedule reads. The function in a
user's own file has the same signature.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Literal

Schedule = Callable[..., float]
DecayType = Literal["linear", "sqrt", "cosine"]
WarmupType = Literal["log", "linear"]


def options_of(schedule: Schedule) -> tuple[str, ...]:
    """Return the options of ``[lr_scheduler]`` that a schedule reads, besides ``total_steps``.

    >>> options_of(linear_linear)
    ('warmup_steps',)
    """
    # The first two parameters are those of every schedule.
    _step, _total_steps, *options = inspect.signature(schedule).parameters
    return tuple(options)


def warmup_stable_decay(
    step: int,
    total_steps: int,
    warmup_steps: int,
    decay_ratio: float | None,
    decay_type: DecayType,
    min_lr_factor: float,
) -> float:
    """Linear warmup, constant peak, then decay to ``min_lr_factor``.

    As in torchtitan v0.2, the decay would reach its end one step after the run. So with ``min_lr_factor`` 0 the last
    step still has a nonzero rate. With 2 warmup steps of 10 and linear decay: 1/2, 1, 1, 7/8, 6/8, ..., 1/8.
    """
    # A short run may end during the warmup.
    warmup = min(warmup_steps, total_steps)
    decay = total_steps - warmup
    if decay_ratio is not None:
        decay = min(decay, round(total_steps * decay_ratio))
    # The + 1 puts the end of the decay one step after the run.
    stable_end = total_steps + 1 - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < stable_end:
        return 1.0
    return _decay((step + 1 - stable_end) / decay, decay_type, min_lr_factor)


def transformers(
    step: int,
    total_steps: int,
    warmup_steps: int,
    warmup_proportion: float,
    decay_type: DecayType,
    min_lr_factor: float,
) -> float:
    """Warm up linearly from 0, then decay.

    As get_linear_schedule_with_warmup and get_cosine_schedule_with_warmup of transformers. With 2 warmup
    steps of 10 and linear decay the shares are 0, 1/2, 1, 7/8, ..., 1/8. A warmup that is given as a share
    of the steps is rounded up, as in TrainingArguments.
    """
    # A number of steps takes precedence over a share.
    warmup = warmup_steps or math.ceil(warmup_proportion * total_steps)
    if step < warmup:
        return step / max(1, warmup)
    return _decay((step - warmup) / max(1, total_steps - warmup), decay_type, min_lr_factor)


def linear_linear(step: int, total_steps: int, warmup_steps: int) -> float:
    """Linear warmup that reaches the peak one step after it, then linear decay (torchtrain, 2024).

    W=2, N=10: 1/3, 2/3, 1, 7/8, ..., 1/8.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return 1 - (step - warmup_steps) / (total_steps - warmup_steps)


def linear_by_proportion(step: int, total_steps: int, warmup_proportion: float) -> float:
    """Linear from 0 over a share of the steps, then linear to 0 (Hugging Face's linear schedule)."""
    warmup = int(warmup_proportion * total_steps)
    if step < warmup:
        return step / warmup
    return (total_steps - step) / max(1, total_steps - warmup)


def deepspeed_warmup(
    step: int, total_steps: int, warmup_steps: int, warmup_type: WarmupType, min_lr_factor: float
) -> float:
    """Warm up from min_lr_factor to the peak, linearly or by the logarithm of the step, and stay there.

    This is DeepSpeed's WarmupLR. As in DeepSpeed, a warmup takes at least 2 steps.
    """
    warmup = max(2, warmup_steps)
    if step >= warmup:
        return 1.0
    share = step / warmup
    if warmup_type == "log":
        share = math.log(step + 1) / math.log(warmup)
    return min_lr_factor + (1 - min_lr_factor) * share


def deepspeed_warmup_decay(
    step: int, total_steps: int, warmup_steps: int, warmup_type: WarmupType, min_lr_factor: float
) -> float:
    """DeepSpeed's WarmupLR, then linearly from the peak back to min_lr_factor at the end (WarmupDecayLR)."""
    warmup = max(2, warmup_steps)
    if step < warmup:
        return deepspeed_warmup(step, total_steps, warmup_steps, warmup_type, min_lr_factor)
    share = max(0.0, (total_steps - step) / max(1, total_steps - warmup))
    return min_lr_factor + (1 - min_lr_factor) * share


def deepspeed_warmup_cosine(
    step: int, total_steps: int, warmup_steps: int, warmup_type: WarmupType, min_lr_factor: float
) -> float:
    """A warmup from 0, then half a cosine from the step after the peak down to min_lr_factor (WarmupCosineLR)."""
    warmup = max(2, warmup_steps)
    if step < warmup:
        return deepspeed_warmup(step, total_steps, warmup_steps, warmup_type, min_lr_factor=0.0)
    # The first step after the warmup is already on the cosine.
    progress = (step - warmup + 1) / max(1, total_steps - warmup)
    share = (1 + math.cos(math.pi * progress)) / 2
    return min_lr_factor + (1 - min_lr_factor) * share


def _decay(progress: float, decay_type: DecayType, min_lr_factor: float) -> float:
    """Decay from 1 at progress 0 to ``min_lr_factor`` at progress 1."""
    match decay_type:
        case "linear":
            share = 1 - progress
        case "sqrt":
            share = 1 - math.sqrt(progress)
        case "cosine":
            share = 0.5 * (1 + math.cos(math.pi * progress))
    return min_lr_factor + (1 - min_lr_factor) * share


# The name of a schedule is that of its function.
SCHEDULES: dict[str, Schedule] = {
    schedule.__name__: schedule
    for schedule in (
        warmup_stable_decay,
        linear_linear,
        linear_by_proportion,
        deepspeed_warmup,
        deepspeed_warmup_decay,
        deepspeed_warmup_cosine,
        transformers,
    )
}
