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
    device_type = ""
    flops: dict[str, float] = {}
    threads = []
    for facts in reports.of(health.AREA).values():
        device_type = device_type or str(facts["type"])
        dtype = facts["dtype"]
        flops[dtype] = min(facts["rate"], flops.get(dtype, facts["rate"]))
        if "threads" in facts:
            threads.append(int(facts["threads"]))
    return {
        "type": device_type,
        "threads": min(threads, default=0),
        "flops": flops,
        "collectives": _slowest_groups(reports),
    }


def _slowest_groups(reports: Reports) -> list[Facts]:
    """Return a row for the slowest group of each collective and axis, because the others wait for it."""
    groups: dict[tuple[str, str, int], dict[int, Facts]] = {}
    for rank, facts in reports.of(network.AREA).items():
        for measured in facts["collectives"]:
            key = (measured["axis"], measured["name"], measured["group"])
            groups.setdefault(key, {})[rank] = measured

    slowest: dict[tuple[str, str], Facts] = {}
    for (axis, name, _), members in groups.items():
        ranks_of_hosts = Counter(reports.host(rank) for rank in members)
        first = next(iter(members.values()))
        row = {
            "axis": axis,
            "name": name,
            "ranks": first["size"],
            "ranks_per_host": max(ranks_of_hosts.values()),
            # All ranks of a group finish at almost the same time, so take their median.
            "bytes_per_second": statistics.median(one["rate"] for one in members.values()),
        }
        slowest_so_far = slowest.setdefault((axis, name), row)
        if row["bytes_per_second"] < slowest_so_far["bytes_per_second"]:
            slowest[axis, name] = row
    return list(slowest.values())
