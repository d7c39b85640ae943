"""Hosts: names, ranks per host, addresses and ports."""

from __future__ import annotations

import functools
import ipaddress
import os
import platform
import socket
from collections.abc import Iterator

from shardtrain.facts.ports import RENDEZVOUS_PORT
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import (
    Facts,
    Finding,
    Judged,
    Reports,
    Verdict,
    each,
    first_few,
    kernel_numbers,
    plural,
    warn_if,
)

AREA = "hosts"

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
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
        facts["addresses"] = sorted(addresses)
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
    by_rank = reports.of(AREA)
    yield _ranks_per_host(reports)
    has_several = len(reports.hosts()) > 1
    yield from each(reports, AREA, {"name resolves": functools.partial(_resolves, has_several)})
    architectures = {facts["architecture"] for facts in by_rank.values()}
    if len(architectures) > 1:
        text = ", ".join(sorted(architectures))
        fix = "use hosts with one processor type, because kernels of different processors round differently"
        yield Finding(AREA, "architecture", "warn", text, "equal on all hosts", fix)
    yield from each(reports, AREA, {"ephemeral ports": _ports})

    # In a job, the port is busy because the job itself uses it.
    if not any(facts["in_job"] for facts in by_rank.values()):
        yield from each(reports, AREA, {"meeting port": _port})


def _ranks_per_host(reports: Reports) -> Finding:
    hosts = reports.hosts()
    by_rank = reports.of(AREA)
    counts = {host: len(ranks) for host, ranks in hosts.items()}
    texts = [f"{host} {count}" for host, count in counts.items()]
    text = f"{plural(len(hosts), 'host')}, {first_few(texts, 4)}"
    expected = "equal on all hosts"

    # Containers may share a name, or a launcher may count differently. Groups within hosts would then be
    # wrong.
    wrong: list[int] = []
    for ranks in hosts.values():
        if len(ranks) != by_rank[ranks[0]]["local_size"]:
            wrong += ranks
    if wrong:
        expected = "LOCAL_WORLD_SIZE ranks on each host"
        fix = "give each host or container a unique name, and start its ranks with one torchrun or srun step"
        return Finding(AREA, "ranks per host", "warn", text, expected, fix, tuple(wrong))

    most = max(counts.values())
    fewer: list[int] = []
    for ranks in hosts.values():
        if len(ranks) < most:
            fewer += ranks
    if fewer:
        fix = "start the same number of ranks on each host"
        return Finding(AREA, "ranks per host", "warn", text, expected, fix, tuple(fewer))
    return Finding(AREA, "ranks per host", "pass", text, expected)


def _resolves(has_several: bool, facts: Facts) -> Judged:
    """Judge the addresses of this host's name. On several hosts, the others must be able to reach one."""
    name = facts["hostname"]
    addresses = facts["addresses"]
    expected = "an address"
    verdict: Verdict = "warn"
    if has_several:
        expected = "an address that other hosts can reach"
        verdict = "fail"
    fix = f"set the network address of {name} in DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME"
    if not addresses:
        error = facts.get("resolve_error", "no address")
        return verdict, f"{name}: {error}", expected, fix
    if has_several and all(_is_loopback(address) for address in addresses):
        text = f"{name} is {', '.join(addresses)}, which other hosts cannot reach"
        return "fail", text, expected, fix
    return "pass", f"{name}: {', '.join(addresses[:2])}", expected, ""


def _is_loopback(address: str) -> bool:
    # An IPv6 address may end with "%" and its interface.
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
    is_busy = facts["port_busy"]
    state = "busy" if is_busy else "free"
    text = f"port {facts['port']} is {state}"
    expected = "free, for a torchrun without --rdzv-endpoint"
    fix = "end the process that listens on it (see ss -ltnp), or use torchrun --rdzv-endpoint HOST:PORT"
    return warn_if(is_busy, text, expected, fix)
