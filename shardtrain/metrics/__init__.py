"""What a run measures, how often, and where it goes: the trainer makes one ``Metrics`` and calls ``update`` per step.

Importing this package imports no torch; the sinks import their libraries when they are asked for.
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

from shardtrain.config.schema import Config
from shardtrain.facts.devices import peak_flops
from shardtrain.metrics import summary
from shardtrain.metrics.meters import MeterWindow, WindowMeans
from shardtrain.metrics.open_sinks import open_sinks
from shardtrain.metrics.peak_memory import read_peak
from shardtrain.metrics.progress_line import ProgressLine
from shardtrain.metrics.record import Record, Reduce, RunFacts
from shardtrain.metrics.sinks import Sink
from shardtrain.metrics.waiting import Waiting
from shardtrain.utils.best_effort import BestEffort
from shardtrain.utils.heartbeat import asked_seconds, repeat
from shardtrain.utils.log import redraw_allowed

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Metrics", "Record", "Reduce", "RunFacts"]

_MOST_LOSSES = 1000
"""That the curve of the summary is drawn from; of more, every second one goes."""


class Metrics:
    """Collects what steps report and writes it every ``metrics.log_freq`` steps.

    Made by every rank, right before the first step; ``run_folder`` is ``job.dump_folder``. The writer rank keeps
    ``metrics.jsonl`` (always), TensorBoard, W&B and the user's sinks; every rank logs the console line to its own log.
    Use it as a context manager, or call ``close``. Raises ConfigError where a sink's package is missing. Once it is
    open, no error of a sink, of the live line or of what is computed for them ends a step: it is one warning.
    ``phase`` gives the name of what the run does at the moment, for the lines of a step that takes long.
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
        self.tokens_seen = tokens_seen
        self._options = config.metrics
        self._facts = facts
        self._reduce = reduce
        self._clock = clock
        self._run_folder = Path(run_folder)
        self._peak_flops = self._options.peak_flops or peak_flops(facts.device_name, facts.compute_dtype)
        self._first: Record | None = None
        self._last: Record | None = None
        self._losses: list[tuple[int, float]] = []
        self._steps_without_targets = 0
        self._step = facts.start_step
        self._sinks = list(open_sinks(config, self._run_folder, facts))

        # One guard each, so that a sink that fails is one warning, and the others are written.
        self._guards = [BestEffort(f"the metric sink {type(sink).__name__}") for sink in self._sinks]
        self._line = BestEffort("the live line")
        self._own = BestEffort("what the log and metrics.jsonl say of a step")
        self._progress: ProgressLine | None = None
        if facts.is_writer and redraw_allowed(sys.stderr):
            self._progress = ProgressLine(
                facts.total_steps, facts.start_step, color=not self._options.disable_color_printing
            )
        self._closed = False
        self._own.call(lambda: summary.log_header(facts, self._peak_flops), None)

        # A thread that tells of a step that takes long; closed in the reverse order, the thread before what it uses.
        self._waiting = ExitStack()
        self._waits: Waiting | None = None
        if facts.is_writer and asked_seconds():
            compiles = bool(config.compile.enable)
            self._waits = Waiting(facts.total_steps, facts.start_step, phase, self._progress, compiles=compiles)
            self._waiting.callback(self._waits.close)
            self._waiting.enter_context(repeat(self._waits.tell))

        # Last, so that opening sinks counts as no step's time.
        self._start_seconds = clock()
        self._window = MeterWindow(clock)
        self._computed_tokens = 0

    def is_log_step(self, step: int) -> bool:
        """Whether ``step`` (1 is the first) is written: step 1, every ``log_freq`` steps, and the last."""
        return step == 1 or step % self._options.log_freq == 0 or step == self._facts.total_steps

    def pause(self) -> AbstractContextManager[None]:
        """Leave the time within out of step times and speeds: for validation and blocking saves."""
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
    ) -> Record | None:
        """Report a finished step (1 is the first); returns what was logged on a log step, else None.

        ``loss_sum`` is the scalar sum of this rank's token losses on its device, not divided; ``local_tokens`` and
        ``global_tokens`` are the target tokens of this rank and of all; ``computed_tokens`` are the tokens of all ranks
        that the model computes with (the target tokens if None); ``data_seconds`` is the wait for data. Values in
        ``extra`` are logged as they are on log steps, and ``order_hash`` in hex in ``metrics.jsonl``. Steps in
        between wait for nothing; a log step reduces over ranks, so every rank must report every step.
        """
        self._step = step
        if self._waits:
            self._waits.step(step)
        self.tokens_seen += global_tokens
        self._steps_without_targets += global_tokens == 0
        computed_tokens = global_tokens if computed_tokens is None else computed_tokens
        self._computed_tokens += computed_tokens
        self._window.add(loss_sum, local_tokens, global_tokens, data_seconds, computed_tokens)
        record = None
        if self.is_log_step(step):
            # Collectives, which other ranks take part in: not within a guard, after whose error one would be missing.
            means = self._window.read(self._reduce)
            norm = float(grad_norm)
            record = self._own.call(lambda: self._record(step, means, norm, lr, extra or {}, order_hash), None)
            if record is not None:
                if record.has_targets:
                    self._first = self._first or record
                    self._last = record
                # Every second one goes when there are many, but the first: a curve of the whole run stays small.
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
        """Report results on held-out data, equal on all ranks: ``{"loss": 2.9}``; kept in ``validation.jsonl``."""
        self._to_sinks(lambda sink: sink.validation(step, values))

    def close(self, summarize: bool = True) -> None:
        """Close all sinks, and log a summary of the run unless told otherwise; a second call does nothing."""
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; the summary appears only where the run did not fail."""
        self.close(summarize=kind is None)

    def _record(
        self, step: int, means: WindowMeans, grad_norm: float, lr: float, extra: Mapping[str, float], order_hash: int
    ) -> Record:
        """Turn the sums of a window into what is logged."""
        if self._steps_without_targets:
            extra = {**extra, "steps_without_targets": self._steps_without_targets}
        tps = means.tokens_per_second / self._facts.world_size
        flops_per_second = tps * self._facts.flops_per_token
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
            eta_seconds=(self._facts.total_steps - step) * means.step_seconds,
            has_targets=means.targets > 0,
            extra=extra,
            order_hash=order_hash,
        )

    def _to_sinks(self, action: Callable[[Sink], None]) -> None:
        """Call every sink; the failure of one is not that of the others."""
        for sink, guard in zip(self._sinks, self._guards, strict=True):
            guard.call(lambda sink=sink: action(sink), None)  # type: ignore[misc]

    def _log_summary(self) -> None:
        steps = summary.Steps(self._step, self._computed_tokens, self._clock() - self._start_seconds)
        notes = [getattr(sink, "summary", "") for sink in self._sinks]
        summary.log_summary(self._facts, steps, self._first, self._last, self._losses, notes)
