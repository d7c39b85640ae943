"""Compare a plan with a run that has ended, and suggest changes after a run is out of memory."""

from __future__ import annotations

import contextlib
import json
import statistics
from pathlib import Path

from shardtrain import config as configs
from shardtrain.config.schema import Config
from shardtrain.facts import devices
from shardtrain.tools.plan import hardware, planning
from shardtrain.tools.plan.calibrate import FEWEST_STEPS
from shardtrain.tools.runs import run_files
from shardtrain.utils import atomic_io
from shardtrain.utils.units import GIB

OFF = 0.15
"""Relative error of a plan that is reported as a warning."""
_SHORT_SECONDS = 0.1
"""In a shorter planned step, work of the host that is not planned may take as long."""
_SMALL_GIB = 1.0
"""Largest memory of kernel workspaces in GiB. A plan does not include them."""


def after_out_of_memory(
    config: Config, world_size: int, is_cpu: bool, memory_bytes: int = 0
) -> list[str]:
    """Return lines for the user with changes that need less than ``memory_bytes`` per rank (0 if unknown).

    Empty if there are no such changes, or if planning fails. The plan is for a CPU or an H100,
    because savings hardly depend on the device.
    """
    # A failure here must not hide the error of the run.
    with contextlib.suppress(Exception):
        device = hardware.find("cpu" if is_cpu else "h100")
        changes = planning.lighter(config, world_size, device, memory_bytes)
        if changes:
            lines = ["each of these changes needs less memory (docs/plan.md):"]
            for change in changes:
                lines.append(f"  {change}")
            return lines
    return []


def beside_measured(folder: Path, world_size: int, device_name: str) -> list[str]:
    """Return lines with planned and measured peak memory and speed of a run that has ended.

    They are also written to ``planned.json`` for ``shardtrain report``. Empty if the device has no
    row in devices.toml or too few steps were logged. ``device_name`` is PyTorch's name of the
    device.
    """
    # A successful run must not fail because of this comparison.
    with contextlib.suppress(Exception):
        return _compare(folder, world_size, device_name)
    return []


def _compare(folder: Path, world_size: int, device_name: str) -> list[str]:
    device = devices.find(device_name)
    if device is None:
        return []
    metrics = run_files.read(folder).metrics
    if "tps" not in metrics or len(metrics["tps"].values) < FEWEST_STEPS:
        return []
    config = configs.load(str(folder / "config.resolved.toml"), []).config
    plan = planning.make(config, world_size, hardware.find(device))
    # The first steps compile and warm up, so only the later half counts.
    speeds = list(metrics["tps"].values)
    measured_tps = statistics.median(speeds[len(speeds) // 2 :])
    pairs = {"tokens per second and device": [plan.tps, measured_tps]}
    formats = {"tokens per second and device": ",.0f", "peak memory in GiB": ".1f"}
    if "memory_gib" in metrics:
        # PyTorch does not count the memory of the driver.
        planned_gib = plan.fullest.peak / GIB
        pairs["peak memory in GiB"] = [planned_gib, max(metrics["memory_gib"].values)]
    atomic_io.write(folder / "planned.json", json.dumps(pairs) + "\n")

    lines = []
    for name, (planned, measured) in pairs.items():
        form = formats[name]
        off = measured / planned - 1
        text = f"{name}: planned {planned:{form}}, measured {measured:{form}} ({off:+.0%})"
        if name.startswith("tokens per second") and plan.time.seconds < _SHORT_SECONDS:
            text += ": the speed of such short steps depends on the host, which is not planned"
        elif name.startswith("peak memory") and abs(planned - measured) < _SMALL_GIB:
            text += ": the difference is within the accuracy of a plan"
        elif abs(off) > OFF:
            text = f"warning: {text}: more than {OFF:.0%} off"
        lines.append(text)
    return lines
