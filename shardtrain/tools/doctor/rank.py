"""One rank of the doctor: collect every area within its limit, tell the first rank, which judges what all have told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from shardtrain.tools.doctor import (
    clock,
    configuration,
    devices,
    environment,
    hosts,
    limits,
    memory,
    network,
    network_judge,
    numbers,
    size,
    storage,
    storage_judge,
    versions,
)
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import ERROR, STOPPED, Facts, Finding, Said
from shardtrain.utils.errors import PeerError
from shardtrain.utils.log import redact

Collect = Callable[[RankContext, Facts], None]


@dataclass(frozen=True)
class Area:
    """One file or two: what a rank notes, and what it means."""

    name: str
    collect: Collect
    judge: Callable[[Said], Iterable[Finding]]


AREAS = (
    Area(versions.AREA, versions.collect, versions.judge),
    Area(hosts.AREA, hosts.collect, hosts.judge),
    Area(environment.AREA, environment.collect, environment.judge),
    Area(configuration.AREA, configuration.collect, configuration.judge),
    Area(limits.AREA, limits.collect, limits.judge),
    Area(size.AREA, size.collect, size.judge),
    Area(memory.AREA, memory.collect, memory.judge),
    Area(clock.AREA, clock.collect, clock.judge),
    Area(storage.AREA, storage.collect, storage_judge.judge),
    Area(devices.AREA, devices.collect, devices.judge),
    Area(numbers.AREA, numbers.collect, numbers.judge),
    Area(network.AREA, network.collect, network_judge.judge),
)
"""In the order in which every rank collects them; those that load the machine come last."""


def examine(context: RankContext, areas: Iterable[Area] = AREAS) -> dict[str, Facts]:
    """The facts of this rank by area; a check that raises or outlasts its limit says so in the place of the rest."""
    told: dict[str, Facts] = {}
    for area in areas:
        told[area.name] = facts = _limited(context, area)
        context.line.tell(f"facts-{context.rank}-{area.name}", facts)
    context.line.tell(f"done-{context.rank}", True)
    return told


def _limited(context: RankContext, area: Area) -> Facts:
    """Collect in a thread, which is left behind where it hangs: nothing can end a write to a dead file server."""
    noted: Facts = {}

    def collect() -> None:
        try:
            area.collect(replace(context, line=line), noted)
        except PeerError as error:
            noted[ERROR], noted["is_peer"] = str(error), True
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            noted[ERROR] = redact(f"{type(error).__name__}: {text[0]}"[:300])

    line = context.line.begin(area.name)
    thread = threading.Thread(target=collect, name=f"doctor-{area.name}", daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < line.deadline:
        thread.join(timeout=min(0.2, max(0.01, line.deadline - time.monotonic())))
    told = {STOPPED: line.where, "place": line.place} if thread.is_alive() else noted
    if (STOPPED in told or ERROR in told) and not told.get("is_peer"):
        line.cancel()
    context.line.was_in_vain = line.was_in_vain
    return told


def gather(context: RankContext, own: dict[str, Facts], areas: Iterable[Area] = AREAS) -> Said:
    """What all ranks told, on the first rank; those that do not come to the end in time are missing."""
    facts, missing = {context.rank: own}, {}
    end = time.monotonic() + context.line.patience_seconds
    for rank in range(context.size):
        if rank == context.rank:
            continue
        there = context.line.hear(f"done-{rank}", max(0.0, end - time.monotonic()))
        told = {area.name: context.line.hear(f"facts-{rank}-{area.name}") for area in areas}
        facts[rank] = {name: one for name, one in told.items() if one is not None}
        if there is None:
            missing[rank] = str(context.line.hear(f"at-{rank}") or "the start")
    return Said(context.size, {rank: one for rank, one in facts.items() if one}, missing)


def judge(said: Said, areas: Iterable[Area] = AREAS) -> list[Finding]:
    """All findings, in the order of the areas."""
    found = list(_missing(said))
    for area in areas:
        told = {one.measured for one in found}  # who waits for a rank in one area does so in the next
        found += [one for one in _unfinished(said, area.name) if one.measured not in told]
        if said.of(area.name):
            found += area.judge(said)
    return found


def _missing(said: Said) -> Iterator[Finding]:
    places: dict[str, list[int]] = {}
    for rank, place in said.missing.items():
        places.setdefault(place, []).append(rank)
    for place, ranks in places.items():
        text = f"{said.who(ranks)} did not come to the end, last seen at {place}"
        fix = "look at the log of that rank, and whether its host answers"
        yield Finding("ranks", "present", "fail", text, f"{said.size} ranks", fix, tuple(ranks))


def _unfinished(said: Said, area: str) -> Iterator[Finding]:
    """Checks that outlasted their limit or raised; those that only waited for others are reported once."""
    told = {rank: facts[area] for rank, facts in sorted(said.facts.items()) if area in facts}
    yield from _hung(said, area, {rank: facts for rank, facts in told.items() if STOPPED in facts})
    waited: dict[str, list[int]] = {}
    texts: dict[str, list[int]] = {}
    for rank, facts in told.items():
        if ERROR in facts:
            (waited if facts.get("is_peer") else texts).setdefault(str(facts[ERROR]), []).append(rank)
    for text, ranks in texts.items():
        measured = f"{text} on {said.who(ranks)}"
        fix = "fix what the message names; the other findings of this area are about the other ranks"
        yield Finding(area, "check", "fail", measured, "an answer", fix, tuple(ranks))
    for text, ranks in waited.items():
        fix = "look at the rank that has not come: its own findings say more"
        yield Finding(area, "check", "fail", f"{text}; {said.who(ranks)} waited", "all ranks", fix)


def _hung(said: Said, area: str, told: dict[int, Facts]) -> Iterator[Finding]:
    """Who hangs where. What ranks do together is held up by those that are missing, else by those furthest behind."""
    if not told:
        return
    places = {rank: int(facts["place"]) for rank, facts in told.items()}
    behind = [rank for rank, place in places.items() if place == min(places.values())]
    where = str(told[behind[0]][STOPPED])
    missing = sorted(said.missing)
    if area == network.AREA and missing:
        text, fix = f"{where} hangs: {said.who(missing)} did not arrive", "look at the log and the host of that rank"
        yield Finding(area, "check", "fail", text, "an end", fix, tuple(missing))
    elif area == network.AREA and len(behind) == said.size > 1:
        text, fix = f"{where} hangs with all ranks in it", "look at firewalls, routes and NCCL_SOCKET_IFNAME"
        yield Finding(area, "check", "fail", text, "an end", fix)
    else:
        text, fix = f"{where} did not end on {said.who(behind)}", "look at what it touches: disk, driver, network"
        yield Finding(area, "check", "fail", text, "an end", fix, tuple(behind))
