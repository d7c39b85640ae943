"""What was measured, as numbers for ``plan --calibrate``: the rows of the report say the same in words."""

from __future__ import annotations

import statistics
from collections import Counter

from shardtrain.tools.doctor import device_checks, network
from shardtrain.tools.doctor.result import Facts, Reports


def of(reports: Reports) -> Facts:
    """The slowest device's rate of a product, and of each collective on each axis that of the slowest group.

    ``flops`` are FLOP per second by type, of ``threads`` threads where the device is a CPU; ``bytes_per_second`` is bus
    bandwidth, of a group of ``ranks`` of which at most ``ranks_per_host`` share a host.
    """
    found = reports.of(device_checks.AREA).values()
    flops: dict[str, float] = {}
    for facts in found:
        flops[facts["dtype"]] = min(facts["rate"], flops.get(facts["dtype"], facts["rate"]))

    # Of each collective on each axis the slowest group, which the others wait for; of a group the median rank.
    groups: dict[tuple[str, str, int], list[Facts]] = {}
    for facts in reports.of(network.AREA).values():
        for one in facts["collectives"]:
            groups.setdefault((one["axis"], one["name"], one["group"]), []).append(one)
    slowest: dict[tuple[str, str], Facts] = {}
    for (axis, name, _), members in groups.items():
        ranks = members[0]["ranks"]
        row = {
            "axis": axis,
            "name": name,
            "ranks": len(ranks),
            "ranks_per_host": max(Counter(map(reports.host, ranks)).values()),
            "bytes_per_second": statistics.median(one["rate"] for one in members),
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
