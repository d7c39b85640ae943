"""Compare the reports (``Mark``) of all ranks on a step, to find ranks that diverged or are slower than their peers."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardtrain.resilience.watchdog.hang_detector import HangReport, spans
from shardtrain.resilience.watchdog.rank_heartbeat import Heartbeat
from shardtrain.utils.activity import Mark

RATIO = 1.3
"""A straggler works for more than this many times the median of its peers."""
SHARE_OF_STEP = 0.1
"""The time that a straggler works longer than the median of its peers exceeds this fraction of a step."""
WINDOWS = 5
"""Number of consecutive windows in which both are true of a straggler."""
MIN_SAMPLES = 20
"""A window with fewer samples is merged with the next one."""


def common(signs: Mapping[int, Heartbeat], world_size: int, after: int) -> dict[int, Mark] | None:
    """Return the newest marks that all ranks made at the same step after ``after``, or None if there are none."""
    if len(signs) < world_size:
        return None
    newest: dict[int, Mark] | None = None
    newest_step = after
    first_sign = next(iter(signs.values()))
    for grain in first_sign.marks:
        marks = {}
        for rank, sign in signs.items():
            if grain in sign.marks:
                marks[rank] = sign.marks[grain]
        if len(marks) < world_size:
            continue
        # Only marks of the same step are comparable. A rank whose heartbeat was read later may be a step ahead.
        steps = {mark.begun for mark in marks.values()}
        if len(steps) > 1:
            continue
        (step,) = steps
        if step > newest_step:
            newest = marks
            newest_step = step
    return newest


def find_odd(marks: Mapping[int, Mark], signs: Mapping[int, Heartbeat]) -> HangReport | None:
    """Return a report if counters differ between ranks, because results can then no longer be correct."""
    groups: dict[str, list[int]] = {}
    for rank, mark in sorted(marks.items()):
        groups.setdefault(mark.facts, []).append(rank)
    if len(groups) == 1:
        return None
    # Blame the smallest group. On a tie, blame the one that begins with the higher rank.
    odd = min(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    descriptions = []
    for facts, ranks in groups.items():
        label = "ranks" if len(ranks) > 1 else "rank"
        descriptions.append(f"{label} {spans(ranks)}: {facts}")
    counters = "; ".join(descriptions)
    blamed = odd[0]
    common_steps = marks[blamed].begun
    message = (
        f"has counters that differ from those of the other ranks after {common_steps} common steps: "
        f"{counters}"
    )
    sign = signs[blamed]
    return HangReport(blamed, sign.host, sign.phase, message, kind="Divergence")


@dataclass(frozen=True)
class Straggler:
    """Slow rank, with its seconds of work per step and the median of its peers."""

    rank: int
    host: str
    seconds: float
    usual_seconds: float
    phase: str

    def __str__(self) -> str:
        """Return the log message."""
        return (
            f"rank {self.rank} on {self.host} is slow: {self.seconds:.3g} s of work per step, but its peers need "
            f"{self.usual_seconds:.3g} s, in {WINDOWS} consecutive windows; mostly in phase {self.phase}"
        )


class Stragglers:
    """Compare the working time of ranks in consecutive windows. Ranks of one pipeline stage are peers."""

    def __init__(self, world_size: int, num_stages: int = 1) -> None:
        self._per_stage = max(1, world_size // num_stages)
        self._before: Mapping[int, Mark] = {}
        self._strikes: dict[int, int] = {}

    def add(
        self, marks: Mapping[int, Mark], signs: Mapping[int, Heartbeat]
    ) -> list[Straggler] | None:
        """Return the ranks that were slow in five consecutive windows, or None if the window has too few samples."""
        if not self._before:
            self._before = marks
            return None
        windows = {}
        for rank, mark in marks.items():
            windows[rank] = _Window(self._before[rank], mark)
        # With few samples, differences are random. Keep the start of the window, so it grows until the next call.
        fewest_samples = min(window.samples for window in windows.values())
        if fewest_samples < MIN_SAMPLES:
            return None
        self._before = marks
        strikes: dict[int, int] = {}
        stragglers = []
        for straggler in self._slow(windows, signs):
            rank = straggler.rank
            strikes[rank] = self._strikes.get(rank, 0) + 1
            if strikes[rank] >= WINDOWS:
                stragglers.append(straggler)
        # A rank that is fast in one window has no entry, so it starts again at zero.
        self._strikes = strikes
        return stragglers

    def _slow(
        self, windows: Mapping[int, _Window], signs: Mapping[int, Heartbeat]
    ) -> Iterator[Straggler]:
        """Yield the ranks that were slower than their peers in this window."""
        stages: dict[int, list[float]] = {}
        for rank, window in windows.items():
            stage = rank // self._per_stage
            stages.setdefault(stage, []).append(window.work)
        for works in stages.values():
            works.sort()  # once, so that the median of a rank's peers needs only a binary search
        for rank, window in windows.items():
            works = stages[rank // self._per_stage]
            if len(works) == 1:
                continue  # no peer does the same work
            usual = median_without(works, window.work)
            is_slower = window.work > RATIO * usual
            matters_in_step = window.work - usual > SHARE_OF_STEP * window.step_seconds
            if is_slower and matters_in_step:
                yield Straggler(rank, signs[rank].host, window.work, usual, window.phase)


def median_without(ordered: Sequence[float], one: float) -> float:
    """Return the median of ascending numbers without ``one`` of them, in logarithmic time.

    >>> median_without([1.0, 2.0, 4.0, 9.0], 9.0), median_without([1.0, 2.0, 4.0], 1.0)
    (2.0, 3.0)
    """
    gap = bisect.bisect_left(ordered, one)
    count = len(ordered) - 1
    # Take the two middle elements, which are the same for an odd count. Indices after the gap are shifted by one.
    low = (count - 1) // 2
    high = count // 2
    if low >= gap:
        low += 1
    if high >= gap:
        high += 1
    return (ordered[low] + ordered[high]) / 2


class _Window:
    """The steps between two marks of a rank."""

    def __init__(self, before: Mark, after: Mark) -> None:
        steps = after.begun - before.begun
        seconds = after.seconds - before.seconds
        self.step_seconds = seconds / steps
        self.samples = after.samples - before.samples
        data_samples = after.busy_data - before.busy_data
        step_samples = after.busy_step - before.busy_step
        busy_samples = data_samples + step_samples
        self.work = self.step_seconds * busy_samples / max(1, self.samples)
        self.phase = "data" if data_samples > step_samples else "step"
