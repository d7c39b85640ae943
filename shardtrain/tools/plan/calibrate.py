"""``plan --calibrate RUN_FOLDER``: scale a device's rates so that the plan of a finished run takes as long."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from shardtrain import config as configs
from shardtrain.tools.plan import planning
from shardtrain.tools.plan.hardware import Device
from shardtrain.tools.report import reading
from shardtrain.utils.errors import ConfigError, Problem

_FEWEST_STEPS = 5
_FARTHEST = 50
"""A device whose rates are off by more than this is another one."""


@dataclass(frozen=True)
class Calibrated:
    """A device with scaled rates; ``ratio`` is the run's measured step time over the planned one."""

    device: Device
    ratio: float
    world_size: int
    steps: int

    def line(self, folder: str) -> str:
        """What was learned, for people."""
        return (
            f"calibrated by {folder}: {self.steps} logged steps on {self.world_size} devices took {self.ratio:.2f} "
            f"times as long as planned; rates of {self.device.name} are scaled by it"
        )


def learn(folder: Path, device: Device) -> Calibrated:
    """Read a run's configuration and step times, and scale the device.

    The median of the later half of the logged steps is taken, for the first ones compile and warm up. Raises
    ConfigError where the folder is not one of a run, its steps are too few, or the device cannot be that of the run.
    """
    record = reading.read(folder)
    resolved = folder / "config.resolved.toml"
    if not resolved.is_file():
        rule = "has no config.resolved.toml"
        raise ConfigError(Problem("--calibrate", str(folder), rule, "name the folder of a run", "command line"))
    metrics = {name: list(series.values) for name, series in record.metrics.items()}
    steps = metrics.get("step_seconds", [])
    speeds = list(zip(metrics.get("tokens_per_second", []), metrics.get("tps", []), strict=False))
    if len(steps) < _FEWEST_STEPS or not speeds or not speeds[-1][1] > 0:
        rule = f"has {len(steps)} logged steps with their times"
        fix = f"use a run with at least {_FEWEST_STEPS} (metrics.log_freq)"
        raise ConfigError(Problem("--calibrate", str(folder), rule, fix, "command line"))
    world_size = max(1, round(speeds[-1][0] / speeds[-1][1]))
    plan = planning.make(configs.load(str(resolved), []).config, world_size, device)
    ratio = statistics.median(steps[len(steps) // 2 :]) / plan.time.seconds
    if not 1 / _FARTHEST < ratio < _FARTHEST:
        rule = f"took {ratio:.3g} times as long as planned on {device.name}"
        raise ConfigError(Problem("--calibrate", str(folder), rule, "name the device of that run with --device"))
    return Calibrated(device.slower(ratio), ratio, world_size, len(steps))
