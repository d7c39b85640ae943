"""Adding up: each second of a run's life falls into one bin, over attempts, restarts and other numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardtrain.launch.goodput.events import AttemptProgress, Death, Event, Start
from shardtrain.utils.units import format_seconds

BINS = ("productive", "checkpoint", "data", "validation", "compile", "start", "restart", "lost")
MEANINGS = {
    "productive": "forward, backward and update of the steps that count",
    "checkpoint": "waiting for saves",
    "data": "waiting for the data of the steps that count",
    "validation": "validation passes",
    "compile": "the first step of each attempt, beyond a usual one",
    "start": "imports, building, loading; and the way out after the last step",
    "restart": "from a failure to the start of the next attempt, within one command",
    "lost": "steps after the checkpoint that a later attempt continued from, done again",
    "idle": "between two commands: no part of the ratio",
}


@dataclass
class Attempt:
    """One start of the ranks, and what it is known to have done."""

    start: Start
    points: list[AttemptProgress] = field(default_factory=list)
    """In their order; the last one tells how far it came."""
    died: float | None = None
    """When the launcher saw a rank fail, in seconds since the epoch."""

    @property
    def last_known(self) -> float:
        """The end of what its own lines tell, in seconds since the epoch."""
        return self.start.started + (sum(self.points[-1].seconds.values()) if self.points else 0.0)

    @property
    def saved_step(self) -> int:
        """What another attempt would continue from."""
        return self.points[-1].saved_step if self.points else self.start.step

    @property
    def ended(self) -> float:
        """When it ended, as far as somebody wrote it down."""
        said_so = bool(self.points) and self.points[-1].ended
        return self.last_known if said_so else max(self.last_known, self.died or 0.0)


@dataclass(frozen=True)
class Account:
    """Seconds by bin, and what they are compared with; ``idle_seconds`` is part of the wall time alone."""

    seconds: dict[str, float]
    idle_seconds: float = 0.0
    attempts: int = 0
    failures: int = 0
    """Attempts after which the same command made another one, and a last one that died."""
    saves: int = 0
    after_failure_seconds: float = 0.0
    """Start and compilation of the attempts that a failure made necessary; in ``start`` and ``compile`` too."""

    @property
    def running_seconds(self) -> float:
        """Wall time while some command was there."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Productive time divided by running time, 0..1: the only definition, for all commands and files."""
        return self.seconds["productive"] / self.running_seconds if self.running_seconds else 0.0

    def __str__(self) -> str:
        """``goodput 93.0 % of 12m55s: productive 12m1s, start 54.0s``: the same words in every command."""
        parts = ", ".join(f"{name} {format_seconds(value)}" for name, value in self.seconds.items() if value >= 0.5)
        return f"goodput {100 * self.goodput:.1f} % of {format_seconds(self.running_seconds)}: {parts}"

    def as_record(self) -> dict[str, float]:
        """The fields of a line of ``metrics.jsonl``."""
        return {"goodput": self.goodput, **{f"goodput_{name}_seconds": value for name, value in self.seconds.items()}}

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Account:
        """The account until a line of ``metrics.jsonl``; a field without a number of seconds counts as 0."""
        seconds = dict.fromkeys(BINS, 0.0)
        for name in BINS:
            value = record.get(f"goodput_{name}_seconds")
            if isinstance(value, int | float) and 0 < value < math.inf:
                seconds[name] = float(value)
        return cls(seconds)

    @property
    def recovery_seconds(self) -> float:
        """All that failures cost beside lost steps."""
        return self.seconds["restart"] + self.after_failure_seconds

    @property
    def ettr(self) -> float:
        """Effective training time ratio: running time without saves, lost steps and recovery, 0..1."""
        if not self.running_seconds:
            return 0.0
        gone = self.seconds["checkpoint"] + self.seconds["lost"] + self.recovery_seconds
        return 1 - gone / self.running_seconds

    def predicted_ettr(self) -> float | None:
        """What Young and Daly's model gives for the stall, interval, recovery and failures measured here.

        ETTR = (1 - (R + T/2) / MTTF) / (1 + stall / T), arXiv 2410.18124; None without a save.
        """
        if not self.saves:
            return None
        work = self.running_seconds - self.seconds["checkpoint"] - self.seconds["lost"] - self.recovery_seconds
        interval = work / self.saves
        stall = self.seconds["checkpoint"] / self.saves
        failed = 0.0
        if self.failures:
            failed = (self.recovery_seconds / self.failures + interval / 2) / (self.running_seconds / self.failures)
        return max(0.0, 1 - failed) / (1 + stall / interval) if interval > 0 else None


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    """Attempts in the order of their starts; lines of one that never started are left out."""
    found: dict[str, Attempt] = {}
    newest: Attempt | None = None
    for event in events:
        if isinstance(event, Start):
            newest = found.setdefault(event.attempt, Attempt(event))
        elif isinstance(event, AttemptProgress) and event.attempt in found:
            found[event.attempt].points.append(event)
        elif isinstance(event, Death) and newest and newest.died is None and newest.start.job == event.job:
            newest.died = event.time
    return list(found.values())


def account(attempts: Sequence[Attempt]) -> Account:
    """The account of a run's whole life until its last line."""
    total = dict.fromkeys(BINS, 0.0)
    idle = 0.0
    failures = 0
    after = 0.0
    kept_step: float = float("inf")
    # from the last to the first: what an attempt has done counts up to where a later one continued
    for attempt in reversed(attempts):
        if attempt is attempts[-1] and attempt.died is not None:
            kept_step = attempt.saved_step  # it has no successor yet, and what was not saved is as good as lost
        for name, seconds in bins(attempt, kept_step).items():
            total[name] += seconds
        total["lost"] += max(0.0, attempt.ended - attempt.last_known)  # it died before it could write the next line
        kept_step = min(kept_step, attempt.start.step)

    # from the first to the last: the time between attempts
    for number, attempt in enumerate(attempts):
        begun = attempt.start.job_started
        is_restart = attempt.start.restarts > 0
        if number:
            before = attempts[number - 1]
            # two commands may have the same torchrun id, as pods that are started again: the second one began later
            if before.start.job == attempt.start.job and (is_restart or begun <= before.ended):
                is_restart = True
                begun = before.ended
            else:
                idle += max(0.0, begun - before.ended)
        total["restart" if is_restart else "start"] += max(0.0, attempt.start.started - begun)
        if is_restart:
            failures += 1
            spent = bins(attempt, float("inf"))
            after += spent["start"] + spent["compile"]
    failures += bool(attempts and attempts[-1].died is not None)
    saves = sum(attempt.points[-1].saves for attempt in attempts if attempt.points)
    return Account(total, idle, len(attempts), failures, saves, after)


def bins(attempt: Attempt, kept_step: float) -> dict[str, float]:
    """Seconds of one attempt by bin; what it trained after ``kept_step`` is lost."""
    if not attempt.points:
        return dict.fromkeys(BINS, 0.0)
    last = attempt.points[-1]
    first_step = attempt.start.step
    spent = {name: last.seconds.get(name, 0.0) for name in ("start", "end", "compile", "step", "data")}
    steps = last.step - first_step
    # the first step is also a step: of its time, what a usual one takes is not a compilation
    usual = min(spent["compile"], spent["step"] / (steps - 1)) if steps > 1 else 0.0
    # steps after kept_step were made again by a later attempt
    kept = _at(attempt, kept_step)
    keeps_first = kept_step > first_step
    return {
        "productive": kept["step"] + usual * keeps_first,
        "checkpoint": last.seconds.get("checkpoint", 0.0),
        "data": kept["data"],
        "validation": last.seconds.get("validation", 0.0),
        "compile": spent["compile"] - usual,
        "start": spent["start"] + spent["end"],
        "restart": 0.0,
        "lost": spent["step"] - kept["step"] + spent["data"] - kept["data"] + usual * (not keeps_first),
    }


def _at(attempt: Attempt, step: float) -> dict[str, float]:
    """Seconds of steps and data when an attempt had done ``step``; between two lines in a straight line."""
    names = ("step", "data")
    if step >= attempt.points[-1].step:
        return {name: attempt.points[-1].seconds.get(name, 0.0) for name in names}
    before_step = attempt.start.step
    before = dict.fromkeys(names, 0.0)
    for point in attempt.points:
        now = {name: point.seconds.get(name, 0.0) for name in names}
        if point.step > step:
            if step <= before_step:  # it began behind that step, and may have ended where it began
                return before
            share = (step - before_step) / (point.step - before_step)
            return {name: before[name] + share * (now[name] - before[name]) for name in names}
        before_step = point.step
        before = now
    return before
