"""Decide from heartbeats whether a run hangs, and which rank to blame. Uses no threads, stores or clocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from shardtrain.resilience.watchdog.rank_heartbeat import Heartbeat

OF_COLLECTIVES = 0.9
"""Fraction of a collective's timeout after which a hang is declared.

It is less than 1, because PyTorch's error after the timeout would name the wrong rank.
"""
MISSED_BEATS = 3.0
SILENT_SHARE = 0.5
"""A rank is silent after this fraction of the limit, or after MISSED_BEATS intervals, whichever is longer."""
MOST_LINES = 32
"""Maximum number of groups of ranks in a verdict, which every node receives."""
MOST_RANGES = 32
"""Maximum number of ranges in a list of ranks."""


@dataclass(frozen=True)
class HangReport:
    """Verdict that ends a run: the rank to blame, the reason, and the activity of every rank."""

    rank: int
    host: str
    phase: str
    message: str
    """Text that continues "rank 1 (host node7) "."""
    table: tuple[str, ...] = ()
    """One line per group of ranks with the same activity."""
    declared_by: int = -1
    """Rank that declared the verdict."""
    num_silent: int = 0
    """Number of ranks whose heartbeat stopped."""
    kind: str = "Hang"


def to_json(verdict: HangReport) -> str:
    """Serialize a verdict as JSON."""
    return json.dumps(asdict(verdict))


def from_json(text: str | bytes) -> HangReport:
    """Parse a verdict that a rank of this run wrote."""
    fields = json.loads(text)
    return HangReport(**{**fields, "table": tuple(fields["table"])})


@dataclass
class _Seen:
    """Last heartbeat of a rank, and the times of its last changes."""

    sign: Heartbeat
    beat_seconds: float
    """Time of the last new heartbeat."""
    moved_seconds: float
    """Time of the last progress."""
    waits_seconds: float = 0.0
    """Time since which the rank has waited in the current collective, or 0."""


class HangDetector:
    """Decides from the heartbeats of all ranks if the run hangs.

    All times are seconds of the caller's clock. Clocks of different hosts are never compared.
    """

    def __init__(
        self, world_size: int, beat_seconds: float, cold_limit: float, warm_limit: float
    ) -> None:
        """``cold_limit`` and ``warm_limit`` are timeouts of collectives before and after the first step, in seconds."""
        self._size = world_size
        self._beat = beat_seconds
        self._collective_limits = {
            True: OF_COLLECTIVES * cold_limit,
            False: OF_COLLECTIVES * warm_limit,
        }
        self._seen: dict[int, _Seen] = {}
        self._last = 0.0
        self._limit = 0.0

    def observe(self, now: float, signs: Mapping[int, Heartbeat]) -> HangReport | None:
        """Record the heartbeats at the time ``now``. Return a verdict if no rank has made progress for too long.

        Args:
            now: the time in seconds.
            signs: rank -> its last heartbeat.
        """
        self._record(now, signs)
        # A rank that has left is not expected to arrive. ``_blame`` checks if others wait for it.
        present = {rank: seen for rank, seen in self._seen.items() if not seen.sign.has_left}
        if not present:
            return None
        self._limit = self._limit_of([seen.sign for seen in present.values()])
        if not self._limit:
            return None
        if self._is_over_time(now, list(present.values())):
            return self._blame(now, present)
        return None

    def _record(self, now: float, signs: Mapping[int, Heartbeat]) -> None:
        """Update ``_seen`` with the heartbeats at the time ``now``."""
        # If this process was suspended, or slept with its machine, the pause must not count against any rank.
        paused = now - self._last if self._last else 0.0
        longest_pause = max(MISSED_BEATS * self._beat, SILENT_SHARE * self._limit)
        if paused > longest_pause:
            for seen in self._seen.values():
                seen.beat_seconds += paused
                seen.moved_seconds += paused
                seen.waits_seconds += paused
        self._last = now
        if not self._seen:
            # Judge a rank that never sends a heartbeat like a rank that has stopped.
            unknown = Heartbeat(0, "unknown", limit_seconds=self._beat)
            self._seen = {rank: _Seen(unknown, now, now) for rank in range(self._size)}
        for rank, sign in signs.items():
            seen = self._seen[rank]
            if sign.beat != seen.sign.beat:
                seen.beat_seconds = now
            has_moved = sign.progress != seen.sign.progress
            if has_moved:
                seen.moved_seconds = now
            waits_elsewhere = sign.waits_in != seen.sign.waits_in
            if has_moved or waits_elsewhere or not seen.waits_seconds:
                seen.waits_seconds = now
            seen.sign = sign

    def _is_over_time(self, now: float, present: list[_Seen]) -> bool:
        """True if the ranks have made no progress for longer than the limit."""
        # Progress of one rank is sufficient, because the others may be waiting for it.
        since = max(seen.moved_seconds for seen in present)
        waiting = [seen for seen in present if seen.sign.collective]
        if not waiting:
            return now - since >= self._limit

        # Ranks that arrive one after the other look like progress, but the collective of the
        # first rank times out.
        first_wait = min(seen.waits_seconds for seen in waiting)
        working = [seen.moved_seconds for seen in present if not seen.sign.collective]
        if working:
            timeout = min(self._collective_limits[seen.sign.is_cold] for seen in waiting)
            last_progress = max(*working, first_wait)
            if now - last_progress >= timeout:
                return True
        # All ranks may have compiled or loaded for a long time. Count from the time at which the first
        # rank began to wait, so the others get the usual time to arrive.
        since = max(since, first_wait)
        return now - since >= self._limit

    def _limit_of(self, signs: list[Heartbeat]) -> float:
        """Return the maximum time without progress in seconds, or 0 for no limit."""
        if not all(sign.limit_seconds for sign in signs):
            return 0.0
        # A rank may be slow while it compiles or loads. If no rank waits for it, this is not a hang.
        waiting = [sign for sign in signs if sign.collective]
        if not waiting and any(sign.is_cold for sign in signs):
            return 0.0
        limit = max(sign.limit_seconds for sign in signs)
        # Stay below PyTorch's timeout, whose error would name the waiting rank.
        for sign in waiting:
            limit = min(limit, self._collective_limits[sign.is_cold])
        return limit

    def _blame(self, now: float, present: dict[int, _Seen]) -> HangReport:
        """Return the verdict on a run without progress."""
        quiet_seconds = max(MISSED_BEATS * self._beat, SILENT_SHARE * self._limit)
        signs: dict[int, Heartbeat] = {}
        silent = []
        busy = []
        for rank, seen in present.items():
            signs[rank] = seen.sign
            if now - seen.beat_seconds > quiet_seconds:
                silent.append(rank)
            if not seen.sign.collective:
                busy.append(rank)
        table = tuple(table_of(signs, silent))

        # Ranks that wait in a collective have arrived. Blame the silent ranks, or else the ranks that are still busy.
        behind = silent or _furthest_behind(signs, busy)
        if not behind:
            return self._blame_left(table) or _all_wait(signs, table)
        blamed = min(behind)
        sign = signs[blamed]
        state = "has not arrived"
        place = f"phase {sign.phase} of step {sign.step}"
        if silent:
            state += " and sends no heartbeat"
        elif sign.at:
            place += f" at {sign.at}"
        age = now - present[blamed].moved_seconds
        message = f"{state}: last seen in {place}, {age:.0f} s ago"
        others = [rank for rank in behind if rank != blamed]
        if others:
            message += f"; nor have ranks {spans(others)}"
        return HangReport(blamed, sign.host, sign.phase, message, table, num_silent=len(silent))

    def _blame_left(self, table: tuple[str, ...]) -> HangReport | None:
        """Return the verdict on the lowest rank that has left before the end, or None if there is none."""
        for rank in sorted(self._seen):
            sign = self._seen[rank].sign
            if sign.has_left and sign.phase != "end":
                message = f"has left in phase {sign.phase} of step {sign.step}, but other ranks wait for it"
                return HangReport(rank, sign.host, sign.phase, message, table)
        return None


def _furthest_behind(signs: Mapping[int, Heartbeat], ranks: Iterable[int]) -> list[int]:
    """Return the ranks that have entered the smallest number of phases."""
    ranks = sorted(ranks)
    fewest = min((signs[rank].entered for rank in ranks), default=0)
    return [rank for rank in ranks if signs[rank].entered == fewest]


def _all_wait(signs: Mapping[int, Heartbeat], table: tuple[str, ...]) -> HangReport:
    """Return the verdict if every rank waits in a collective, either in different ones or all in the same."""
    groups: dict[str, list[int]] = {}
    for rank, sign in sorted(signs.items()):
        groups.setdefault(sign.waits_in, []).append(rank)
    # Blame the smallest group. Of groups with equal size, blame the one with less progress, then
    # the one with higher ranks.

    def order_of_blame(ranks: list[int]) -> tuple[int, int, int]:
        lowest = ranks[0]
        return len(ranks), signs[lowest].entered, -lowest

    blamed = min(groups.values(), key=order_of_blame)[0]
    sign = signs[blamed]
    # If all ranks wait in the same place, no rank is missing, so blame the network.
    if len(groups) == 1:
        message = f"waits, like all ranks, in {sign.waits_in} of step {sign.step}: no rank is behind; check the network"
        return HangReport(blamed, sign.host, sign.phase, message, table)

    smallest_first = sorted(groups, key=lambda place: len(groups[place]))
    shown = smallest_first[:MOST_LINES]
    places = []
    for place, ranks in groups.items():
        if place in shown:
            places.append(f"{_name(ranks)} in {place}")
    message = (
        f"waits in a different collective in phase {sign.phase} of step {sign.step}: "
        f"{', '.join(places)}"
    )
    return HangReport(blamed, sign.host, sign.phase, message, table)


def table_of(signs: Mapping[int, Heartbeat], silent: Iterable[int]) -> list[str]:
    """Describe the activity of every rank. Ranks with the same activity share a line."""
    groups: dict[str, list[int]] = {}
    for rank, sign in sorted(signs.items()):
        place = "busy"
        if sign.collective:
            place = f"waits in {sign.waits_in}"
        elif sign.at:
            place = f"at {sign.at}"
        activity = f"phase {sign.phase} of step {sign.step}, {place}"
        if rank in silent:
            activity += ", no heartbeat"
        groups.setdefault(activity, []).append(rank)

    # Every node receives the table, so limit it. The smallest groups are the most unusual ones.
    smallest_first = sorted(groups, key=lambda activity: len(groups[activity]))
    others: list[int] = []
    for activity in smallest_first[MOST_LINES:]:
        others += groups.pop(activity)
    lines = [f"{_name(ranks)}: {activity}" for activity, ranks in groups.items()]
    if others:
        lines.append(f"{_name(others)}: other activities")
    return lines


def _name(ranks: list[int]) -> str:
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {spans(ranks)}"


def spans(numbers: Iterable[int]) -> str:
    """Format numbers as at most ``MOST_RANGES`` ranges.

    >>> spans([7, 0, 1, 2, 5])
    '0-2,5,7'
    >>> spans(range(0, 2000, 2))[-15:]
    '62 and 968 more'
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = []
    for low, high in ranges[:MOST_RANGES]:
        texts.append(str(low) if low == high else f"{low}-{high}")
    text = ",".join(texts)
    num_others = 0
    for low, high in ranges[MOST_RANGES:]:
        num_others += high - low + 1
    if num_others:
        text += f" and {num_others} more"
    return text
