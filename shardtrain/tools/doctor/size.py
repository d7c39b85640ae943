"""Host limits that matter at thousands of ranks, checked for the requested number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import (
    Facts,
    Finding,
    Judged,
    Reports,
    each,
    kernel_numbers,
    warn_if,
)

AREA = "size"

STORE_CONNECTIONS = 2
"""Connections of a rank to the run's store.

One is for process groups, the other for the heartbeat or the folder of its node.
"""
OTHER_FILES = 1024
"""Other open files of a process: libraries, devices, data shards, and sockets of workers."""
NODES_OF_A_SEGMENT = 0.8
"""Usable fraction of the neighbor table. The kernel evicts entries before the table is full."""


def collect(context: RankContext, facts: Facts) -> None:
    """Record kernel and process limits that depend on the number of peers."""
    import resource

    facts["num_ranks"] = context.num_ranks or context.size
    facts["local_size"] = context.local_size
    # Use the hard limit, because runs raise the soft limit to it.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts["open_files"] = -1 if hard == resource.RLIM_INFINITY else hard
    facts["system_files"] = _number("/proc/sys/fs/file-max")
    facts["backlog"] = _number("/proc/sys/net/core/somaxconn")
    facts["tracked"] = _number("/proc/sys/net/netfilter/nf_conntrack_max")
    facts["tracked_now"] = _number("/proc/sys/net/netfilter/nf_conntrack_count")
    facts["neighbours"] = _number("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
    facts["ports"] = -1
    ports = kernel_numbers("/proc/sys/net/ipv4/ip_local_port_range")
    if len(ports) == 2:
        facts["ports"] = ports[1] - ports[0]
    facts["cores"] = os.cpu_count() or 1


def _number(path: str) -> int:
    """Return the number in a kernel file, or -1 if it does not exist."""
    numbers = kernel_numbers(path)
    if len(numbers) != 1:
        return -1
    return numbers[0]


def judge(reports: Reports) -> Iterator[Finding]:
    """Compare each limit with the needs of one host, or of the store's host."""
    rules = {
        "store connections": _store,
        "connections of a host": _ports,
        "listen backlog": _backlog,
        "connection tracking": _tracking,
        "neighbour table": _neighbours,
    }
    yield from each(reports, AREA, rules)


def _verdict(value: int, needed: int, purpose: str, fix: str) -> Judged | None:
    # A limit that the system does not have is -1.
    if value < 0:
        return None
    expected = f"{needed:,} or more, for {purpose}"
    return warn_if(value < needed, f"{value:,}", expected, fix)


def _peers(facts: Facts) -> int:
    """Return the number of connections of one rank: gloo's pairs, or NCCL's rings and trees over sockets."""
    num_ranks = max(2, facts["num_ranks"])
    levels_of_tree = math.ceil(math.log2(num_ranks))
    return 16 + 4 * levels_of_tree


def _store(facts: Facts) -> Judged | None:
    # Every rank connects to the process that serves the store, on the first host.
    num_ranks = facts["num_ranks"]
    needed = STORE_CONNECTIONS * num_ranks + OTHER_FILES
    value = facts["open_files"]
    if value < 0:
        value = facts["system_files"]
    fix = f"raise the hard limit of open files on the first host: ulimit -Hn {needed} (LimitNOFILE, or the container)"
    return _verdict(value, needed, f"{num_ranks:,} ranks at the store of the first host", fix)


def _ports(facts: Facts) -> Judged | None:
    # Each connection that a host opens uses one of its ephemeral ports.
    local_size = facts["local_size"]
    needed = local_size * (_peers(facts) + STORE_CONNECTIONS)
    purpose = f"{local_size} ranks per host of {facts['num_ranks']:,} ranks"
    fix = "widen it: sysctl -w net.ipv4.ip_local_port_range='16384 60999'"
    return _verdict(facts["ports"], needed, purpose, fix)


def _backlog(facts: Facts) -> Judged | None:
    num_ranks = facts["num_ranks"]
    needed = min(4096, num_ranks)
    fix = f"sysctl -w net.core.somaxconn={needed} on the first host, which rejects simultaneous connections beyond it"
    return _verdict(
        facts["backlog"], needed, f"{num_ranks:,} ranks that connect simultaneously", fix
    )


def _tracking(facts: Facts) -> Judged | None:
    # The first host tracks the connections of the store, and those of its own ranks.
    num_ranks = facts["num_ranks"]
    of_store = STORE_CONNECTIONS * num_ranks
    of_ranks = facts["local_size"] * _peers(facts)
    needed = max(0, facts["tracked_now"]) + of_store + of_ranks
    fix = f"sysctl -w net.netfilter.nf_conntrack_max={2 * needed}, or disable connection tracking between nodes"
    return _verdict(
        facts["tracked"], needed, f"{num_ranks:,} ranks at the store of the first host", fix
    )


def _neighbours(facts: Facts) -> Judged | None:
    # The kernel stores the hardware address of each host that is in the same network segment.
    nodes = math.ceil(facts["num_ranks"] / max(1, facts["local_size"]))
    needed = math.ceil(nodes / NODES_OF_A_SEGMENT)
    fix = f"sysctl -w net.ipv4.neigh.default.gc_thresh3={4 * needed}, and gc_thresh2 and gc_thresh1 below it"
    return _verdict(facts["neighbours"], needed, f"{nodes:,} hosts in one network segment", fix)
