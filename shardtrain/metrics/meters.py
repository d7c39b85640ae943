"""Sums over the steps since the last log step. Only reading the window waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardtrain.metrics.step_record import Reduce

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WindowMeans:
    """Totals and means of a window."""

    loss: float
    """Sum of losses over ranks and steps, divided by the global number of target tokens.

    NaN without tokens.
    """
    max_loss: float
    """Maximum over ranks of a rank's loss per token in the window. NaN if no rank has tokens."""
    targets: int
    """Global number of target tokens."""
    computed_tokens: int
    """Global number of tokens that the model processed, without padding."""
    steps: int
    seconds: float
    """Wall time of the window, without pauses."""
    data_seconds: float
    """Mean time per step that this rank waited for data."""
    loss_sums: tuple[float, ...] = ()
    """Sum of losses of each data source over ranks and steps. Empty without ``source_sums``."""
    target_counts: tuple[int, ...] = ()
    """Number of target tokens of each data source, like ``loss_sums``."""

    @property
    def step_seconds(self) -> float:
        """Mean wall time of a step."""
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Global computed tokens per second, or 0 if no time has passed."""
        return self.computed_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def targets_per_second(self) -> float:
        """Global target tokens per second, or 0 if no time has passed."""
        return self.targets / self.seconds if self.seconds > 0 else 0.0


@dataclass
class _Sums:
    """Running sums of a window. ``start`` is the clock time at its beginning."""

    start: float
    loss: Tensor | None = None
    of_sources: Tensor | None = None
    local_tokens: int = 0
    global_tokens: int = 0
    computed_tokens: int = 0
    data_seconds: float = 0.0
    paused_seconds: float = 0.0
    steps: int = 0


class MeterWindow:
    """Accumulates losses, tokens and waiting times of steps."""

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
        source_sums: Tensor | None = None,
    ) -> None:
        """Add one step.

        Args:
            loss_sum: sum of this rank's losses, a scalar on any device.
            local_tokens: target tokens of this rank.
            global_tokens: target tokens of all ranks.
            data_seconds: time that this rank waited for data.
            computed_tokens: tokens of all ranks without padding, by default the target tokens.
            source_sums: this rank's losses and target tokens by data source, (2, sources) float64.
        """
        # Imported here, because the module is imported without torch.
        from shardtrain.ops.accelerator import sum_dtype

        # Sum in float64 if the device has it, because a window contains many steps. The addition runs on the device,
        # so the host does not wait.
        loss = loss_sum.detach().to(sum_dtype(loss_sum.device))
        sums = self._sums
        sums.loss = loss if sums.loss is None else sums.loss + loss
        if source_sums is not None:
            before = sums.of_sources
            sums.of_sources = source_sums if before is None else before + source_sums
        sums.local_tokens += local_tokens
        sums.global_tokens += global_tokens
        sums.computed_tokens += global_tokens if computed_tokens is None else computed_tokens
        sums.data_seconds += data_seconds
        sums.steps += 1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of the block from the window. Used for validation and blocking saves."""
        start = self._clock()
        try:
            yield
        finally:
            self._sums.paused_seconds += self._clock() - start

    def read(self, reduce: Reduce) -> WindowMeans:
        """Reduce the sums over ranks, and start the next window. Collective. Waits for the device.

        Raises:
            ValueError: no step was added.
        """
        sums = self._sums
        if sums.loss is None:
            raise ValueError("a window without steps cannot be read")
        local = sums.loss
        # A rank without tokens has no loss per token. Minus infinity never becomes the maximum.
        per_token = local.new_full((), -float("inf"))
        if sums.local_tokens:
            per_token = local / sums.local_tokens
        # one collective for all sums
        num_values = 1
        if sums.of_sources is not None:
            num_values += sums.of_sources.numel()
        values = local.new_zeros(num_values)
        values[0] = local
        if sums.of_sources is not None:
            values[1:] = sums.of_sources.flatten()
        total, *of_sources = reduce.sum(values).tolist()
        num_sources = len(of_sources) // 2
        largest = float(reduce.max(per_token))
        # Read the clock after the device has finished, so the window includes the work and not only its
        # launch.
        now = self._clock()
        # A window without any target has no loss.
        loss = float("nan")
        if sums.global_tokens:
            loss = total / sums.global_tokens
        if largest == -float("inf"):
            largest = float("nan")
        means = WindowMeans(
            loss=loss,
            max_loss=largest,
            targets=sums.global_tokens,
            computed_tokens=sums.computed_tokens,
            steps=sums.steps,
            seconds=now - sums.start - sums.paused_seconds,
            data_seconds=sums.data_seconds / sums.steps,
            loss_sums=tuple(of_sources[:num_sources]),
            target_counts=tuple(int(count) for count in of_sources[num_sources:]),
        )
        self._sums = _Sums(start=now)
        return means
