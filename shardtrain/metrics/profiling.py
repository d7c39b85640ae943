"""Profiler traces and snapshots of device memory. Imports torch only when a profiler starts."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardtrain.config.schema import Config
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.best_effort import BestEffort
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger
from shardtrain.utils.units import format_seconds

if TYPE_CHECKING:
    import torch

SNAPSHOT_ENTRIES = 100_000
"""Number of allocations in the memory history."""


def profiling_problems(config: Config, device_type: str) -> list[Problem]:
    """Return problems with ``[profiling]`` options, including options that this device does not support."""
    options = config.profiling
    problems = []
    busy = options.profiler_warmup + options.profiler_active
    # Traces.
    if options.enable_profiling and options.profiler_active < 1:
        problems.append(
            Problem(
                "profiling.profiler_active",
                options.profiler_active,
                rule="records nothing",
                fix="set it to at least 1",
            )
        )
    if options.enable_profiling and options.profiler_warmup < 0:
        problems.append(
            Problem(
                "profiling.profiler_warmup",
                options.profiler_warmup,
                rule="is negative",
                fix="set it to at least 0",
            )
        )
    if options.enable_profiling and options.profile_freq < busy:
        problems.append(
            Problem(
                "profiling.profile_freq",
                options.profile_freq,
                rule=f"must be at least profiler_warmup + profiler_active, which is {busy}",
                fix=f"set it to at least {busy}",
            )
        )
    # Memory snapshots.
    if options.enable_memory_snapshot and options.profile_freq < 1:
        problems.append(
            Problem(
                "profiling.profile_freq",
                options.profile_freq,
                rule="must be at least 1",
                fix="set it to 10",
            )
        )
    if options.enable_memory_snapshot and device_type != "cuda":
        problems.append(
            Problem(
                "profiling.enable_memory_snapshot",
                True,
                rule=f"requires the CUDA allocator, but this run uses {device_type}",
                fix="set it to false",
            )
        )
    return problems


class Profiler:
    """The active profiler and memory history. Call ``step`` at the end of each training step."""

    def __init__(self, parts: Sequence[_Trace | _MemorySnapshot]) -> None:
        self._parts = parts
        self._guard = BestEffort("profiling")

    def step(self) -> None:
        """Report the end of a step to the profiler and the memory history."""
        for part in self._parts:
            # A failing profiler must not stop training.
            self._guard.call(part.step, None)

    def close(self) -> None:
        """Stop the profiler and the memory history."""
        for part in self._parts:
            self._guard.call(part.close, None)


@contextmanager
def profiler(
    config: Config, run_folder: Path, rank: int, device_type: str, start_step: int = 0
) -> Iterator[Profiler | None]:
    """Record traces and memory snapshots in the block, as configured in ``[profiling]``.

    Every ``profile_freq`` steps, a trace is written to ``save_traces_folder/iteration_N/rankR_trace.json``
    and a snapshot to ``save_memory_snapshot_folder/iteration_N/rankR_memory_snapshot.pickle``, in
    ``run_folder``. N is the step that has just ended. If the device runs out of memory, another snapshot is
    written to ``iteration_N_exit``.

    Yields:
        The profiler, or None if ``[profiling]`` enables nothing.

    Raises:
        ConfigError: see ``profiling_problems``.
    """
    problems = profiling_problems(config, device_type)
    if problems:
        raise ConfigError(problems)
    options = config.profiling
    # The list is filled below, and ``close`` must stop the parts that were started.
    folder = Path(run_folder)
    parts: list[_Trace | _MemorySnapshot] = []
    running = Profiler(parts)
    try:
        if options.enable_memory_snapshot:
            snapshots = folder / options.save_memory_snapshot_folder
            parts.append(_MemorySnapshot(snapshots, options.profile_freq, rank, start_step))
        if options.enable_profiling:
            parts.append(_Trace(config, folder, rank, device_type, start_step))
        yield running if parts else None
    except BaseException as error:
        # Also write a snapshot of an out-of-memory error, the main purpose of snapshots.
        for part in parts:
            if isinstance(part, _MemorySnapshot) and _is_out_of_memory(error):
                part.dump("_exit")
        raise
    finally:
        running.close()


class _Trace:
    """PyTorch's profiler, which writes a trace every ``profile_freq`` steps."""

    def __init__(
        self, config: Config, run_folder: Path, rank: int, device_type: str, start_step: int
    ) -> None:
        import torch
        from torch.profiler import ProfilerActivity

        from shardtrain.ops import accelerator

        options = config.profiling
        activities = [ProfilerActivity.CPU]
        device_activity = accelerator.profiler_activity(device_type)
        if device_activity is not None:
            activities.append(device_activity)
        self._folder = run_folder / options.save_traces_folder
        self._rank = rank
        self._in_step = False
        # Each trace should contain only its own steps, so the warning about dropped events does not apply.
        warnings.filterwarnings(
            "ignore", message=".*Profiler clears events at the end of each cycle"
        )
        idle_steps = options.profile_freq - options.profiler_warmup - options.profiler_active
        schedule = torch.profiler.schedule(
            wait=idle_steps, warmup=options.profiler_warmup, active=options.profiler_active
        )
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self._save,
            record_shapes=True,
            profile_memory=options.profile_memory,
        )
        self._profile.step_num = start_step
        # PyTorch's profiler chose its first action for step 0 when it was created. Choose it again for
        # start_step.
        self._profile.current_action = schedule(start_step)  # type: ignore[assignment]
        self._profile.start()

    def step(self) -> None:
        """Count a step, and write a trace if it is due."""
        self._in_step = True
        self._profile.step()
        self._in_step = False

    def close(self) -> None:
        """Stop profiling. An incomplete recording is dropped."""
        self._profile.stop()

    def _save(self, profile: torch.profiler.profile) -> None:
        """Write one trace atomically. If that fails, log a warning."""
        # PyTorch also calls this function in stop(), when the recording is incomplete.
        if not self._in_step:
            return
        start = time.perf_counter()
        path = self._folder / f"iteration_{profile.step_num}" / f"rank{self._rank}_trace.json"
        try:
            with atomic_io.for_library(path) as temporary:
                profile.export_chrome_trace(temporary)
        except (OSError, RuntimeError) as error:
            logger.warning(f"cannot write the trace {path}: {storage_errors.explain(error, path)}")
            return
        logger.info(f"trace written to {path} in {format_seconds(time.perf_counter() - start)}")


class _MemorySnapshot:
    """Record the CUDA allocator's history, and write it every ``freq`` steps."""

    def __init__(self, folder: Path, freq: int, rank: int, start_step: int) -> None:
        import torch

        self._memory = torch.cuda.memory
        self._folder = folder
        self._freq = freq
        self._rank = rank
        self._step = start_step
        self._memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)

    def step(self) -> None:
        """Count a step, and write a snapshot if it is due."""
        self._step += 1
        if self._step % self._freq == 0:
            self.dump()

    def dump(self, suffix: str = "") -> None:
        """Write the history so far. If that fails, log a warning."""
        path = (
            self._folder
            / f"iteration_{self._step}{suffix}"
            / f"rank{self._rank}_memory_snapshot.pickle"
        )
        try:
            with atomic_io.for_library(path) as temporary:
                self._memory._dump_snapshot(temporary)
        except (OSError, RuntimeError) as error:
            logger.warning(
                f"cannot write the memory snapshot {path}: {storage_errors.explain(error, path)}"
            )
            return
        logger.info(f"memory snapshot written to {path}")

    def close(self) -> None:
        """Stop recording."""
        self._memory._record_memory_history(enabled=None)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """True if an error, or any error in its chain of causes, is the device's out-of-memory error."""
    import torch

    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
