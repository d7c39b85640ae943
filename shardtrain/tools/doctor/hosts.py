"""Hosts: names, ranks per host, addresses and ports."""

from __future__ import annotations

import ipaddress
import os
import platform
import socket
from collections.abc import Iterator

from shardtrain.facts.ports import RENDEZVOUS_PORT
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import Facts, Finding, Judged, Reports, each, kernel_numbers, warn_if

AREA = "hosts"

"""Default rendezvous port of torchrun."""
LEAST_PORTS = 2_000
"""Minimum number of ephemeral ports. A rank may open connections to a few thousand other ranks."""


def collect(context: RankContext, facts: Facts) -> None:
    """Record the name, architecture, addresses and ports of this host."""
    name = socket.gethostname()
    facts["hostname"] = name
    facts["architecture"] = platform.machine()
    facts["local_size"] = context.local_size
    facts["port_range"] = kernel_numbers("/proc/sys/net/ipv4/ip_local_port_range")
    facts["in_job"] = "SHARDTRAIN_DOCTOR" not in os.environ and context.size > 1
    facts["port"] = RENDEZVOUS_PORT
    facts["port_busy"] = not is_free(RENDEZVOUS_PORT)
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
        facts["addresses"] = sorted(map(str, found))
    except OSError as error:
        facts["addresses"] = []
        facts["resolve_error"] = str(error.strerror or error)


def is_free(port: int) -> bool:
    """True if a server can listen on a port, tested on the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def judge(reports: Reports) -> Iterator[Finding]:
    """Check host names, equal numbers of ranks per host, ephemeral ports and the rendezvous port."""
    hosts = reports.hosts()
    by_rank = reports.of(AREA)
    yield _ranks_per_host(reports)
    yield from each(reports, AREA, {"name resolves": lambda facts: _resolves(facts, several=len(hosts) > 1)})
    found = {facts["architecture"] for facts in by_rank.values()}
    if len(found) > 1:
        fix = "use hosts with one processor type, because kernels of different processors round differently"
        yield Finding(AREA, "architecture", "warn", ", ".join(sorted(found)), "equal on all hosts", fix)
    yield from each(reports, AREA, {"ephemeral ports": _ports})
    if not any(facts["in_job"] for facts in by_rank.values()):
        yield from each(reports, AREA, {"meeting port": _port})


def _ranks_per_host(reports: Reports) -> Finding:
    hosts = reports.hosts()
    by_rank = reports.of(AREA)
    counts = {host: len(ranks) for host, ranks in hosts.items()}
    text = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}, " + ", ".join(
        f"{host} {count}" for host, count in list(counts.items())[:4]
    )
    text += f" and {len(counts) - 4} more" if len(counts) > 4 else ""

    # Containers may share a name, or a launcher may count differently. Groups within hosts would then be
    # wrong.
    wrong = {host: count for host, count in counts.items() if count != by_rank[hosts[host][0]]["local_size"]}
    if wrong:
        fix = "give each host or container a unique name, and start its ranks with one torchrun or srun step"
        expected = "LOCAL_WORLD_SIZE ranks on each host"
        ranks = tuple(rank for host in wrong for rank in hosts[host])
        return Finding(AREA, "ranks per host", "warn", text, expected, fix, ranks)
    if len(set(counts.values())) > 1:
        most = max(counts.values())
        ranks = tuple(rank for host, own in hosts.items() if counts[host] < most for rank in own)
        fix = "start the same number of ranks on each host"
        return Finding(AREA, "ranks per host", "warn", text, "equal on all hosts", fix, ranks)
    return Finding(AREA, "ranks per host", "pass", text, "equal on all hosts")


def _resolves(facts: Facts, several: bool) -> Judged:
    name = facts["hostname"]
    addresses = facts["addresses"]
    expected = "an address that other hosts can reach" if several else "an address"
    fix = f"set the network address of {name} in DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME"
    if not addresses:
        return ("fail" if several else "warn"), f"{name}: {facts.get('resolve_error', 'no address')}", expected, fix
    if several and all(_is_loopback(address) for address in addresses):
        return "fail", f"{name} is {', '.join(addresses)}, which other hosts cannot reach", expected, fix
    return "pass", f"{name}: {', '.join(addresses[:2])}", expected, ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _ports(facts: Facts) -> Judged | None:
    if len(facts["port_range"]) != 2:
        return None
    low, high = facts["port_range"]
    fix = "widen it: sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
    text = f"{low} to {high}"
    expected = f"{LEAST_PORTS} or more"
    return warn_if(high - low < LEAST_PORTS, text, expected, fix)


def _port(facts: Facts) -> Judged:
    text = f"port {facts['port']} is {'busy' if facts['port_busy'] else 'free'}"
    expected = "free, for a torchrun without --rdzv-endpoint"
    fix = "end the process that listens on it (see ss -ltnp), or use torchrun --rdzv-endpoint HOST:PORT"
    return warn_if(facts["port_busy"], text, expected, fix)
