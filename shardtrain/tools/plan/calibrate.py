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
from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import ConfigError, Problem

FEWEST_STEPS = 5
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
            f"calibrated by {folder}: {self.steps} logged steps on {self.world_size} devices took "
            f"{self.ratio:.2f} times as long as planned; rates of {self.device.name} are scaled by "
            "it"
        )


def learn(folder: Path, device: Device) -> Calibrated:
    """Read a run's configuration and step times, and scale the device.

    The step time is the median of the later half of the logged steps, because the first steps
    compile and warm up.

    Raises:
        ConfigError: the folder is not the folder of a run, has too few steps, or the run was on
            another device.
    """
    record = run_files.read(folder)
    resolved = RunFolder(folder).config
    if not resolved.is_file():
        raise ConfigError(
            Problem(
                "--calibrate",
                str(folder),
                rule=f"has no {resolved.name}",
                fix="name the folder of a run",
                where="command line",
            )
        )
    # The logs of a killed run may end within a step, so the series may have different lengths.
    metrics = {name: list(series.values) for name, series in record.metrics.items()}
    step_seconds = metrics.get("step_seconds", [])
    total_rates = metrics.get("tokens_per_second", [])
    device_rates = metrics.get("tps", [])
    rates = list(zip(total_rates, device_rates, strict=False))
    if len(step_seconds) < FEWEST_STEPS or not rates or not rates[-1][1] > 0:
        raise ConfigError(
            Problem(
                "--calibrate",
                str(folder),
                rule=f"has only {len(step_seconds)} logged steps with times",
                fix=f"use a run with at least {FEWEST_STEPS} logged steps (see metrics.log_freq)",
                where="command line",
            )
        )
    # The number of devices is the last logged rate of all devices divided by the rate of one device.
    total_rate, device_rate = rates[-1]
    world_size = max(1, round(total_rate / device_rate))
    # Compare the measured time of a step with the planned time.
    config = configs.load(str(resolved), []).config
    plan = planning.make(config, world_size, device)
    second_half = step_seconds[len(step_seconds) // 2 :]
    ratio = statistics.median(second_half) / plan.time.seconds
    if not 1 / _FARTHEST < ratio < _FARTHEST:
        raise ConfigError(
            Problem(
                "--calibrate",
                str(folder),
                rule=f"took {ratio:.3g} times as long as planned on {device.name}",
                fix="set --device to the device of that run",
            )
        )
    return Calibrated(device.slower(ratio), ratio, world_size, len(step_seconds))


@dataclass(frozen=True)
class Measured:
    """A device with rates measured by ``doctor --json``.

    ``ratios`` are the planned rates divided by the measured ones.
    """

    device: Device
    ratios: Mapping[str, float]

    def line(self, report: str) -> str:
        """Return a sentence about the calibration."""
        parts = []
        for name, ratio in self.ratios.items():
            parts.append(f"{1 / ratio:.0%} ({name})")
        return (
            f"calibrated by {report}: these machines reach {', '.join(parts)} "
            f"of the rates of {self.device.name}"
        )


def learn_report(path: Path, device: Device) -> Measured:
    """Read the output of ``doctor --json``, and set the rates of matrix products and links that it measured.

    For a CPU, only the rates of products are set: its ranks share memory, which the doctor does not measure.

    Raises:
        ConfigError: the file is not such a report, or is about another device.
    """

    def wrong(
        rule: str, fix: str = "write one with shardtrain doctor --json > report.json"
    ) -> ConfigError:
        return ConfigError(Problem("--calibrate", str(path), rule, fix, "command line"))

    try:
        if path.stat().st_size > _MOST_BYTES:
            raise wrong(f"has more than {_MOST_BYTES} bytes, so it is not a report")
        report = checked_json.parse(bounded_reads.read_all(path, _MOST_BYTES))
        rates = report["rates"]
        name = str(report["device"])
        flops = {}
        for dtype, rate in rates["flops"].items():
            flops[str(dtype)] = float(rate)
        threads = int(rates["threads"])
        collectives = []
        for row in rates["collectives"]:
            num_ranks = int(row["ranks"])
            ranks_per_host = int(row["ranks_per_host"])
            collectives.append((num_ranks, ranks_per_host, float(row["bytes_per_second"])))
    except OSError as error:
        raise wrong(f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise wrong("is not a report of the doctor") from error
    measured_rates = list(flops.values())
    for _, _, rate in collectives:
        measured_rates.append(rate)
    if not flops or not all(map(_is_rate, measured_rates)):
        raise wrong("has impossible rates")

    # A report about another known device is a mistake. But a device without a row in the file may be
    # the planned device.
    reported = devices.find(name)
    if rates.get("type") == "cpu":
        reported = "cpu"
    is_other = reported is not None and reported != device.name
    if is_other and device.name in devices.names():
        raise wrong(
            f"is about {name[:80]}, not {device.name}", f"plan for it with --device {reported}"
        )
    return _with_rates(device, flops, threads, collectives, wrong)


def _is_rate(value: float) -> bool:
    return math.isfinite(value) and 0 < value < 1e18


def _with_rates(
    device: Device,
    flops: Mapping[str, float],
    threads: int,
    collectives: list[tuple[int, int, float]],
    wrong: Any,
) -> Measured:
    """Return the device with the rates of a report.

    Raises:
        ConfigError: a rate is too far from that of the device. ``wrong`` creates the error.
    """
    dtypes = [dtype for dtype in flops if dtype in device.flops]
    if not dtypes:
        raise wrong(
            f"measured products in {', '.join(flops)}, for which the row of {device.name} has no peak",
        )
    # Compute the planned rate of matrix products, relative to the measured rate.
    dtype = dtypes[0]
    rate = flops[dtype]
    if device.is_cpu:
        # The row of a CPU describes one core, but the measurement used several threads.
        rate = rate / max(1, threads) ** timing.THREADS_EXPONENT
    slower = device.flops[dtype] * device.matmul_efficiency / rate
    ratios = {f"{dtype} products": slower}
    changes: dict[str, Any] = {}
    if not device.is_cpu:
        within_host, between_hosts = _link_rates(collectives)
        if within_host:
            changes["link"], ratios["links"] = _with_rate(device.link, max(within_host))
        if between_hosts:
            changes["network"], ratios["network"] = _with_rate(device.network, max(between_hosts))
    for name, ratio in ratios.items():
        if not 1 / _FARTHEST < ratio < _FARTHEST:
            rule = f"has {name} with {1 / ratio:.3g} times the speed of {device.name}"
            raise wrong(rule, "set --device to the device of the report")

    # Only one dtype was compared. Assume that the other dtypes are slower by the same factor.
    changes["flops"] = {name: peak / slower for name, peak in device.flops.items()}
    return Measured(replace(device, **changes), ratios)


def _link_rates(collectives: list[tuple[int, int, float]]) -> tuple[list[float], list[float]]:
    """Return the bytes per second of a rank in groups within one host, and in groups of several hosts."""
    within_host = []
    between_hosts = []
    for num_ranks, ranks_per_host, rate in collectives:
        if ranks_per_host == num_ranks > 1:
            within_host.append(rate)
        if ranks_per_host < num_ranks:
            # Ranks of a host share its network, so a rank has its part of the measured rate.
            between_hosts.append(rate / ranks_per_host)
    return within_host, between_hosts


def _with_rate(link: Link, rate: float) -> tuple[Link, float]:
    """Return a link with the measured rate, and the planned rate divided by the measured rate."""
    ratio = link.bytes_per_second * link.efficiency / rate
    return replace(link, bytes_per_second=rate / link.efficiency), ratio
