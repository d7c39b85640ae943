"""Measured rates as numbers for ``plan --calibrate``. The findings contain the same rates as text."""

from __future__ import annotations

import statistics
from collections import Counter

from shardtrain.tools.doctor import health, network
from shardtrain.tools.doctor.result import Facts, Reports


def of(reports: Reports) -> Facts:
    """Return the rates of the slowest device, and of the slowest group of each collective and axis.

    ``flops`` are FLOP/s by dtype, with ``threads`` threads on a CPU. ``bytes_per_second`` is the bus
    bandwidth of a group with ``ranks`` ranks, of which at most ``ranks_per_host`` share a host.
    """
    found = reports.of(health.AREA).values()
    flops: dict[str, float] = {}
    for facts in found:
        flops[facts["dtype"]] = min(facts["rate"], flops.get(facts["dtype"], facts["rate"]))

    # Find the slowest group of each collective and axis, because the others wait for it. A group's rate is
    # the median of its ranks.
    groups: dict[tuple[str, str, int], dict[int, Facts]] = {}
    for rank, facts in reports.of(network.AREA).items():
        for one in facts["collectives"]:
            groups.setdefault((one["axis"], one["name"], one["group"]), {})[rank] = one
    slowest: dict[tuple[str, str], Facts] = {}
    for (axis, name, _), members in groups.items():
        measurements = list(members.values())
        row = {
            "axis": axis,
            "name": name,
            "ranks": measurements[0]["size"],
            "ranks_per_host": max(Counter(map(reports.host, members)).values()),
            "bytes_per_second": statistics.median(one["rate"] for one in measurements),
        }
        known = slowest.setdefault((axis, name), row)
        if row["bytes_per_second"] < known["bytes_per_second"]:
            slowest[axis, name] = row
    return {
        "type": next((str(facts["type"]) for facts in found), ""),
        "threads": min((int(facts["threads"]) for facts in found if "threads" in facts), default=0),
        "flops": flops,
        "collectives": list(slowest.values()),
    }
