"""What the facts of the network mean: see ``network``, which collects them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from shardtrain.tools.doctor import links
from shardtrain.tools.doctor.network import AREA
from shardtrain.tools.doctor.outliers import slow
from shardtrain.tools.doctor.result import Facts, Finding, Reports, Verdict
from shardtrain.utils.units import format_seconds

GIGA = 1e9

Row = tuple[str, str]
"""Axis and name of a collective."""


def judge(reports: Reports) -> Iterator[Finding]:
    """Right sums first; then each axis against its links, its groups against each other, and ranks by their pairs."""
    yield from _cards(reports)
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
        fix = "take these hosts out of the job: links or devices change numbers; try NCCL_PROTO unset first"
        return Finding(AREA, subject, "fail", f"wrong numbers on {reports.who(wrong)}", "exact sums", fix, tuple(wrong))
    # a collective ends on all ranks together but for the last hop, so that the middle one speaks for its group
    rates = {min(group): statistics.median(one["rate"] for one in group.values()) for group in divided}
    members = {min(group): next(iter(group.values()))["ranks"] for group in divided}
    least = min(rates, key=lambda rank: (rates[rank], rank))
    text = f"{rates[least] / GIGA:.3g} GB/s"
    text += f", slowest group {reports.who(members[least])}" if len(rates) > 1 else ""
    latencies = [one["latency"] for group in divided for one in group.values() if "latency" in one]
    text += f"; {format_seconds(statistics.median(latencies))} for one number" if latencies else ""
    expectations = [
        links.expected(reports, group, _crossing(reports, group, list(members.values()))) for group in members.values()
    ]
    limit, why = min(expectations, key=lambda found: found[0])
    behind = [rank for first in slow(rates) for rank in members[first]]
    if limit and rates[least] < links.GOOD_SHARE * limit:
        verdict: Verdict = "fail" if rates[least] < links.BAD_SHARE * limit else "warn"
        fix = "look at NCCL_DEBUG=INFO for the path that it took: NVLink, PCIe, InfiniBand or sockets"
        expected = f"{links.GOOD_SHARE:.0%} of {why} or more"
        return Finding(AREA, subject, verdict, text, expected, fix, tuple(behind or members[least]))
    if behind:
        fix = "look at the links and switches of these ranks, and at other jobs on them"
        return Finding(AREA, subject, "warn", text, "as in other groups", fix, tuple(behind))
    return Finding(
        AREA, subject, "pass", text, f"{links.GOOD_SHARE:.0%} of {why} or more" if limit else "no expectation"
    )


def _crossing(reports: Reports, group: Sequence[int], groups: Sequence[Sequence[int]]) -> int:
    """How many groups send through the network cards of a host of this group at once, at most."""
    hosts = [{reports.host(rank) for rank in one} for one in groups]
    own = {reports.host(rank) for rank in group}
    return max(sum(host in others for others in hosts if len(others) > 1) for host in own)


def _pairs(reports: Reports) -> Iterator[Finding]:
    """A rank is as fast as its better pair: a slow one is slow with both neighbours, they with it alone."""
    kinds: dict[str, dict[int, float]] = {}
    for rank, facts in reports.of(AREA).items():
        for one in facts["pairs"]:
            best = kinds.setdefault(one["kind"], {})
            best[rank] = max(best.get(rank, 0.0), one["rate"])
    for kind, best in kinds.items():
        behind = slow(best)
        least = min(best, key=lambda rank: (best[rank], rank))
        text = f"{best[least] / GIGA:.3g} to {max(best.values()) / GIGA:.3g} GB/s, slowest {reports.who([least])}"
        fix = "look at the links of this rank or host, and leave it out if they cannot be fixed" if behind else ""
        yield Finding(AREA, kind, "warn" if behind else "pass", text, "as other pairs", fix, tuple(behind))


def _cards(reports: Reports) -> Iterator[Finding]:
    """Ports of the fabric that are down, or fewer than on other hosts."""
    if len(reports.hosts()) < 2:
        return
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
        fix = "look at ibstat there: a port that is down or lost its cable"
        ranks = tuple(rank for host in behind for rank in reports.hosts()[host])
        yield Finding(AREA, "fabric", "fail", text, expected, fix, ranks)
    else:
        rates = sorted({card["rate"] for found in fabric.values() for card in found if card["up"]})
        slowest = 8 * rates[0] / GIGA
        fastest = 8 * rates[-1] / GIGA
        verdict: Verdict = "pass" if len(rates) == 1 else "warn"
        fix = "look at ibstat: a cable that negotiated a lower rate" if verdict == "warn" else ""
        yield Finding(AREA, "fabric", verdict, f"{most} ports of {slowest:.0f} to {fastest:.0f} Gb/s", expected, fix)
