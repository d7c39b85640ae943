"""Verb ``profile``: summarize the newest traces of a run in a table of ranks and the operations of one rank."""

from __future__ import annotations

import json
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


def main(words: Sequence[str]) -> int:
    """Print the summary of the traces. Raise ConfigError or DataError for invalid input."""
    parser = StrictArgumentParser(
        "shardtrain profile",
        "Summarize the profiler traces of a run, which profiling.enable_profiling writes: "
        "the operations that take most time, communication that does not overlap with computation, "
        "and memory over time.",
        example="shardtrain profile outputs",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, or one trace (.json, .json.gz)")
    parser.add_argument("--step", type=int, metavar="N", help="last step of the traces (of the newest)")
    parser.add_argument("--rank", type=int, metavar="R", help="rank whose operations are listed (the slowest)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="number of operations to list (10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.read(words)
    if asked.top < 1:
        raise ConfigError(
            Problem(
                "--top",
                asked.top,
                rule="must be at least 1",
                fix="remove it for 10",
                where="command line",
            )
        )
    files = _files(Path(asked.run), asked.step)
    if asked.rank is not None and asked.rank not in files:
        raise ConfigError(
            Problem(
                "--rank",
                asked.rank,
                rule="has no trace",
                fix=f"use one of {', '.join(map(str, sorted(files)[:20]))}",
                where="command line",
            )
        )
    # With thousands of ranks, summarize only some of them, evenly spaced.
    ranks = sorted(files)
    shown = ranks if len(ranks) <= _MOST_RANKS else ranks[:: -(-len(ranks) // _MOST_RANKS)]
    if asked.rank is not None:
        shown = [asked.rank]
    found = {rank: read(files[rank]) for rank in shown}
    chosen = max(found, key=lambda rank: found[rank].span_us)
    if asked.json:
        print(json.dumps({"rank": chosen, "ranks": {rank: _facts(one, asked.top) for rank, one in found.items()}}))
        return 0
    print("\n".join(_text(found, chosen, len(ranks), asked.top)))
    return 0


def _files(path: Path, step: int | None) -> dict[int, Path]:
    """Return the traces of one step by rank."""
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
    name = RunFolder(path).options().get("profiling.save_traces_folder", "profile_traces")
    folders = {
        int(one.name.removeprefix("iteration_")): one
        for one in (path / str(name)).glob("iteration_*")
        if is_whole_number(one.name.removeprefix("iteration_"))
    }
    found: dict[int, dict[int, Path]] = {}
    for number, folder in folders.items():
        for file in folder.iterdir():
            match = _FILE.match(file.name)
            if match:
                found.setdefault(number, {})[int(match[1])] = file
    if not found:
        raise ConfigError(
            Problem(
                "RUN",
                str(path),
                rule="has no profiler trace",
                fix="train with --profiling.enable_profiling for at least profiling.profile_freq steps",
                where="command line",
            )
        )
    if step is not None and step not in found:
        raise ConfigError(
            Problem(
                "--step",
                step,
                rule="has no trace",
                fix=f"use one of {', '.join(map(str, sorted(found)[-20:]))}",
                where="command line",
            )
        )
    return found[max(found) if step is None else step]


def _facts(one: Summary, top: int) -> dict[str, Any]:
    return {
        "trace": str(one.path),
        "step_seconds": [us / 1e6 for us in one.steps],
        "on_device": one.on_device,
        "compute_seconds": one.compute_us / 1e6,
        "communication_seconds": one.communication_us / 1e6,
        "exposed_communication_seconds": one.exposed_us / 1e6,
        "peak_bytes": max((size for _, size in one.memory), default=None),
        "operations": [
            {"name": op.name, "calls": op.calls, "self_seconds": op.self_us / 1e6, "total_seconds": op.total_us / 1e6}
            for op in one.operations[:top]
        ],
    }


def _text(found: dict[int, Summary], chosen: int, num_ranks: int, top: int) -> list[str]:
    width = max(40, shutil.get_terminal_size((80, 24)).columns)
    lines = []
    some = f", {len(found)} of {num_ranks} ranks" if len(found) < num_ranks else ""
    lines.append(f"{'RANK':>6} {'STEP':>9} {'COMPUTE':>9} {'COMM':>9} {'EXPOSED':>9}  per step{some}")
    for rank, one in found.items():
        each = max(1, len(one.steps))
        step = _time(one.span_us / each)
        compute = _time(one.compute_us / each)
        talk = _time(one.communication_us / each)
        exposed = _time(one.exposed_us / each)
        share = f"{one.exposed_us / one.span_us:.0%}" if one.span_us else "-"
        mark = "*" if rank == chosen and len(found) > 1 else " "
        lines.append(f"{mark}{rank:>5} {step:>9} {compute:>9} {talk:>9} {exposed:>9}  {share} of the step is exposed")
    one = found[chosen]
    where = "kernels of the device" if one.on_device else "operators on the CPU (self times)"
    lines += ["", visible(f"rank {chosen}: {where}, {len(one.steps)} steps", lines=False)]
    lines.append(f"{'TIME':>9} {'SHARE':>6} {'CALLS':>7}  OPERATION")
    whole = sum(op.self_us for op in one.operations) or 1.0
    for op in one.operations[:top]:
        text = f"{_time(op.self_us):>9} {op.self_us / whole:>6.1%} {op.calls:>7}  {op.name}"
        lines.append(visible(text, lines=False)[:width])
    if one.memory:
        sizes = [size for _, size in one.memory]
        when = one.memory[sizes.index(max(sizes))][0]
        text = f"memory   {format_bytes(min(sizes))} to {format_bytes(max(sizes))}, most after {_time(when)}"
        curve = sparkline([place for place, _ in one.memory], sizes, width - 9, bars_for(sys.stdout))
        lines += ["", text, f"         {curve}"]
    lines += ["", visible(f"for the full trace, open {one.path} in ui.perfetto.dev", lines=False)]
    return lines


def _time(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:.3f} s"
    return f"{us / 1e3:.2f} ms" if us >= 1e3 else f"{us:.0f} us"
