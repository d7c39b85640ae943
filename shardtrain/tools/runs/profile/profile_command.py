"""Verb ``profile``: summarize the newest traces of a run in a table of ranks and the operations of one rank."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardtrain.tools.runs.profile.trace import Summary, read
from shardtrain.tools.runs.run_files import RunFolder
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.redact import visible
from shardtrain.utils.sparkline import bars_for, sparkline
from shardtrain.utils.units import format_bytes
from shardtrain.utils.variables import is_whole_number

_MOST_RANKS = 16
_FILE = re.compile(r"^rank(\d+)_trace\.json(\.gz)?$")


def main(arguments: Sequence[str]) -> int:
    """Print the summary of the traces. Raise ConfigError or DataError for invalid input."""
    parser = StrictArgumentParser(
        "shardtrain profile",
        "Summarize the profiler traces of a run, which profiling.enable_profiling writes: "
        "the operations that take most time, communication that does not overlap with computation, "
        "and memory over time.",
        example="shardtrain profile outputs",
    )
    parser.add_argument(
        "run", metavar="RUN", help="folder of a run, or one trace (.json, .json.gz)"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="summarize the traces that end with this step (the newest)",
    )
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="rank whose operations are listed (the slowest)",
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="number of operations to list (10)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.read(arguments)
    if options.top < 1:
        raise ConfigError(
            Problem(
                "--top",
                options.top,
                rule="must be at least 1",
                fix="remove it for 10",
                where="command line",
            )
        )
    files = _files(Path(options.run), options.step)
    ranks = sorted(files)
    if options.rank is not None and options.rank not in files:
        # A run may have thousands of ranks.
        first_ranks = ", ".join(map(str, ranks[:20]))
        raise ConfigError(
            Problem(
                "--rank",
                options.rank,
                rule="has no trace",
                fix=f"use one of {first_ranks}",
                where="command line",
            )
        )
    # With thousands of ranks, summarize only some of them, evenly spaced.
    distance = math.ceil(len(ranks) / _MOST_RANKS)
    shown = ranks[::distance]
    if options.rank is not None:
        shown = [options.rank]
    summaries = {rank: read(files[rank]) for rank in shown}
    slowest = max(summaries, key=lambda rank: summaries[rank].span_us)
    if options.json:
        facts = {}
        for rank, summary in summaries.items():
            facts[rank] = _facts(summary, options.top)
        print(json.dumps({"rank": slowest, "ranks": facts}))
        return 0
    print("\n".join(_text(summaries, slowest, len(ranks), options.top)))
    return 0


def _files(path: Path, step: int | None) -> dict[int, Path]:
    """Return the traces of one step by rank."""
    # A single trace may have any name, so its rank is unknown.
    if path.is_file():
        return {0: path}
    if not path.is_dir():
        raise ConfigError(
            Problem(
                "RUN",
                str(path),
                rule="does not exist",
                fix="name the folder of a run, which is its job.dump_folder",
                where="command line",
            )
        )
    # The configuration of the run names the folder of the traces.
    name = RunFolder(path).options().get("profiling.save_traces_folder", "profile_traces")
    by_step = _files_by_step(path / str(name))
    if not by_step:
        raise ConfigError(
            Problem(
                "RUN",
                str(path),
                rule="has no profiler trace",
                fix="train with --profiling.enable_profiling for at least profiling.profile_freq steps",
                where="command line",
            )
        )
    if step is None:
        step = max(by_step)
    if step not in by_step:
        newest_steps = ", ".join(map(str, sorted(by_step)[-20:]))
        raise ConfigError(
            Problem(
                "--step",
                step,
                rule="has no trace",
                fix=f"use one of {newest_steps}",
                where="command line",
            )
        )
    return by_step[step]


def _files_by_step(folder: Path) -> dict[int, dict[int, Path]]:
    """Return the traces by step and rank. Other files of the folder are skipped."""
    by_step: dict[int, dict[int, Path]] = {}
    for folder_of_step in folder.glob("iteration_*"):
        number = folder_of_step.name.removeprefix("iteration_")
        if not is_whole_number(number):
            continue
        for file in folder_of_step.iterdir():
            match = _FILE.match(file.name)
            if match:
                files_of_step = by_step.setdefault(int(number), {})
                rank = int(match[1])
                files_of_step[rank] = file
    return by_step


def _facts(summary: Summary, top: int) -> dict[str, Any]:
    """Return a summary as values for JSON, in seconds and bytes."""
    operations = []
    for operation in summary.operations[:top]:
        operations.append(
            {
                "name": operation.name,
                "calls": operation.calls,
                "self_seconds": operation.self_us / 1e6,
                "total_seconds": operation.total_us / 1e6,
            }
        )
    sizes = [size for _, size in summary.memory]
    # Times of a trace are in microseconds. The keys name the units of the JSON document.
    return {
        "trace": str(summary.path),
        "step_seconds": [us / 1e6 for us in summary.steps],
        "on_device": summary.on_device,
        "compute_seconds": summary.compute_us / 1e6,
        "communication_seconds": summary.communication_us / 1e6,
        "exposed_communication_seconds": summary.exposed_us / 1e6,
        "peak_bytes": max(sizes, default=None),
        "operations": operations,
    }


def _text(summaries: dict[int, Summary], chosen: int, num_ranks: int, top: int) -> list[str]:
    """Return the lines of the table of ranks, and of the operations and the memory of the chosen rank."""
    head = f"{'RANK':>6} {'STEP':>9} {'COMPUTE':>9} {'COMM':>9} {'EXPOSED':>9}  per step"
    if len(summaries) < num_ranks:
        head += f", {len(summaries)} of {num_ranks} ranks"
    lines = [head]
    for rank, summary in summaries.items():
        # Mark the rank whose operations are listed below.
        is_marked = rank == chosen and len(summaries) > 1
        mark = "*" if is_marked else " "
        lines.append(f"{mark}{rank:>5} {_times_per_step(summary)}")

    width = max(40, shutil.get_terminal_size((80, 24)).columns)
    summary = summaries[chosen]
    lines += ["", *_operations_text(chosen, summary, top, width)]
    if summary.memory:
        lines += ["", *_memory_text(summary, width)]
    hint = f"for the full trace, open {summary.path} in ui.perfetto.dev"
    lines += ["", visible(hint, lines=False)]
    return lines


def _times_per_step(summary: Summary) -> str:
    """Return the times of one rank in the columns of the table of ranks."""
    num_steps = max(1, len(summary.steps))
    step = _time(summary.span_us / num_steps)
    compute = _time(summary.compute_us / num_steps)
    communication = _time(summary.communication_us / num_steps)
    exposed = _time(summary.exposed_us / num_steps)
    share = "-"
    if summary.span_us:
        share = f"{summary.exposed_us / summary.span_us:.0%}"
    times = f"{step:>9} {compute:>9} {communication:>9} {exposed:>9}"
    return f"{times}  {share} of the step is exposed"


def _operations_text(rank: int, summary: Summary, top: int, width: int) -> list[str]:
    """Return the lines of the operations that take most time."""
    kind = "operators on the CPU (self times)"
    if summary.on_device:
        kind = "kernels of the device"
    title = f"rank {rank}: {kind}, {len(summary.steps)} steps"
    lines = [visible(title, lines=False), f"{'TIME':>9} {'SHARE':>6} {'CALLS':>7}  OPERATION"]
    # Self times do not contain the times of called operations, so they add up to the total.
    total_us = sum(operation.self_us for operation in summary.operations) or 1.0
    for operation in summary.operations[:top]:
        time = _time(operation.self_us)
        share = f"{operation.self_us / total_us:.1%}"
        text = f"{time:>9} {share:>6} {operation.calls:>7}  {operation.name}"
        # Names in a trace are untrusted, so make control characters visible.
        lines.append(visible(text, lines=False)[:width])
    return lines


def _memory_text(summary: Summary, width: int) -> list[str]:
    """Return a line with the range of allocated memory, and a line with its curve."""
    times = [time for time, _ in summary.memory]
    sizes = [size for _, size in summary.memory]
    lowest = min(sizes)
    highest = max(sizes)
    time_of_highest = times[sizes.index(highest)]
    curve = sparkline(times, sizes, width - 9, bars_for(sys.stdout))
    return [
        f"memory   {format_bytes(lowest)} to {format_bytes(highest)}, most after {_time(time_of_highest)}",
        f"         {curve}",
    ]


def _time(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:.3f} s"
    if us >= 1e3:
        return f"{us / 1e3:.2f} ms"
    return f"{us:.0f} us"
