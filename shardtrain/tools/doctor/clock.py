"""Clocks: differences between hosts, clock source, and synchronization."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator

from shardtrain.launch.nodes import CLOCKS_APART_SECONDS
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import Facts, Finding, Judged, Reports, Verdict, each, kernel_text

AREA = "clock"

ROUNDS = 4
WARN_SECONDS = 1.0
"""Maximum clock difference. With a larger one, timestamps in logs do not show the order of events."""
_TIME_ERROR = 5
"""Return value of adjtimex(2) for an unsynchronized clock."""


def collect(context: RankContext, facts: Facts) -> None:
    """Record the clock source, and the time of this rank at moments when all ranks have just met."""
    facts["source"] = kernel_text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
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
    return None if state < 0 else state != _TIME_ERROR


def offsets(moments: dict[int, list[float]]) -> dict[int, float]:
    """Return the seconds by which each rank's clock is ahead of the median clock.

    A rank records each moment slightly late, depending on its latency to the store. So the smallest
    difference of a rank is the most accurate.
    """
    answered = {rank: times for rank, times in moments.items() if times}
    rounds = min((len(times) for times in answered.values()), default=0)
    if not rounds:
        return {}
    middle = [sorted(times[index] for times in answered.values())[len(answered) // 2] for index in range(rounds)]
    found = {rank: [times[i] - middle[i] for i in range(rounds)] for rank, times in answered.items()}
    return {rank: min(differences, key=abs) for rank, differences in found.items()}


def judge(reports: Reports) -> Iterator[Finding]:
    """Compare each rank's clock with the median clock."""
    by_rank = reports.of(AREA)
    found = offsets({rank: facts["moments"] for rank, facts in by_rank.items()})
    if found:
        apart = max(found.values()) - min(found.values())
        away = sorted((rank for rank in found if abs(found[rank]) > WARN_SECONDS), key=lambda rank: -abs(found[rank]))
        expected = f"{WARN_SECONDS:g} s apart or less"
        if away:
            first = away[0]
            text = f"{found[first]:+.1f} s on {reports.who([first])}, {apart:.1f} s apart"
            fix = "start chrony or ntpd on that host: chronyc makestep"
            verdict: Verdict = "fail" if abs(found[first]) > CLOCKS_APART_SECONDS else "warn"
            yield Finding(AREA, "skew", verdict, text, expected, fix, tuple(away))
        else:
            yield Finding(AREA, "skew", "pass", f"{1000 * apart:.0f} ms apart", expected)

    # A single host does not need a synchronized clock.
    several = len(reports.hosts()) > 1
    rules = {"synchronized": lambda facts: _synchronized(facts, several), "source": _source}
    yield from each(reports, AREA, rules)


def _synchronized(facts: Facts, several: bool) -> Judged | None:
    if facts["synchronized"] is None:
        return None
    if facts["synchronized"] or not several:
        return "pass", "yes" if facts["synchronized"] else "no", "yes, on several hosts", ""
    return "warn", "no", "yes, on several hosts", "start chrony or ntpd"


def _source(facts: Facts) -> Judged | None:
    value = facts["source"]
    expected = "tsc or a clock of the hypervisor"
    if value in ("hpet", "acpi_pm", "jiffies"):
        return "warn", f"{value}, which is slow to read", expected, "boot with clocksource=tsc"
    return ("pass", value, expected, "") if value else None
