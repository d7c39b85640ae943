"""Whether a run hangs, and which rank is to blame: a function of what ranks say, without threads, stores or clocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from shardtrain.resilience.watchdog.rank_heartbeat import Heartbeat

OF_COLLECTIVES = 0.9
"""Share of a collective's own limit after which a hang is declared: PyTorch's error would name the wrong rank."""
MISSED_BEATS = 3.0
SILENT_SHARE = 0.5
"""A rank is without a sign of life after this share of the limit, or after MISSED_BEATS, whichever is longer."""


@dataclass(frozen=True)
class HangReport:
    """Why the run ends: the rank to blame, what is said of it, and what every rank did."""

    rank: int
    host: str
    phase: str
    message: str
    """Continues "rank 1 (host node7) "."""
    table: tuple[str, ...] = ()
    """One line per group of ranks that do the same."""
    declared_by: int = -1
    """The rank whose verdict it is."""
    silent: tuple[int, ...] = ()
    """Ranks without a sign of life."""
    kind: str = "Hang"


def to_json(verdict: HangReport) -> str:
    """A verdict as JSON."""
    return json.dumps(asdict(verdict))


def from_json(text: str | bytes) -> HangReport:
    """The verdict in a text that a rank of this run wrote."""
    fields = json.loads(text)
    return HangReport(**{**fields, "table": tuple(fields["table"]), "silent": tuple(fields["silent"])})


@dataclass
class _Seen:
    """What a rank last said, and since when it says the same."""

    sign: Heartbeat
    beat_seconds: float
    moved_seconds: float
    waits_seconds: float = 0.0
    """Since when it waits where it waits now, if it does."""


class HangDetector:
    """Watches signs of life; times are seconds of one clock of the caller's, so no two hosts' clocks are compared."""

    def __init__(self, world_size: int, beat_seconds: float, cold_limit: float, warm_limit: float) -> None:
        """``cold_limit`` and ``warm_limit`` are those of collectives, until the first step is done and after it."""
        self._size = world_size
        self._beat = beat_seconds
        self._collective_limits = {True: OF_COLLECTIVES * cold_limit, False: OF_COLLECTIVES * warm_limit}
        self._seen: dict[int, _Seen] = {}
        self._last = self._limit = 0.0

    def observe(self, now: float, signs: Mapping[int, Heartbeat]) -> HangReport | None:
        """Note what ranks say at a moment; gives a verdict when nothing has moved for too long."""
        # a process that was stopped itself, or slept with its machine, saw nothing: the pause counts against nobody
        paused = now - self._last if self._last else 0.0
        if self._last and paused > max(MISSED_BEATS * self._beat, SILENT_SHARE * self._limit):
            for seen in self._seen.values():
                seen.beat_seconds += paused
                seen.moved_seconds += paused
                seen.waits_seconds += paused
        self._last = now
        if not self._seen:
            # a rank that never gives a sign is judged like one that has stopped giving them
            unknown = Heartbeat(0, "unknown", limit_seconds=self._beat)
            self._seen = {rank: _Seen(unknown, now, now) for rank in range(self._size)}
        for rank, sign in signs.items():
            seen = self._seen[rank]
            if sign.beat != seen.sign.beat:
                seen.beat_seconds = now
            if sign.progress != seen.sign.progress:
                seen.moved_seconds = now
            if sign.progress != seen.sign.progress or sign.waits_in != seen.sign.waits_in or not seen.waits_seconds:
                seen.waits_seconds = now
            seen.sign = sign
        # a rank that has left is not waited for; whether others still wait for it is asked below
        present = {rank: seen for rank, seen in self._seen.items() if not seen.sign.has_left}
        if not present:
            return None
        self._limit = self._limit_of([seen.sign for seen in present.values()])
        if not self._limit:
            return None
        # one rank that moves is enough: the others may be waiting for it
        since = max(seen.moved_seconds for seen in present.values())
        waiting = [seen for seen in present.values() if seen.sign.collective]
        if waiting:
            # All ranks may have compiled or loaded for long. Count from when the first of them began to wait, so that
            # the others get the usual time to arrive.
            first = min(seen.waits_seconds for seen in waiting)
            since = max(since, first)
            # Ranks that arrive one by one look like progress, but the collective of the first still times out
            working = [seen.moved_seconds for seen in present.values() if not seen.sign.collective]
            most = min(self._collective_limits[seen.sign.is_cold] for seen in waiting)
            if working and now - max(*working, first) >= most:
                return self._blame(now, present)
        return self._blame(now, present) if now - since >= self._limit else None

    def _limit_of(self, signs: list[Heartbeat]) -> float:
        """How long nothing may move; 0 where there is no limit."""
        if not all(sign.limit_seconds for sign in signs):
            return 0.0
        # one rank that compiles or loads may be slow, and where nobody waits for it there is no hang
        waiting = [sign for sign in signs if sign.collective]
        if not waiting and any(sign.is_cold for sign in signs):
            return 0.0
        # before PyTorch's own limit, whose error would name the rank that waits
        caps = [self._collective_limits[sign.is_cold] for sign in waiting]
        return min([max(sign.limit_seconds for sign in signs), *caps])

    def _blame(self, now: float, present: dict[int, _Seen]) -> HangReport:
        # first the ranks that give no sign of life, then those that have not come to the collective
        quiet = max(MISSED_BEATS * self._beat, SILENT_SHARE * self._limit)
        silent = [rank for rank, seen in present.items() if now - seen.beat_seconds > quiet]
        table = tuple(table_of({rank: seen.sign for rank, seen in present.items()}, silent))
        signs = {rank: seen.sign for rank, seen in present.items()}
        busy = [rank for rank, sign in signs.items() if not sign.collective]
        left = {rank: seen.sign for rank, seen in self._seen.items() if seen.sign.has_left and seen.sign.phase != "end"}
        # who waits in a collective has arrived: to blame are the silent ones, or else those that are still busy
        behind = silent or _furthest_behind(signs, busy)
        if left and not behind:
            sign = left[min(left)]
            message = f"has left in phase {sign.phase} of step {sign.step}, and others wait for it"
            return HangReport(min(left), sign.host, sign.phase, message, table)
        if behind:
            first = min(behind)
            sign = signs[first]
            age = now - present[first].moved_seconds
            life = " and gives no sign of life" if silent else ""
            where = f" at {sign.at}" if sign.at and not silent else ""
            rest = [rank for rank in behind if rank != first]
            others = f"; nor have ranks {spans(rest)}" if rest else ""
            message = (
                f"has not arrived{life}: last seen in phase {sign.phase} of step {sign.step}{where}, {age:.0f} s ago"
            )
            return HangReport(first, sign.host, sign.phase, message + others, table, silent=tuple(sorted(silent)))
        return _all_wait(signs, table)


def _furthest_behind(signs: Mapping[int, Heartbeat], ranks: Iterable[int]) -> list[int]:
    """Of some ranks those that have entered the fewest phases."""
    ranks = sorted(ranks)
    fewest = min((signs[rank].entered for rank in ranks), default=0)
    return [rank for rank in ranks if signs[rank].entered == fewest]


def _all_wait(signs: Mapping[int, Heartbeat], table: tuple[str, ...]) -> HangReport:
    """Each rank is in a collective: in different ones, or there is nobody to blame."""
    groups: dict[str, list[int]] = {}
    for rank, sign in sorted(signs.items()):
        groups.setdefault(sign.waits_in, []).append(rank)
    # the odd ones: of equally many, those that have come less far, and then the higher ranks
    odd = min(groups.values(), key=lambda ranks: (len(ranks), signs[ranks[0]].entered, -ranks[0]))
    sign = signs[odd[0]]
    # all in the same place: nobody is missing, so it is the network that does not deliver
    if len(groups) == 1:
        message = f"waits, as all ranks do, in {sign.waits_in} of step {sign.step}: none is behind; look at the network"
    else:
        places = ", ".join(f"{_name(ranks)} in {place}" for place, ranks in groups.items())
        message = f"waits in another collective than others in phase {sign.phase} of step {sign.step}: {places}"
    return HangReport(odd[0], sign.host, sign.phase, message, table)


def table_of(signs: Mapping[int, Heartbeat], silent: Iterable[int]) -> list[str]:
    """What every rank does, one line for all that do the same."""
    groups: dict[str, list[int]] = {}
    for rank, sign in sorted(signs.items()):
        place = f"waits in {sign.waits_in}" if sign.collective else f"at {sign.at}" if sign.at else "busy"
        life = ", no sign of life" if rank in silent else ""
        groups.setdefault(f"phase {sign.phase} of step {sign.step}, {place}{life}", []).append(rank)
    return [f"{_name(ranks)}: {text}" for text, ranks in groups.items()]


def _name(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(numbers: Iterable[int]) -> str:
    """Numbers in short.

    >>> spans([7, 0, 1, 2, 5])
    '0-2,5,7'
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)
