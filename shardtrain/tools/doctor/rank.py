"""One rank of the doctor: collect each area within a time limit. Rank 0 judges the facts of all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        facts = _limited(context, area)
        collected[area.name] = facts
        # Send each area immediately: rank 0 then has it even if a later area ends this process.
        context.line.send(f"facts-{context.rank}-{area.name}", facts)
    context.line.send(f"done-{context.rank}", True)
    return collected


def _limited(context: RankContext, area: Area) -> Facts:
    """Collect the facts of an area in a thread, and abandon the thread if it hangs.

    A write to a dead file server cannot be interrupted.
    """
    collected: Facts = {}
    # Each check has its own channel, so an abandoned check cannot disturb later areas.
    channel = context.line.begin(area.name)

    def collect() -> None:
        try:
            area.collect(replace(context, line=channel), collected)
        except PeerError as error:
            collected[ERROR] = str(error)
            collected["is_peer"] = True
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            collected[ERROR] = redact(f"{type(error).__name__}: {lines[0]}"[:300])

    thread = threading.Thread(target=collect, name=f"doctor-{area.name}", daemon=True)
    thread.start()
    # The check moves its own deadline with each step, so look at it again every 0.2 s.
    while thread.is_alive() and time.monotonic() < channel.deadline:
        remaining = channel.deadline - time.monotonic()
        thread.join(timeout=min(0.2, max(0.01, remaining)))
    facts = collected
    if thread.is_alive():
        facts = {STOPPED: channel.where, "place": channel.place}

    # If this rank failed, cancel its remaining barriers, because other ranks would wait. A rank that timed
    # out waiting for another rank has not failed itself.
    if (STOPPED in facts or ERROR in facts) and not facts.get("is_peer"):
        channel.cancel()
    context.line.timed_out = channel.timed_out
    return facts


def gather(
    context: RankContext, facts_of_rank_0: dict[str, Facts], areas: Iterable[Area] = AREAS
) -> Reports:
    """Return the facts of all ranks (rank 0 only). Ranks that do not finish in time are missing."""
    line = context.line
    names = [area.name for area in areas]
    by_rank: dict[int, dict[str, Facts]] = {}
    if facts_of_rank_0:
        by_rank[context.rank] = facts_of_rank_0
    missing: dict[int, str] = {}
    end = time.monotonic() + line.patience_seconds
    for rank in range(context.size):
        if rank == context.rank:
            continue
        # The time limit is for all ranks together: a later rank gets the time that earlier ranks left.
        remaining = max(0.0, end - time.monotonic())
        is_done = line.receive(f"done-{rank}", remaining)
        facts = _receive_facts(line, rank, names, is_complete=bool(is_done))
        if facts:
            by_rank[rank] = facts
        if not is_done:
            last_place = line.receive(f"at-{rank}")
            missing[rank] = str(last_place or "the start")
    return Reports(context.size, by_rank, missing)


def _receive_facts(
    line: Any, rank: int, names: Sequence[str], is_complete: bool
) -> dict[str, Facts]:
    """Return the facts of the areas that a rank has finished."""
    keys = [f"facts-{rank}-{name}" for name in names]
    # Two requests return all facts of a rank that has finished. With thousands of ranks, one request per area
    # would be slow.
    if is_complete:
        received = line.receive_all(keys)
        if received is not None:
            return dict(zip(names, received, strict=True))
    by_area = {}
    for name, key in zip(names, keys, strict=True):
        facts = line.receive(key)
        if facts is not None:
            by_area[name] = facts
    return by_area


def judge(reports: Reports, areas: Iterable[Area] = AREAS) -> list[Finding]:
    """Return all findings, in the order of the areas."""
    findings = list(_missing_ranks(reports))
    # A rank that waits for another in one area also waits in the next. Report the same text once.
    for area in areas:
        reported = {finding.measured for finding in findings}
        for finding in _unfinished(reports, area.name):
            if finding.measured not in reported:
                findings.append(finding)
        if reports.of(area.name):
            findings += area.judge(reports)
    return findings


def _missing_ranks(reports: Reports) -> Iterator[Finding]:
    """Report ranks that did not finish, grouped by their last position."""
    ranks_at: dict[str, list[int]] = {}
    for rank, place in reports.missing.items():
        ranks_at.setdefault(place, []).append(rank)
    expected = f"{reports.size} ranks"
    for place, ranks in ranks_at.items():
        text = f"{reports.who(ranks)} did not finish, last seen at {place}"
        fix = "check the log of that rank, and that its host is reachable"
        yield Finding("ranks", "present", "fail", text, expected, fix, tuple(ranks))


def _unfinished(reports: Reports, area: str) -> Iterator[Finding]:
    """Report checks that hung, raised, or waited for other ranks."""
    # Group the ranks by outcome, and by the text of their error.
    hung: dict[int, Facts] = {}
    waited: dict[str, list[int]] = {}
    raised: dict[str, list[int]] = {}
    for rank in sorted(reports.facts):
        facts = reports.facts[rank].get(area, {})
        if STOPPED in facts:
            hung[rank] = facts
        if ERROR in facts:
            error = str(facts[ERROR])
            ranks_by_error = waited if facts.get("is_peer") else raised
            ranks_by_error.setdefault(error, []).append(rank)

    if hung:
        yield _hung(reports, area, hung)
    for error, ranks in raised.items():
        measured = f"{error} on {reports.who(ranks)}"
        fix = "fix this error; the other findings of this area are about the other ranks"
        yield Finding(area, "check", "fail", measured, "no error", fix, tuple(ranks))
    for error, ranks in waited.items():
        measured = f"{error}; {reports.who(ranks)} waited"
        fix = "see the findings of the rank that did not arrive"
        yield Finding(area, "check", "fail", measured, "all ranks", fix)


def _hung(reports: Reports, area: str, by_rank: dict[int, Facts]) -> Finding:
    """Report hanging ranks.

    In a collective, name the missing ranks, or else the ranks that are furthest behind.
    """
    # All ranks begin the same steps in the same order. The others wait for the ranks with the lowest place.
    last_place = min(int(facts["place"]) for facts in by_rank.values())
    behind = [rank for rank, facts in by_rank.items() if int(facts["place"]) == last_place]
    where = str(by_rank[behind[0]][STOPPED])
    missing = sorted(reports.missing)

    is_collective = area == network.AREA
    if is_collective and missing:
        text = f"{where} hangs: {reports.who(missing)} did not arrive"
        fix = "check the log and the host of that rank"
        return Finding(area, "check", "fail", text, "finished", fix, tuple(missing))
    # If all ranks hang at the same place, no rank is at fault.
    hang_together = len(behind) == reports.size > 1
    if is_collective and hang_together:
        text = f"{where} hangs on all ranks"
        fix = "check firewalls, routes and NCCL_SOCKET_IFNAME"
        return Finding(area, "check", "fail", text, "finished", fix)
    text = f"{where} did not finish on {reports.who(behind)}"
    fix = "check the disk, the driver and the network of that rank"
    return Finding(area, "check", "fail", text, "finished", fix, tuple(behind))
