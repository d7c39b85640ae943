"""Sums over the steps since the last logged one; nothing waits for the device until the window is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardtrain.metrics.record import Reduce

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WindowMeans:
    """What a window adds up to, over all ranks where it says so."""

    loss: float
    """Sum of losses over ranks and steps, divided by the global number of tokens; NaN without tokens."""
    max_loss: float
    """Largest loss per token of a rank over the window; NaN where no rank has tokens."""
    targets: int
    """Global number of target tokens."""
    computed_tokens: int
    """Global number of tokens that the model computed with, without filler."""
    steps: int
    seconds: float
    """Wall time of the window without pauses."""
    data_seconds: float
    """Mean wait for data per step, of this rank."""

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Global computed tokens per second; 0 if the clock has not moved."""
        return self.computed_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def targets_per_second(self) -> float:
        """Global target tokens per second; 0 if the clock has not moved."""
        return self.targets / self.seconds if self.seconds > 0 else 0.0


@dataclass
class _Sums:
    """Running sums of a window; ``start`` is the clock at its beginning."""

    start: float
    loss: Tensor | None = None
    local_tokens: int = 0
    global_tokens: int = 0
    computed_tokens: int = 0
    data_seconds: float = 0.0
    paused_seconds: float = 0.0
    steps: int = 0


class MeterWindow:
    """Adds up losses, tokens and waits of steps; ``read`` reduces them over ranks and starts the next window."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sums = _Sums(start=clock())

    def add(
        self,
        loss_sum: Tensor,
        local_tokens: int,
        global_tokens: int,
        data_seconds: float,
        computed_tokens: int | None = None,
    ) -> None:
        """Add one step.

        ``loss_sum`` is the sum of this rank's losses, a scalar on any device. ``local_tokens`` and ``global_tokens``
        are target tokens of this rank and of all. ``computed_tokens`` are all tokens of all ranks but filler; as many
        as targets if None.
        """
        # In double, since a window sums many steps; an addition on the device, so the host does not wait.
        loss = loss_sum.detach().double()
        sums = self._sums
        sums.loss = loss if sums.loss is None else sums.loss + loss
        sums.local_tokens += local_tokens
        sums.global_tokens += global_tokens
        sums.computed_tokens += global_tokens if computed_tokens is None else computed_tokens
        sums.data_seconds += data_seconds
        sums.steps += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time within out of the window: validation and blocking saves are not steps."""
        start = self._clock()
        try:
            yield
        finally:
            self._sums.paused_seconds += self._clock() - start

    def read(self, reduce: Reduce) -> WindowMeans:
        """Reduce over ranks (a collective: every rank calls it) and start the next window.

        Waits for the device. Raises ValueError where no step was added.
        """
        sums = self._sums
        if sums.loss is None:
            raise ValueError("a window without steps cannot be read")
        local = sums.loss
        # A rank without tokens has no loss per token; minus infinity never is the largest.
        per_token = local / sums.local_tokens if sums.local_tokens else local.new_full((), -float("inf"))
        total = float(reduce.sum(local.clone()))
        largest = float(reduce.max(per_token))
        # The clock is read after the device has caught up, so that the window holds the work and not its launch.
        now = self._clock()
        means = WindowMeans(
            loss=total / sums.global_tokens if sums.global_tokens else float("nan"),
            max_loss=float("nan") if largest == -float("inf") else largest,
            targets=sums.global_tokens,
            computed_tokens=sums.computed_tokens,
            steps=sums.steps,
            seconds=now - sums.start - sums.paused_seconds,
            data_seconds=sums.data_seconds / sums.steps,
        )
        self._sums = _Sums(start=now)
        return means
