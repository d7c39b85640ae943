"""Clocks: differences between hosts, clock source, and synchronization."""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Iterator

from shardtrain.launch.nodes import CLOCKS_APART_SECONDS
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import (
    Facts,
    Finding,
    Judged,
    Reports,
    Rule,
    Verdict,
    each,
    kernel_text,
    warn_if,
)

AREA = "clock"

ROUNDS = 4
WARN_SECONDS = 1.0
"""Maximum clock difference. With a larger one, timestamps in logs do not show the order of events."""
_TIME_ERROR = 5
"""Return value of adjtimex(2) for an unsynchronized clock."""


def collect(context: RankContext, facts: Facts) -> None:
    """Record the clock source, and this rank's time directly after each of several barriers."""
    facts["source"] = kernel_text(
        "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    )
    facts["synchronized"] = synchronized()
    facts["moments"] = []
    for number in range(ROUNDS if context.size > 1 else 0):
        context.line.meet(f"clock {number}")
        facts["moments"].append(time.time())


def synchronized() -> bool | None:
    """True if the kernel reports a synchronized clock (NTP, PTP). None if it does not report the state."""
    if sys.platform != "linux":
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        # The kernel only reads the clock if modes, the first field of struct timex, is 0. The struct is
        # smaller than 512 bytes.
        state = libc.adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    return bool(state != _TIME_ERROR)


def offsets(moments: dict[int, list[float]]) -> dict[int, float]:
    """Return the seconds by which each rank's clock is ahead of the median clock.

    A rank records each moment slightly late, depending on its latency to the store. So the smallest
    difference of a rank is the most accurate.
    """
    # A rank that gave up early has fewer moments. Use the rounds that all answering ranks have.
    answered = {rank: times for rank, times in moments.items() if times}
    if not answered:
        return {}
    rounds = min(len(times) for times in answered.values())

    median_times = []
    for index in range(rounds):
        of_round = sorted(times[index] for times in answered.values())
        median_times.append(of_round[len(of_round) // 2])

    smallest = {}
    for rank, times in answered.items():
        # A rank may have recorded more times than ``rounds``.
        differences = [time - median for time, median in zip(times, median_times, strict=False)]
        smallest[rank] = min(differences, key=abs)
    return smallest


def judge(reports: Reports) -> Iterator[Finding]:
    """Compare each rank's clock with the median clock."""
    moments_by_rank = {rank: facts["moments"] for rank, facts in reports.of(AREA).items()}
    seconds_ahead = offsets(moments_by_rank)
    if seconds_ahead:
        yield _skew(reports, seconds_ahead)

    # A single host does not need a synchronized clock.
    is_needed = len(reports.hosts()) > 1
    rules: dict[str, Rule] = {
        "synchronized": functools.partial(_synchronized, is_needed),
        "source": _source,
    }
    yield from each(reports, AREA, rules)


def _skew(reports: Reports, seconds_ahead: dict[int, float]) -> Finding:
    """Judge the difference between clocks, and name the ranks with a wrong clock, the worst first."""
    expected = f"{WARN_SECONDS:g} s apart or less"
    apart = max(seconds_ahead.values()) - min(seconds_ahead.values())
    wrong = [rank for rank, seconds in seconds_ahead.items() if abs(seconds) > WARN_SECONDS]
    if not wrong:
        return Finding(AREA, "skew", "pass", f"{1000 * apart:.0f} ms apart", expected)
    wrong.sort(key=lambda rank: -abs(seconds_ahead[rank]))

    worst_rank = wrong[0]
    most = seconds_ahead[worst_rank]
    verdict: Verdict = "warn"
    # The launcher warns above the same limit.
    if abs(most) > CLOCKS_APART_SECONDS:
        verdict = "fail"
    text = f"{most:+.1f} s on {reports.who([worst_rank])}, {apart:.1f} s apart"
    fix = "start chrony or ntpd on that host: chronyc makestep"
    return Finding(AREA, "skew", verdict, text, expected, fix, tuple(wrong))


def _synchronized(is_needed: bool, facts: Facts) -> Judged | None:
    is_synchronized = facts["synchronized"]
    expected = "yes, on several hosts"
    if is_synchronized is None:
        return None
    if is_synchronized:
        return "pass", "yes", expected, ""
    return warn_if(is_needed, "no", expected, "start chrony or ntpd")


def _source(facts: Facts) -> Judged | None:
    value = facts["source"]
    expected = "tsc or a clock of the hypervisor"
    if not value:
        return None
    if value in ("hpet", "acpi_pm", "jiffies"):
        return "warn", f"{value}, which is slow to read", expected, "boot with clocksource=tsc"
    return "pass", value, expected, ""
