"""``plan --calibrate``: scale a device's rates to the measurements of a finished run or of the doctor."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardtrain import config as configs
from shardtrain.facts import devices
from shardtrain.tools.plan import planning, timing
from shardtrain.tools.plan.hardware import Device, Link
from shardtrain.tools.runs import run_files
from shardtrain.tools.runs.run_files import RunFolder
from shardtrain.utils import checked_json
from shardtrain.utils.errors import ConfigError, Problem

_FEWEST_STEPS = 5
_FARTHEST = 50
"""Largest factor between planned and measured rates. Above it, the run was on another device."""
_MOST_BYTES = 2**24


@dataclass(frozen=True)
class Calibrated:
    """A device with scaled rates. ``ratio`` is the measured step time divided by the planned one."""

    device: Device
    ratio: float
    world_size: int
    steps: int

    def line(self, folder: str) -> str:
        """Return a sentence about the calibration."""
        return (
            f"calibrated by {folder}: {self.steps} logged steps on {self.world_size} devices took {self.ratio:.2f} "
            f"times as long as planned; rates of {self.device.name} are scaled by it"
        )


def learn(folder: Path, device: Device) -> Calibrated:
    """Read a run's configuration and step times, and scale the device.

    The step time is the median of the later half of the logged steps, because the first ones compile and warm up.

    Raises:
        ConfigError: the folder is not the folder of a run, has too few steps, or the run was on another device.
    """
    record = run_files.read(folder)
    resolved = RunFolder(folder).config
    if not resolved.is_file():
        rule = f"has no {resolved.name}"
        raise ConfigError(Problem("--calibrate", str(folder), rule, "name the folder of a run", "command line"))
    metrics = {name: list(series.values) for name, series in record.metrics.items()}
    steps = metrics.get("step_seconds", [])
    speeds = list(zip(metrics.get("tokens_per_second", []), metrics.get("tps", []), strict=False))
    if len(steps) < _FEWEST_STEPS or not speeds or not speeds[-1][1] > 0:
        rule = f"has only {len(steps)} logged steps with times"
        fix = f"use a run with at least {_FEWEST_STEPS} (metrics.log_freq)"
        raise ConfigError(Problem("--calibrate", str(folder), rule, fix, "command line"))
    world_size = max(1, round(speeds[-1][0] / speeds[-1][1]))
    plan = planning.make(configs.load(str(resolved), []).config, world_size, device)
    ratio = statistics.median(steps[len(steps) // 2 :]) / plan.time.seconds
    if not 1 / _FARTHEST < ratio < _FARTHEST:
        rule = f"took {ratio:.3g} times as long as planned on {device.name}"
        raise ConfigError(Problem("--calibrate", str(folder), rule, "set --device to the device of that run"))
    return Calibrated(device.slower(ratio), ratio, world_size, len(steps))


@dataclass(frozen=True)
class Measured:
    """A device with rates measured by ``doctor --json``.

    ``ratios`` are the planned rates divided by the measured ones.
    """

    device: Device
    ratios: Mapping[str, float]

    def line(self, report: str) -> str:
        """Return a sentence about the calibration."""
        parts = ", ".join(f"{name} {1 / ratio:.0%}" for name, ratio in self.ratios.items())
        return f"calibrated by {report}: share of the rates of {self.device.name} that these machines reach: {parts}"


def learn_report(path: Path, device: Device) -> Measured:
    """Read the output of ``doctor --json``, and set the rates of matrix products and links that it measured.

    For a CPU, only the rates of products are set: its ranks share memory, which the doctor does not measure.

    Raises:
        ConfigError: the file is not such a report, or is about another device.
    """

    def wrong(rule: str, fix: str = "write one with shardtrain doctor --json > report.json") -> ConfigError:
        return ConfigError(Problem("--calibrate", str(path), rule, fix, "command line"))

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise wrong(f"has more than {_MOST_BYTES} bytes, so it is not a report")
        report = checked_json.parse(path.read_bytes())
        rates = report["rates"]
        name = str(report["device"])
        flops = {str(dtype): float(rate) for dtype, rate in rates["flops"].items()}
        threads = int(rates["threads"])
        collectives = [
            (int(one["ranks"]), int(one["ranks_per_host"]), float(one["bytes_per_second"]))
            for one in rates["collectives"]
        ]
    except OSError as error:
        raise wrong(f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise wrong("is not a report of the doctor") from error
    if not flops or not all(map(_is_rate, (*flops.values(), *(rate for _, _, rate in collectives)))):
        raise wrong("has impossible rates")
    found = "cpu" if rates.get("type") == "cpu" else devices.find(name)
    if found is not None and found != device.name and device.name in devices.names():
        raise wrong(f"is about {name[:80]}, not {device.name}", f"plan for it with --device {found}")
    return _with_rates(device, flops, threads, collectives, wrong)


def _is_rate(value: float) -> bool:
    return math.isfinite(value) and 0 < value < 1e18


def _with_rates(
    device: Device, flops: Mapping[str, float], threads: int, collectives: list[tuple[int, int, float]], wrong: Any
) -> Measured:
    """Return the device with the rates of a report.

    Raises:
        ConfigError: made by ``wrong``; a rate is too far from that of the device.
    """
    dtype = next((dtype for dtype in flops if dtype in device.flops), None)
    if dtype is None:
        raise wrong(f"measured products in {', '.join(flops)}, for which the row of {device.name} has no peak")
    # The row of a CPU describes one core, but the measurement used several threads.
    rate = flops[dtype] / (max(1, threads) ** timing.THREADS_EXPONENT if device.is_cpu else 1)
    ratios = {f"{dtype} products": device.flops[dtype] * device.matmul_efficiency / rate}
    changes: dict[str, Any] = {}
    # Ranks of a host share its network, so a rank has its part of the measured rate.
    if not device.is_cpu:
        within = [rate for ranks, per_host, rate in collectives if per_host == ranks > 1]
        between = [rate / per_host for ranks, per_host, rate in collectives if per_host < ranks]
        for name, field, found in (("links", "link", within), ("network", "network", between)):
            if found:
                link: Link = getattr(device, field)
                ratios[name] = link.bytes_per_second * link.efficiency / max(found)
                changes[field] = replace(link, bytes_per_second=max(found) / link.efficiency)
    for name, ratio in ratios.items():
        if not 1 / _FARTHEST < ratio < _FARTHEST:
            raise wrong(f"has {name} at {1 / ratio:.3g} of {device.name}", "set --device to the device of the report")
    slower = ratios[f"{dtype} products"]
    changes["flops"] = {name: peak / slower for name, peak in device.flops.items()}
    return Measured(replace(device, **changes), ratios)
