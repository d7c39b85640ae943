"""What a plan says when a run of this machine has ended: what to change without memory, and whether it was right."""

from __future__ import annotations

import contextlib
import json
import statistics
from pathlib import Path

from shardtrain import config as configs
from shardtrain.config.schema import Config
from shardtrain.facts import devices
from shardtrain.tools.plan import hardware, planning
from shardtrain.tools.runs import run_files
from shardtrain.utils import atomic_io
from shardtrain.utils.units import GIB

OFF = 0.15
"""A measurement that is off by more than this share of the plan is worth a warning."""
_SHORT_SECONDS = 0.1
"""Of a planned step: what the host does in a step, which is not planned, may take as long."""
_SMALL_GIB = 1.0
"""Of a difference in memory: workspaces of kernels, which are not planned, may be so large."""
_FEWEST_STEPS = 5


def after_out_of_memory(config: Config, world_size: int, is_cpu: bool, memory_bytes: int = 0) -> list[str]:
    """Return lines for the user with changes that need less than ``memory_bytes`` per rank (0 if unknown).

    Empty if there are no such changes, or if planning fails. The plan is for a CPU or an H100, because savings hardly
    depend on the device.
    """
    with contextlib.suppress(Exception):  # the run's own error is what counts, and it was reported
        found = planning.lighter(config, world_size, hardware.find("cpu" if is_cpu else "h100"), memory_bytes)
        if found:
            return ["less memory would be taken with one of these (docs/plan.md):", *(f"  {line}" for line in found)]
    return []


def beside_measured(folder: Path, world_size: int, device_name: str) -> list[str]:
    """Lines for people: planned and measured peak memory and speed of a run that has ended.

    ``device_name`` is PyTorch's. None where the device has no row, or too few steps were logged to tell.
    """
    with contextlib.suppress(Exception):  # a run that has succeeded does not fail by what is said of it
        known = devices.find(device_name)
        if known is None:
            return []
        metrics = {name: list(series.values) for name, series in run_files.read(folder).metrics.items()}
        if len(metrics.get("tps", [])) < _FEWEST_STEPS:
            return []
        plan = planning.make(
            configs.load(str(folder / "config.resolved.toml"), []).config, world_size, hardware.find(known)
        )
        later = metrics["tps"][len(metrics["tps"]) // 2 :]  # the first steps compile and warm up
        pairs = {"tokens per second and device": (plan.tps, statistics.median(later), ",.0f")}
        if "memory_gib" in metrics:
            # PyTorch counts what it holds, and not the driver's own
            pairs["peak memory in GiB"] = (plan.fullest.peak / GIB, max(metrics["memory_gib"]), ".1f")
        kept = {name: [planned, measured] for name, (planned, measured, _) in pairs.items()}
        atomic_io.write(folder / "planned.json", json.dumps(kept) + "\n")  # for shardtrain report
        lines = []
        for name, (planned, measured, form) in pairs.items():
            off = measured / planned - 1
            text = f"{name}: planned {planned:{form}}, measured {measured:{form}} ({off:+.0%})"
            if name.startswith("tokens per second") and plan.time.seconds < _SHORT_SECONDS:
                text += ": in steps this short the host decides, which is not planned"
            elif name.startswith("peak memory") and abs(planned - measured) < _SMALL_GIB:
                text += ": less than a plan is exact to"
            elif abs(off) > OFF:
                text = f"warning: {text}: more than {OFF:.0%} off"
            lines.append(text)
        return lines
    return []
