"""Network: speed of all-reduce and all-gather along mesh axes, correctness of sums, and slow ranks.

Bus bandwidth is defined as in NVIDIA's nccl-tests (doc/PERFORMANCE.md): bytes times 2 (n - 1) / n for
all-reduce and (n - 1) / n for all-gather, divided by seconds. It is the load of each link of a ring for any
number of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.ops import accelerator
from shardtrain.tools.doctor import groups, links
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.outliers import slow
from shardtrain.tools.doctor.result import Facts, Finding, Reports, Verdict
from shardtrain.utils.errors import PeerError
from shardtrain.utils.units import MIB, format_seconds

AREA = "network"

BYTES = {"cpu": 8 * MIB, "accelerator": 256 * MIB}
PAIR_BYTES = {"cpu": 4 * MIB, "accelerator": 64 * MIB}
REPEATS = 5
SMALL_REPEATS = 20
GIGA = 1e9

Row = tuple[str, str]
"""Mesh axis, and name of a collective."""


def collect(context: RankContext, facts: Facts) -> None:
    """Measure the collectives of each axis, then pairs of neighbours. Skip both with one rank."""
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
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.size, timeout=timeout)

    # PyTorch requires that every rank creates all groups in the same order. Ranks meet before each
    # measurement, because a late rank would look like a slow link.
    for axis, divided in groups.of_run(context.loaded, hosts).items():
        context.line.mark(f"making the groups of {axis}")
        subgroups: Any = dist.new_subgroups_by_enumeration(divided, timeout=timeout)
        group: dist.ProcessGroup = subgroups[0]
        place = next(number for number, ranks in enumerate(divided) if context.rank in ranks)
        for name, measure in COLLECTIVES.items():
            context.line.meet(f"{name} on {axis}")
            measured = measure(context, group)
            facts["collectives"].append(
                {"axis": axis, "name": name, "group": place, "ranks": divided[place], **measured}
            )

    # Exchange a buffer with each neighbour. All pairs of a round run simultaneously.
    for kind, rounds in groups.pair_rounds(hosts).items():
        for number, pairs in enumerate(rounds):
            context.line.meet(f"{kind}, round {number + 1}")
            peer = next((a + b - context.rank for a, b in pairs if context.rank in (a, b)), None)
            if peer is None:
                continue
            sent = torch.zeros(PAIR_BYTES[context.kind] // 4, device=context.torch_device())
            received = torch.empty_like(sent)
            seconds = _seconds(context, lambda: _exchange(sent, received, peer), REPEATS)  # noqa: B023
            facts["pairs"].append({"kind": kind, "peer": peer, "rate": sent.nbytes / seconds})

    # A rank that leaves early would break connections of ranks that still measure.
    context.line.meet("leaving the process group")
    dist.destroy_process_group()


def _hosts(context: RankContext) -> list[str]:
    """Return the host of each rank (a collective)."""
    import socket

    context.line.send(f"host-{context.rank}", socket.gethostname())
    context.line.meet("network")
    if context.rank == 0:
        context.line.send("hosts", [context.line.receive(f"host-{rank}") for rank in range(context.size)])
    hosts = context.line.receive("hosts", context.limit_seconds)
    if hosts is None:
        raise PeerError("rank 0 did not send the hosts of the ranks")
    return [str(host) for host in hosts]


def _seconds(context: RankContext, work: Callable[[], object], repeats: int) -> float:
    """Return the shortest duration of several repetitions.

    The first repetition opens connections, so it does not count. Other work on the machine slows some repetitions.
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
    tensor = torch.full((BYTES[context.kind] // 4,), float(group.rank() + 1), device=context.torch_device())
    dist.all_reduce(tensor, group=group)
    right = bool((tensor == size * (size + 1) // 2).all())
    # Reset to zeros, because repeated sums of other numbers would overflow.
    small = tensor[:1].zero_().clone()
    tensor.zero_()
    seconds = _seconds(context, lambda: dist.all_reduce(tensor, group=group), REPEATS)
    latency = _seconds(context, lambda: dist.all_reduce(small, group=group), SMALL_REPEATS)
    return {"right": right, "rate": 2 * (size - 1) / size * tensor.nbytes / seconds, "latency": latency}


def all_gather(context: RankContext, group: dist.ProcessGroup) -> Facts:
    """Check that each rank's numbers arrive at its position, then time the all-gather."""
    size = group.size()
    part = torch.full((BYTES[context.kind] // 4 // size,), float(group.rank() + 1), device=context.torch_device())
    whole = part.new_empty(size * part.numel())
    # Since torch 2.13 the first name is current and the second deprecated.
    gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
    gather(whole, part, group=group)
    wanted = torch.arange(1, size + 1, device=whole.device, dtype=whole.dtype)
    right = bool((whole.view(size, -1) == wanted[:, None]).all())
    seconds = _seconds(context, lambda: gather(whole, part, group=group), REPEATS)
    return {"right": right, "rate": (size - 1) / size * whole.nbytes / seconds}


COLLECTIVES: dict[str, Callable[[RankContext, dist.ProcessGroup], Facts]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
}


def _exchange(sent: Tensor, received: Tensor, peer: int) -> None:
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)])
    for one in work:
        one.wait()


def judge(reports: Reports) -> Iterator[Finding]:
    """Judge correctness, then the speed of each axis and group, and of ranks by their pairs."""
    yield from _cards(reports)
    # Group the measurements by axis and collective, then by group, then by rank.
    rows: dict[Row, dict[int, dict[int, Facts]]] = {}
    for rank, facts in reports.of(AREA).items():
        for one in facts["collectives"]:
            rows.setdefault((one["axis"], one["name"]), {}).setdefault(one["group"], {})[rank] = one
    for (axis, name), divided in rows.items():
        yield _collective(reports, axis, name, list(divided.values()))
    yield from _pairs(reports)


def _collective(reports: Reports, axis: str, name: str, divided: Sequence[dict[int, Facts]]) -> Finding:
    subject = f"{name} {axis}"
    wrong = sorted(rank for group in divided for rank, one in group.items() if not one["right"])
    if wrong:
        fix = "unset NCCL_PROTO; if that does not help, remove these hosts: their links or devices change numbers"
        return Finding(AREA, subject, "fail", f"wrong numbers on {reports.who(wrong)}", "exact sums", fix, tuple(wrong))

    # Find the slowest group. All ranks of a group finish a collective at almost the same time, so take their median.
    rates = {min(group): statistics.median(one["rate"] for one in group.values()) for group in divided}
    members = {min(group): next(iter(group.values()))["ranks"] for group in divided}
    least = min(rates, key=lambda rank: (rates[rank], rank))
    text = f"{rates[least] / GIGA:.3g} GB/s"
    text += f", slowest group {reports.who(members[least])}" if len(rates) > 1 else ""
    latencies = [one["latency"] for group in divided for one in group.values() if "latency" in one]
    text += f"; {format_seconds(statistics.median(latencies))} for one number" if latencies else ""

    # Compare with the expected bandwidth of the links, if known, and with other groups.
    expectations = [
        links.expected(reports, group, _crossing(reports, group, list(members.values()))) for group in members.values()
    ]
    limit, why = min(expectations, key=lambda found: found[0])
    behind = [rank for first in slow(rates) for rank in members[first]]
    if limit and rates[least] < links.GOOD_SHARE * limit:
        verdict: Verdict = "fail" if rates[least] < links.BAD_SHARE * limit else "warn"
        fix = "check the transport with NCCL_DEBUG=INFO: NVLink, PCIe, InfiniBand or sockets"
        expected = f"{links.GOOD_SHARE:.0%} of {why} or more"
        return Finding(AREA, subject, verdict, text, expected, fix, tuple(behind or members[least]))
    if behind:
        fix = "check the links and switches of these ranks, and other jobs on them"
        return Finding(AREA, subject, "warn", text, "as in other groups", fix, tuple(behind))
    return Finding(
        AREA, subject, "pass", text, f"{links.GOOD_SHARE:.0%} of {why} or more" if limit else "no expectation"
    )


def _crossing(reports: Reports, group: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    """Return the maximum number of groups that share the network cards of one of this group's hosts."""
    hosts = [{reports.host(rank) for rank in one} for one in groups]
    own = {reports.host(rank) for rank in group}
    return max(sum(host in others for others in hosts if len(others) > 1) for host in own)


def _pairs(reports: Reports) -> Iterator[Finding]:
    """Rate each rank by its faster pair, because a slow rank is slow with both neighbours."""
    # Pairs within a host and between hosts use different links, so compare them separately.
    kinds: dict[str, dict[int, float]] = {}
    for rank, facts in reports.of(AREA).items():
        for one in facts["pairs"]:
            best = kinds.setdefault(one["kind"], {})
            best[rank] = max(best.get(rank, 0.0), one["rate"])
    for kind, best in kinds.items():
        behind = slow(best)
        least = min(best, key=lambda rank: (best[rank], rank))
        text = f"{best[least] / GIGA:.3g} to {max(best.values()) / GIGA:.3g} GB/s, slowest {reports.who([least])}"
        fix = "check the links of this rank or host, and exclude it if they cannot be fixed" if behind else ""
        yield Finding(AREA, kind, "warn" if behind else "pass", text, "as other pairs", fix, tuple(behind))


def _cards(reports: Reports) -> Iterator[Finding]:
    """Report hosts with fewer active InfiniBand ports than other hosts."""
    if len(reports.hosts()) < 2:
        return
    # All ranks of a host see the same cards, so use its first rank.
    first = {host: ranks[0] for host, ranks in reports.hosts().items() if ranks[0] in reports.of(AREA)}
    cards = {host: reports.of(AREA)[rank]["cards"] for host, rank in first.items()}
    fabric = {host: [card for card in found if card["kind"] == "infiniband"] for host, found in cards.items()}
    most = max((sum(card["up"] for card in found) for found in fabric.values()), default=0)
    if not most:
        yield Finding(AREA, "fabric", "pass", "Ethernet", "no expectation")
        return
    behind = {host: sum(card["up"] for card in found) for host, found in fabric.items()}
    behind = {host: up for host, up in behind.items() if up < most}
    expected = f"{most} ports up on each host"
    if behind:
        text = ", ".join(f"{up} on {host}" for host, up in list(behind.items())[:4])
        fix = "check ibstat on it for a port that is down or has lost its cable"
        ranks = tuple(rank for host in behind for rank in reports.hosts()[host])
        yield Finding(AREA, "fabric", "fail", text, expected, fix, ranks)
    else:
        rates = sorted({card["rate"] for found in fabric.values() for card in found if card["up"]})
        slowest = 8 * rates[0] / GIGA
        fastest = 8 * rates[-1] / GIGA
        verdict: Verdict = "pass" if len(rates) == 1 else "warn"
        fix = "check ibstat for a cable that negotiated a lower rate" if verdict == "warn" else ""
        yield Finding(AREA, "fabric", verdict, f"{most} ports of {slowest:.0f} to {fastest:.0f} Gb/s", expected, fix)
