"""One rank of the doctor: collect each area within a time limit. Rank 0 judges the facts of all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from shardtrain.tools.doctor import (
    clock,
    configuration,
    device_checks,
    environment_checks,
    health,
    hosts,
    limit_checks,
    memory_checks,
    network,
    numbers,
    size,
    storage_checks,
    versions,
)
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import ERROR, STOPPED, Facts, Finding, Reports
from shardtrain.utils.errors import PeerError
from shardtrain.utils.log import redact

Collect = Callable[[RankContext, Facts], None]


@dataclass(frozen=True)
class Area:
    """Collect and judge functions of one area."""

    name: str
    collect: Collect
    judge: Callable[[Reports], Iterable[Finding]]


AREAS = (
    Area(versions.AREA, versions.collect, versions.judge),
    Area(hosts.AREA, hosts.collect, hosts.judge),
    Area(environment_checks.AREA, environment_checks.collect, environment_checks.judge),
    Area(configuration.AREA, configuration.collect, configuration.judge),
    Area(limit_checks.AREA, limit_checks.collect, limit_checks.judge),
    Area(size.AREA, size.collect, size.judge),
    Area(memory_checks.AREA, memory_checks.collect, memory_checks.judge),
    Area(clock.AREA, clock.collect, clock.judge),
    Area(storage_checks.AREA, storage_checks.collect, storage_checks.judge),
    Area(health.AREA, device_checks.collect, device_checks.judge),
    Area(numbers.AREA, numbers.collect, numbers.judge),
    Area(network.AREA, network.collect, network.judge),
)
"""Areas in the order of collection. Areas that load the machine come last."""


def examine(context: RankContext, areas: Iterable[Area] = AREAS) -> dict[str, Facts]:
    """Return the facts of this rank by area.

    A check that fails records its error. A check that exceeds its limit records its last position.
    """
    collected: dict[str, Facts] = {}
    for area in areas:
        collected[area.name] = facts = _limited(context, area)
        context.line.send(f"facts-{context.rank}-{area.name}", facts)
    context.line.send(f"done-{context.rank}", True)
    return collected


def _limited(context: RankContext, area: Area) -> Facts:
    """Collect the facts of an area in a thread, and abandon the thread if it hangs.

    A write to a dead file server cannot be interrupted.
    """
    noted: Facts = {}

    def collect() -> None:
        try:
            area.collect(replace(context, line=line), noted)
        except PeerError as error:
            noted[ERROR] = str(error)
            noted["is_peer"] = True
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            noted[ERROR] = redact(f"{type(error).__name__}: {text[0]}"[:300])

    # Each check has its own channel, so an abandoned check cannot disturb later areas.
    line = context.line.begin(area.name)
    thread = threading.Thread(target=collect, name=f"doctor-{area.name}", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < line.deadline:
        thread.join(timeout=min(0.2, max(0.01, line.deadline - time.monotonic())))
    facts = {STOPPED: line.where, "place": line.place} if thread.is_alive() else noted
    # If this rank failed, cancel its remaining meetings so that other ranks do not wait. A rank that timed
    # out waiting for another rank has not failed itself.
    if (STOPPED in facts or ERROR in facts) and not facts.get("is_peer"):
        line.cancel()
    context.line.timed_out = line.timed_out
    return facts


def gather(context: RankContext, own: dict[str, Facts], areas: Iterable[Area] = AREAS) -> Reports:
    """Return the facts of all ranks (rank 0 only). Ranks that do not finish in time are missing."""
    facts = {context.rank: own}
    missing = {}
    end = time.monotonic() + context.line.patience_seconds
    for rank in range(context.size):
        if rank == context.rank:
            continue
        is_done = context.line.receive(f"done-{rank}", max(0.0, end - time.monotonic()))
        keys = {area.name: f"facts-{rank}-{area.name}" for area in areas}
        if is_done and (received := context.line.receive_all([*keys.values()])) is not None:
            facts[rank] = dict(zip(keys, received, strict=True))
            continue
        # The areas that a late rank has finished.
        late = {name: context.line.receive(key) for name, key in keys.items()}
        facts[rank] = {name: one for name, one in late.items() if one is not None}
        if not is_done:
            missing[rank] = str(context.line.receive(f"at-{rank}") or "the start")
    return Reports(context.size, {rank: one for rank, one in facts.items() if one}, missing)


def judge(reports: Reports, areas: Iterable[Area] = AREAS) -> list[Finding]:
    """Return all findings, in the order of the areas."""
    findings: list[Finding] = []

    # Group missing ranks by their last position.
    places: dict[str, list[int]] = {}
    for rank, place in reports.missing.items():
        places.setdefault(place, []).append(rank)
    for place, ranks in places.items():
        text = f"{reports.who(ranks)} did not finish, last seen at {place}"
        fix = "check the log of that rank, and that its host is reachable"
        findings.append(Finding("ranks", "present", "fail", text, f"{reports.size} ranks", fix, tuple(ranks)))

    # A rank that waits for another in one area also waits in the next. Report the same text once.
    for area in areas:
        known = {one.measured for one in findings}
        findings += [one for one in _unfinished(reports, area.name) if one.measured not in known]
        if reports.of(area.name):
            findings += area.judge(reports)
    return findings


def _unfinished(reports: Reports, area: str) -> Iterator[Finding]:
    """Report checks that hung, raised, or waited for other ranks."""
    by_rank = {rank: facts[area] for rank, facts in sorted(reports.facts.items()) if area in facts}
    yield from _hung(reports, area, {rank: facts for rank, facts in by_rank.items() if STOPPED in facts})
    waited: dict[str, list[int]] = {}
    raised: dict[str, list[int]] = {}
    for rank, facts in by_rank.items():
        if ERROR in facts:
            ranks_of = waited if facts.get("is_peer") else raised
            ranks_of.setdefault(str(facts[ERROR]), []).append(rank)
    for text, ranks in raised.items():
        measured = f"{text} on {reports.who(ranks)}"
        fix = "fix this error; the other findings of this area are about the other ranks"
        yield Finding(area, "check", "fail", measured, "no error", fix, tuple(ranks))
    for text, ranks in waited.items():
        fix = "see the findings of the rank that did not arrive"
        yield Finding(area, "check", "fail", f"{text}; {reports.who(ranks)} waited", "all ranks", fix)


def _hung(reports: Reports, area: str, by_rank: dict[int, Facts]) -> Iterator[Finding]:
    """Report hanging ranks. In a collective, name the missing ranks, or else the ranks that are furthest behind."""
    if not by_rank:
        return
    places = {rank: int(facts["place"]) for rank, facts in by_rank.items()}
    behind = [rank for rank, place in places.items() if place == min(places.values())]
    where = str(by_rank[behind[0]][STOPPED])
    missing = sorted(reports.missing)
    if area == network.AREA and missing:
        text = f"{where} hangs: {reports.who(missing)} did not arrive"
        fix = "check the log and the host of that rank"
        yield Finding(area, "check", "fail", text, "finished", fix, tuple(missing))
    elif area == network.AREA and len(behind) == reports.size > 1:
        text = f"{where} hangs on all ranks"
        fix = "check firewalls, routes and NCCL_SOCKET_IFNAME"
        yield Finding(area, "check", "fail", text, "finished", fix)
    else:
        text = f"{where} did not finish on {reports.who(behind)}"
        fix = "check the disk, the driver and the network of that rank"
        yield Finding(area, "check", "fail", text, "finished", fix, tuple(behind))
