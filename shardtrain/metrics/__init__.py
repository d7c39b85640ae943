"""Metrics of a run: the trainer creates one ``Metrics`` object and calls ``update`` after each step.

Importing this package does not import torch. Sinks import their libraries only when they are enabled.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from shardtrain.config import ramps
from shardtrain.config.schema import Config
from shardtrain.facts.devices import peak_flops
from shardtrain.metrics import summary
from shardtrain.metrics.meters import MeterWindow, WindowMeans
from shardtrain.metrics.open_sinks import open_sinks
from shardtrain.metrics.peak_memory import read_peak
from shardtrain.metrics.progress_line import ProgressLine
from shardtrain.metrics.sinks import Sink
from shardtrain.metrics.step_record import Record, Reduce, RunFacts
from shardtrain.metrics.waiting import Waiting
from shardtrain.utils.best_effort import BestEffort
from shardtrain.utils.heartbeat import repeat, silence_seconds
from shardtrain.utils.log import redraw_allowed

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Metrics", "Record", "Reduce", "RunFacts"]

_MOST_LOSSES = 1000
"""Maximum number of losses for the curve of the summary.

When it is exceeded, every second loss is dropped.
"""


class Metrics:
    """Collect the results of steps and write them every ``metrics.log_freq`` steps.

    Every rank creates one directly before the first step. The writer rank writes ``metrics.jsonl`` (always),
    TensorBoard, W&B and the user's sinks. Every rank writes the console line to its own log. Use it as a
    context manager, or call ``close``. After construction, an error of a sink or of the live line never stops
    a step. It causes one warning.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        facts: RunFacts,
        reduce: Reduce,
        tokens_seen: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        phase: Callable[[], str] = lambda: "step",
    ) -> None:
        """Open the sinks.

        Args:
            config: the configuration.
            run_folder: ``job.dump_folder``.
            facts: constant facts of the run.
            reduce: collectives over the ranks that share a batch.
            tokens_seen: target tokens before the first step of this process.
            clock: returns seconds.
            phase: returns the name of the current phase, for messages about slow steps.

        Raises:
            ConfigError: the package of an enabled sink is missing.
        """
        self.tokens_seen = tokens_seen
        self._options = config.metrics
        self._facts = facts
        self._reduce = reduce
        self._clock = clock
        self._run_folder = Path(run_folder)
        self._peak_flops = self._options.peak_flops or peak_flops(
            facts.device_name, facts.compute_dtype
        )
        self._first: Record | None = None
        self._last: Record | None = None
        self._losses: list[tuple[int, float]] = []
        self._steps_without_targets = 0
        self._step = facts.start_step
        self._sinks = list(open_sinks(config, self._run_folder, facts))

        # Use one guard per sink, so a failing sink causes one warning and does not affect the others.
        self._guards = [
            BestEffort(f"the metric sink {type(sink).__name__}") for sink in self._sinks
        ]
        self._line = BestEffort("the live line")
        self._own = BestEffort("the record of a step")
        self._progress: ProgressLine | None = None
        if facts.is_writer and redraw_allowed(sys.stderr):
            self._progress = ProgressLine(
                facts.total_steps, facts.start_step, color=not self._options.disable_color_printing
            )
        self._closed = False
        self._own.call(lambda: summary.log_header(facts, self._peak_flops), None)

        # Start a thread that reports slow steps. The stack closes it before the objects that it uses.
        self._waiting = ExitStack()
        self._waits: Waiting | None = None
        if facts.is_writer and silence_seconds():
            compiles = bool(config.compile.enable)
            self._waits = Waiting(
                facts.total_steps, facts.start_step, phase, self._progress, compiles=compiles
            )
            self._waiting.callback(self._waits.close)
            self._waiting.enter_context(repeat(self._waits.tell))

        # Start the clock last, because the time to open sinks is not part of the first step.
        self._start_seconds = clock()
        self._window = MeterWindow(clock)
        self._computed_tokens = 0
        # computed tokens of all ranks, and their FLOPs, since the last logged step
        self._window_tokens = 0
        self._window_flops = 0.0
        # With a batch ramp, the remaining steps take longer than those of the window. Their sizes are relative, so
        # one sequence per step represents a constant batch.
        self._step_sizes = ramps.step_sizes(config.training, global_batch_size=1)

    def is_log_step(self, step: int) -> bool:
        """True if ``step`` (from 1) is logged: step 1, every ``log_freq`` steps, and the last."""
        return step == 1 or step % self._options.log_freq == 0 or step == self._facts.total_steps

    def pause(self) -> AbstractContextManager[None]:
        """Return a context manager that excludes its time from step times and speeds.

        Use it for validation and blocking saves.
        """
        return self._window.pause()

    def update(
        self,
        step: int,
        loss_sum: Tensor,
        local_tokens: int,
        global_tokens: int,
        grad_norm: float | Tensor,
        lr: float,
        data_seconds: float,
        extra: Mapping[str, float] | None = None,
        order_hash: int = 0,
        computed_tokens: int | None = None,
        source_sums: Tensor | None = None,
        flops_per_token: float | None = None,
    ) -> Record | None:
        """Report a finished step. On log steps this is a collective, so every rank must report every step.

        Other steps do not wait for the device.

        Args:
            step: the step, from 1.
            loss_sum: scalar sum of this rank's token losses on its device, not divided.
            local_tokens: target tokens of this rank.
            global_tokens: target tokens of all ranks.
            grad_norm: gradient norm before clipping.
            lr: learning rate.
            data_seconds: time that this rank waited for data.
            extra: other metrics, logged unchanged on log steps.
            order_hash: hash of the data so far, written in hex to ``metrics.jsonl``.
            computed_tokens: tokens of all ranks that the model computes with, by default the target tokens.
            source_sums: this rank's sums of losses and target tokens by data source, (2, sources).
            flops_per_token: FLOPs per computed token of this step, by default those of the run.

        Returns:
            The record on a log step, otherwise None.
        """
        self._step = step
        if self._waits:
            self._waits.step(step)
        self.tokens_seen += global_tokens
        self._steps_without_targets += global_tokens == 0
        computed_tokens = global_tokens if computed_tokens is None else computed_tokens
        self._computed_tokens += computed_tokens
        if flops_per_token is None:
            flops_per_token = self._facts.flops_per_token
        self._window_tokens += computed_tokens
        self._window_flops += computed_tokens * flops_per_token
        self._window.add(
            loss_sum, local_tokens, global_tokens, data_seconds, computed_tokens, source_sums
        )
        record = None
        if self.is_log_step(step):
            # No guard here, because these are collectives: a rank that skips one after an error
            # would block the others.
            means = self._window.read(self._reduce)
            norm = float(grad_norm)
            record = self._own.call(
                lambda: self._record(step, means, norm, lr, extra or {}, order_hash), None
            )
            if record is not None:
                if record.has_targets:
                    self._first = self._first or record
                    self._last = record
                # If there are too many losses, drop every second one, so the curve still covers the
                # entire run.
                if math.isfinite(record.loss):
                    self._losses.append((record.step, record.loss))
                    if len(self._losses) > _MOST_LOSSES:
                        del self._losses[1::2]
                self._to_sinks(lambda sink: sink.write(record))
        progress = self._progress
        if progress is not None:
            self._line.call(lambda: progress.step(step, record), None)
        return record

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Report results on held-out data, such as ``{"loss": 2.9}``, to the sinks and ``validation.jsonl``."""
        self._to_sinks(lambda sink: sink.validation(step, values))

    def close(self, summarize: bool = True) -> None:
        """Close all sinks, and log a summary of the run if ``summarize`` is set.

        A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._waiting.close()
        if self._progress:
            self._line.call(self._progress.close, None)
        self._to_sinks(lambda sink: sink.close())
        if summarize:
            self._own.call(self._log_summary, None)

    def __enter__(self) -> Metrics:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all sinks. Log the summary only if the block did not raise."""
        self.close(summarize=kind is None)

    def _record(
        self,
        step: int,
        means: WindowMeans,
        grad_norm: float,
        lr: float,
        extra: Mapping[str, float],
        order_hash: int,
    ) -> Record:
        """Compute the record of a log step from the means of its window."""
        if self._steps_without_targets:
            extra = {**extra, "steps_without_targets": self._steps_without_targets}
        extra = {**extra, **self._of_sources(means)}
        tps = means.tokens_per_second / self._facts.world_size
        flops_per_second = 0.0
        if self._window_tokens:
            flops_per_second = tps * self._window_flops / self._window_tokens
        self._window_tokens = 0
        self._window_flops = 0.0
        return Record(
            step=step,
            loss=means.loss,
            max_loss=means.max_loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens_seen=self.tokens_seen,
            tokens_per_second=means.tokens_per_second,
            targets_per_second=means.targets_per_second,
            tps=tps,
            tflops=flops_per_second / 1e12,
            mfu=flops_per_second / self._peak_flops if self._peak_flops else None,
            step_seconds=means.step_seconds,
            data_seconds=means.data_seconds,
            memory=read_peak(self._facts.device_type),
            eta_seconds=self._steps_left(step) * means.step_seconds,
            has_targets=means.targets > 0,
            extra=extra,
            order_hash=order_hash,
        )

    def _steps_left(self, step: int) -> float:
        """Return the number of steps of the size of step ``step`` that the rest of the run corresponds to."""
        sizes = self._step_sizes
        rows_left = sizes.after(0, self._facts.total_steps) - sizes.after(0, step)
        return rows_left / sizes.batch_at(sizes.after(0, step - 1))

    def _of_sources(self, means: WindowMeans) -> dict[str, float]:
        """Return loss and target tokens of each data source that had targets in the window."""
        values = {}
        if means.loss_sums:
            of_sources = zip(self._facts.sources, means.loss_sums, means.target_counts, strict=True)
            for name, loss_sum, num_targets in of_sources:
                if num_targets:
                    values[f"loss_of/{name}"] = loss_sum / num_targets
                    values[f"targets_of/{name}"] = num_targets
        return values

    def _to_sinks(self, action: Callable[[Sink], None]) -> None:
        """Call ``action`` with every sink, each in its own guard."""
        for sink, guard in zip(self._sinks, self._guards, strict=True):
            guard.call(lambda sink=sink: action(sink), None)  # type: ignore[misc]

    def _log_summary(self) -> None:
        steps = summary.Steps(
            self._step, self._computed_tokens, self._clock() - self._start_seconds
        )
        notes = [getattr(sink, "summary", "") for sink in self._sinks]
        summary.log_summary(self._facts, steps, self._first, self._last, self._losses, notes)
