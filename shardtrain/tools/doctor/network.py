"""Network: speed of all-reduce and all-gather along mesh axes, correctness of sums, and slow ranks.

Bus bandwidth is defined as in NVIDIA's nccl-tests (doc/PERFORMANCE.md): bytes times 2 (n - 1) / n for
all-reduce and (n - 1) / n for all-gather, divided by seconds. It is the load of each link of a ring for any
number of ranks.
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardtrain.ops import accelerator
from shardtrain.tools.doctor import groups, links
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.outliers import slow
from shardtrain.tools.doctor.result import Facts, Finding, Reports, Verdict
from shardtrain.utils.errors import PeerError
from shardtrain.utils.units import GIGA, MIB, format_seconds

AREA = "network"

BYTES = {"cpu": 8 * MIB, "accelerator": 256 * MIB}
PAIR_BYTES = {"cpu": 4 * MIB, "accelerator": 64 * MIB}
REPEATS = 5
SMALL_REPEATS = 20

Row = tuple[str, str]
"""Mesh axis, and name of a collective."""


def collect(context: RankContext, facts: Facts) -> None:
    """Measure the collectives of each axis, then pairs of neighbors. Skip both with one rank."""
    facts["cards"] = links.network_cards()
    facts["collectives"] = []
    facts["pairs"] = []
    if context.size == 1:
        return
    hosts = _hosts(context)

    context.line.mark("joining the process group")
    context.torch_device()  # NCCL uses the current device of this thread
    # Exceed all limits of the doctor. PyTorch ends the process after its timeout, whereas the store channel
    # reports the waiting ranks.
    timeout = timedelta(seconds=20 * context.limit_seconds)
    store = dist.PrefixStore("doctor-group", context.store)
    backend = accelerator.collectives(context.device)
    dist.init_process_group(
        backend, store=store, rank=context.rank, world_size=context.size, timeout=timeout
    )

    for axis, divided in groups.of_run(context.loaded, hosts).items():
        facts["collectives"] += _measure_axis(context, axis, divided, timeout)
    for kind, rounds in groups.pair_rounds(hosts).items():
        for number, pairs in enumerate(rounds, start=1):
            context.line.meet(f"{kind}, round {number}")
            peer = _peer(context.rank, pairs)
            if peer is not None:
                rate = _pair_rate(context, peer)
                facts["pairs"].append({"kind": kind, "peer": peer, "rate": rate})

    # A rank that leaves early would break connections of ranks that still measure.
    context.line.meet("leaving the process group")
    dist.destroy_process_group()


def _measure_axis(
    context: RankContext,
    axis: str,
    divided: list[list[int]],
    timeout: timedelta,
) -> list[Facts]:
    """Measure each collective in this rank's group. Collective over all ranks."""
    context.line.mark(f"making the groups of {axis}")
    # The groups divide the ranks, so exactly one contains this rank.
    number = 0
    while context.rank not in divided[number]:
        number += 1
    ranks = divided[number]
    # Only members create a group. Otherwise every rank would create those of all ranks.
    group: Any = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)

    rows = []
    for name, measure in COLLECTIVES.items():
        # Ranks meet before each measurement, because a late rank would look like a slow link.
        context.line.meet(f"{name} on {axis}")
        # Rank 0 receives the facts of all ranks. It finds the members of a group by its number.
        row = {"axis": axis, "name": name, "group": number, "size": len(ranks)}
        row |= measure(context, group)
        rows.append(row)
    return rows


def _pair_rate(context: RankContext, peer: int) -> float:
    """Return the bytes per second of exchanging a buffer. All pairs of a round run simultaneously."""
    numel = PAIR_BYTES[context.kind] // 4
    sent = torch.zeros(numel, device=context.torch_device())
    received = torch.empty_like(sent)

    def exchange() -> None:
        send = dist.P2POp(dist.isend, sent, peer)
        receive = dist.P2POp(dist.irecv, received, peer)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()

    return sent.nbytes / _seconds(context, exchange, REPEATS)


def _peer(rank: int, pairs: Sequence[tuple[int, int]]) -> int | None:
    """Return the other rank of a rank's pair."""
    for first, second in pairs:
        if rank == first:
            return second
        if rank == second:
            return first
    return None


def _hosts(context: RankContext) -> list[int]:
    """Return a number for each rank that is equal for the ranks of one host. Collective.

    Rank 0 receives the host names. If every host has the same number of consecutive ranks, it sends only
    the number of ranks per host.
    """
    import socket

    ranks = range(context.size)
    context.line.send(f"host-{context.rank}", socket.gethostname())
    context.line.meet("network")
    if context.rank == 0:
        names = context.line.receive_all([f"host-{rank}" for rank in ranks]) or []
        context.line.send("hosts", _placement([str(name) for name in names]))
    placement = context.line.receive("hosts", context.limit_seconds)
    if placement is None:
        raise PeerError("rank 0 did not send the hosts of the ranks")
    if isinstance(placement, int):
        ranks_per_host = placement
        return [rank // ranks_per_host for rank in ranks]
    return [int(number) for number in placement]


def _placement(names: Sequence[str]) -> int | list[int]:
    """Return the number of ranks per host, or a host number per rank if hosts have different numbers of ranks.

    The first form also requires that the ranks of each host are consecutive.

    >>> _placement(["a", "a", "b", "b"]), _placement(["a", "b", "a", "b"]), _placement(["a", "b", "b"])
    (2, [0, 1, 0, 1], [0, 1, 1])
    """
    numbers: dict[str, int] = {}
    host_of_rank = []
    for name in names:
        number = numbers.setdefault(name, len(numbers))
        host_of_rank.append(number)
    ranks_per_host = host_of_rank.count(0)
    regular = [rank // ranks_per_host for rank in range(len(names))]
    if host_of_rank == regular:
        return ranks_per_host
    return host_of_rank


def _seconds(context: RankContext, work: Callable[[], object], repeats: int) -> float:
    """Return the shortest duration of several repetitions.

    The first repetition opens connections, so it does not count. Other work on the machine slows some
    repetitions.
    """
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        accelerator.finish(context.torch_device())  # the call only queues a kernel
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def all_reduce(context: RankContext, group: dist.ProcessGroup) -> Facts:
    """Check a sum of integers, then time sums of a large buffer of zeros and of one number."""
    size = group.size()
    numel = BYTES[context.kind] // 4
    number_of_rank = float(group.rank() + 1)
    tensor = torch.full((numel,), number_of_rank, device=context.torch_device())
    dist.all_reduce(tensor, group=group)
    # The ranks contribute 1, 2, ..., size. Small integers are exact, so any other sum is wrong.
    expected_sum = size * (size + 1) // 2
    is_right = bool((tensor == expected_sum).all())

    # Reset to zeros, because repeated sums of other numbers would overflow.
    tensor.zero_()
    small = tensor[:1].clone()
    seconds = _seconds(context, lambda: dist.all_reduce(tensor, group=group), REPEATS)
    latency = _seconds(context, lambda: dist.all_reduce(small, group=group), SMALL_REPEATS)
    # Bus bandwidth, as nccl-tests defines it: a ring moves each byte over a link almost twice.
    bus_bytes = 2 * (size - 1) / size * tensor.nbytes
    return {"right": is_right, "rate": bus_bytes / seconds, "latency": latency}


def all_gather(context: RankContext, group: dist.ProcessGroup) -> Facts:
    """Check that each rank's numbers arrive at its position, then time the all-gather."""
    size = group.size()
    numel = BYTES[context.kind] // 4 // size
    number_of_rank = float(group.rank() + 1)
    part = torch.full((numel,), number_of_rank, device=context.torch_device())
    gathered = part.new_empty(size * numel)
    # Since torch 2.13 the first name is current and the second deprecated.
    gather = getattr(dist, "all_gather_single", None)
    if gather is None:
        gather = getattr(dist, "all_gather_into_tensor")  # noqa: B009
    gather(gathered, part, group=group)

    # Row r of the result is from rank r, and contains only r + 1.
    expected = torch.arange(1, size + 1, device=gathered.device, dtype=gathered.dtype)
    rows = gathered.view(size, -1)
    is_right = bool((rows == expected[:, None]).all())

    seconds = _seconds(context, lambda: gather(gathered, part, group=group), REPEATS)
    bus_bytes = (size - 1) / size * gathered.nbytes
    return {"right": is_right, "rate": bus_bytes / seconds}


COLLECTIVES: dict[str, Callable[[RankContext, dist.ProcessGroup], Facts]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
}


def judge(reports: Reports) -> Iterator[Finding]:
    """Judge correctness, then the speed of each axis and group, and of ranks by their pairs."""
    yield from _cards(reports)
    # Group the measurements by axis and collective, then by group, then by rank.
    rows: dict[Row, dict[int, dict[int, Facts]]] = {}
    for rank, facts in reports.of(AREA).items():
        for measured in facts["collectives"]:
            row = (measured["axis"], measured["name"])
            groups_of_row = rows.setdefault(row, {})
            ranks_of_group = groups_of_row.setdefault(measured["group"], {})
            ranks_of_group[rank] = measured
    for (axis, name), divided in rows.items():
        yield _collective(reports, f"{name} {axis}", list(divided.values()))
    yield from _pairs(reports)


def _collective(reports: Reports, subject: str, divided: Sequence[dict[int, Facts]]) -> Finding:
    """Judge one collective along one axis from the measurements of its groups by rank."""
    # Speed does not matter if the results are wrong.
    wrong = []
    for group in divided:
        for rank, measured in group.items():
            if not measured["right"]:
                wrong.append(rank)
    if wrong:
        wrong.sort()
        text = f"wrong numbers on {reports.who(wrong)}"
        fix = "unset NCCL_PROTO; if that does not help, remove these hosts: their links or devices change numbers"
        return Finding(AREA, subject, "fail", text, "exact sums", fix, tuple(wrong))

    # Find the slowest group. All ranks of a group finish a collective at almost the same time, so take
    # their median. Groups are named by their first rank.
    rates: dict[int, float] = {}
    members: dict[int, list[int]] = {}
    latencies = []
    for group in divided:
        first = min(group)
        members[first] = sorted(group)
        rates[first] = statistics.median(measured["rate"] for measured in group.values())
        for measured in group.values():
            if "latency" in measured:
                latencies.append(measured["latency"])
    slowest = min(rates, key=lambda first: (rates[first], first))
    rate = rates[slowest]
    text = f"{rate / GIGA:.3g} GB/s"
    if len(rates) > 1:
        text += f", slowest group {reports.who(members[slowest])}"
    if latencies:
        latency = statistics.median(latencies)
        text += f"; {format_seconds(latency)} for one number"
    behind = []
    for first in slow(rates):
        behind += members[first]

    # Compare with the expected bandwidth of the links, if known, and with other groups.
    limit, source = _expected(reports, list(members.values()))
    expected = "no expectation"
    if limit:
        expected = f"{links.GOOD_SHARE:.0%} of {source} or more"
    if limit and rate < links.GOOD_SHARE * limit:
        verdict: Verdict = "warn"
        if rate < links.BAD_SHARE * limit:
            verdict = "fail"
        fix = "check the transport with NCCL_DEBUG=INFO: NVLink, PCIe, InfiniBand or sockets"
        named = behind or members[slowest]
        return Finding(AREA, subject, verdict, text, expected, fix, tuple(named))
    if behind:
        fix = "check the links and switches of these ranks, and other jobs on them"
        return Finding(AREA, subject, "warn", text, "as in other groups", fix, tuple(behind))
    return Finding(AREA, subject, "pass", text, expected)


def _expected(reports: Reports, groups: Sequence[Sequence[int]]) -> tuple[float, str]:
    """Return the lowest expected bandwidth of several groups, and its source. Return 0 if one is unknown."""
    # Groups that span hosts share the network cards of each of their hosts.
    num_crossing = _crossing(reports, groups)
    expectations = []
    for ranks in groups:
        most_crossing = max(num_crossing[reports.host(rank)] for rank in ranks)
        expectations.append(links.expected(reports, ranks, most_crossing))
    return min(expectations, key=lambda expectation: expectation[0])


def _crossing(reports: Reports, groups: Sequence[Sequence[int]]) -> collections.Counter[str]:
    """Return the number of groups that share the network cards of each host."""
    num_groups: collections.Counter[str] = collections.Counter()
    for ranks in groups:
        hosts = {reports.host(rank) for rank in ranks}
        if len(hosts) > 1:
            num_groups.update(hosts)
    return num_groups


def _pairs(reports: Reports) -> Iterator[Finding]:
    """Rate each rank by its faster pair, because a slow rank is slow with both neighbors."""
    # Pairs within a host and between hosts use different links, so compare them separately.
    kinds: dict[str, dict[int, float]] = {}
    for rank, facts in reports.of(AREA).items():
        for pair in facts["pairs"]:
            rates = kinds.setdefault(pair["kind"], {})
            rates[rank] = max(rates.get(rank, 0.0), pair["rate"])

    for kind, rates in kinds.items():
        slowest = min(rates, key=lambda rank: (rates[rank], rank))
        lowest = f"{rates[slowest] / GIGA:.3g}"
        highest = f"{max(rates.values()) / GIGA:.3g}"
        text = f"{lowest} to {highest} GB/s, slowest {reports.who([slowest])}"
        behind = slow(rates)
        verdict: Verdict = "pass"
        fix = ""
        if behind:
            verdict = "warn"
            fix = "check the links of this rank or host, and exclude it if they cannot be fixed"
        yield Finding(AREA, kind, verdict, text, "as other pairs", fix, tuple(behind))


def _cards(reports: Reports) -> Iterator[Finding]:
    """Report hosts with fewer active InfiniBand ports than other hosts."""
    hosts = reports.hosts()
    if len(hosts) < 2:
        return
    num_ports: dict[str, int] = {}
    rates = set()
    by_rank = reports.of(AREA)
    for host, ranks in hosts.items():
        # All ranks of a host see the same cards, so use its first rank.
        facts = by_rank.get(ranks[0])
        if facts is None:
            continue
        num_ports[host] = 0
        for card in facts["cards"]:
            if card["kind"] == "infiniband" and card["up"]:
                num_ports[host] += 1
                rates.add(card["rate"])
    most = max(num_ports.values(), default=0)
    if not most:
        yield Finding(AREA, "fabric", "pass", "Ethernet", "no expectation")
        return

    expected = f"{most} ports up on each host"
    counts = []
    ranks_behind = []
    for host, count in num_ports.items():
        if count < most:
            counts.append(f"{count} on {host}")
            ranks_behind += hosts[host]
    if counts:
        text = ", ".join(counts[:4])
        fix = "check ibstat on it for a port that is down or has lost its cable"
        yield Finding(AREA, "fabric", "fail", text, expected, fix, tuple(ranks_behind))
        return
    # All ports are up. A lower rate than that of the others is a sign of a bad cable.
    lowest = f"{8 * min(rates) / GIGA:.0f}"
    highest = f"{8 * max(rates) / GIGA:.0f}"
    text = f"{most} ports of {lowest} to {highest} Gb/s"
    verdict: Verdict = "pass"
    fix = ""
    if len(rates) > 1:
        verdict = "warn"
        fix = "check ibstat for a cable that negotiated a lower rate"
    yield Finding(AREA, "fabric", verdict, text, expected, fix)
