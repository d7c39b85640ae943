"""Account for the time of a run: assign each second to one category, over all attempts and numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardtrain.launch.goodput.events import AttemptProgress, Death, Event, Start
from shardtrain.utils.units import format_seconds

BINS = ("productive", "checkpoint", "data", "validation", "compile", "start", "restart", "lost")
MEANINGS = {
    "productive": "forward, backward and update of steps that were not repeated",
    "checkpoint": "waiting for saves",
    "data": "waiting for the data of steps that were not repeated",
    "validation": "validation passes",
    "compile": "first step of each attempt, minus a normal step",
    "start": "imports, building and loading, and the exit after the last step",
    "restart": "from a failure to the start of the next attempt, within one command",
    "lost": "steps after the last checkpoint, which a later attempt had to repeat",
    "idle": "between two commands; not part of the running time",
}


@dataclass
class Attempt:
    """One start of the ranks and its progress.

    Attributes:
        points: Progress records in order.
        died: Time at which the launcher saw a rank fail, in seconds since the epoch.
    """

    start: Start
    points: list[AttemptProgress] = field(default_factory=list)
    died: float | None = None

    @property
    def last_known(self) -> float:
        """Time of its last progress record, in seconds since the epoch."""
        return self.start.started + (sum(self.points[-1].seconds.values()) if self.points else 0.0)

    @property
    def saved_step(self) -> int:
        """Step of the checkpoint from which a later attempt would resume."""
        if self.points:
            return self.points[-1].saved_step
        return self.start.step

    @property
    def ended(self) -> float:
        """Recorded end of the attempt, in seconds since the epoch."""
        has_recorded_end = bool(self.points) and self.points[-1].ended
        if has_recorded_end:
            return self.last_known
        return max(self.last_known, self.died or 0.0)


@dataclass(frozen=True)
class Account:
    """Seconds per category, and figures derived from them.

    Attributes:
        idle_seconds: Time between two commands. It is not part of the running time.
        failures: Number of attempts that the same command restarted, plus 1 if the last attempt failed.
        after_failure_seconds: Start and compilation of restarted attempts. Also included in ``start`` and
            ``compile``.
    """

    seconds: dict[str, float]
    idle_seconds: float = 0.0
    attempts: int = 0
    failures: int = 0
    saves: int = 0
    after_failure_seconds: float = 0.0

    @property
    def running_seconds(self) -> float:
        """Wall time during which a command was running."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Productive time divided by running time, 0..1."""
        if self.running_seconds:
            return self.seconds["productive"] / self.running_seconds
        return 0.0

    def __str__(self) -> str:
        """Format as ``goodput 93.0 % of 12m55s: productive 12m1s, start 54.0s``."""
        parts = ", ".join(
            f"{name} {format_seconds(value)}"
            for name, value in self.seconds.items()
            if value >= 0.5
        )
        return (
            f"goodput {100 * self.goodput:.1f} % of {format_seconds(self.running_seconds)}: {parts}"
        )

    def as_record(self) -> dict[str, float]:
        """Return the fields for a record of ``metrics.jsonl``."""
        return {
            "goodput": self.goodput,
            **{f"goodput_{name}_seconds": value for name, value in self.seconds.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Account:
        """Return the account in a record of ``metrics.jsonl``. A missing or invalid field counts as 0."""
        seconds = dict.fromkeys(BINS, 0.0)
        for name in BINS:
            value = record.get(f"goodput_{name}_seconds")
            if isinstance(value, int | float) and 0 < value < math.inf:
                seconds[name] = float(value)
        return cls(seconds)

    @property
    def recovery_seconds(self) -> float:
        """Cost of failures, without lost steps."""
        return self.seconds["restart"] + self.after_failure_seconds

    @property
    def ettr(self) -> float:
        """Effective training time ratio: running time without saves, lost steps and recovery, 0..1."""
        if not self.running_seconds:
            return 0.0
        overhead = self.seconds["checkpoint"] + self.seconds["lost"] + self.recovery_seconds
        return 1 - overhead / self.running_seconds

    def predicted_ettr(self) -> float | None:
        """Return the ETTR that Young and Daly's model predicts from the measured stall, interval,
        recovery and failures.

        ETTR = (1 - (R + T/2) / MTTF) / (1 + stall / T), arXiv 2410.18124. None without a save.
        """
        if not self.saves:
            return None
        work = (
            self.running_seconds
            - self.seconds["checkpoint"]
            - self.seconds["lost"]
            - self.recovery_seconds
        )
        interval = work / self.saves
        stall = self.seconds["checkpoint"] / self.saves
        failed = 0.0
        if self.failures:
            failed = (self.recovery_seconds / self.failures + interval / 2) / (
                self.running_seconds / self.failures
            )
        if interval > 0:
            return max(0.0, 1 - failed) / (1 + stall / interval)
        return None


def attempts_of(events: Iterable[Event]) -> list[Attempt]:
    """Return the attempts in the order of their starts. Skip records of attempts without a start."""
    attempts_by_name: dict[str, Attempt] = {}
    newest: Attempt | None = None
    for event in events:
        if isinstance(event, Start):
            newest = attempts_by_name.setdefault(event.attempt, Attempt(event))
        elif isinstance(event, AttemptProgress) and event.attempt in attempts_by_name:
            attempts_by_name[event.attempt].points.append(event)
        elif isinstance(event, Death) and newest:
            # Only the first failure ends an attempt.
            is_first = newest.died is None
            if is_first and newest.start.job == event.job:
                newest.died = event.time
    return list(attempts_by_name.values())


def account(attempts: Sequence[Attempt]) -> Account:
    """Return the account of a run over all its attempts."""
    total = dict.fromkeys(BINS, 0.0)
    idle = 0.0
    failures = 0
    after = 0.0
    kept_step: float = float("inf")
    # Iterate backwards: the steps of an attempt count up to the step from which a later attempt resumed.
    for attempt in reversed(attempts):
        if attempt is attempts[-1] and attempt.died is not None:
            kept_step = attempt.saved_step  # the next attempt will repeat the steps after it
        for name, seconds in bins(attempt, kept_step).items():
            total[name] += seconds
        # it failed before the next record
        total["lost"] += max(0.0, attempt.ended - attempt.last_known)
        kept_step = min(kept_step, attempt.start.step)

    # Iterate forwards: add the time between attempts.
    for number, attempt in enumerate(attempts):
        begun = attempt.start.job_started
        is_restart = attempt.start.restarts > 0
        if number:
            before = attempts[number - 1]
            # Two commands may have the same torchrun ID, such as restarted pods. The second command then
            # started later.
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
    # The last attempt may have failed without a restart.
    failures += bool(attempts and attempts[-1].died is not None)
    saves = sum(attempt.points[-1].saves for attempt in attempts if attempt.points)
    return Account(total, idle, len(attempts), failures, saves, after)


def bins(attempt: Attempt, kept_step: float) -> dict[str, float]:
    """Return the seconds of one attempt per category. Its steps after ``kept_step`` are lost."""
    if not attempt.points:
        return dict.fromkeys(BINS, 0.0)
    last = attempt.points[-1]
    first_step = attempt.start.step
    spent = dict.fromkeys(("start", "end", "compile", "step", "data"), 0.0) | last.seconds
    steps = last.step - first_step
    # The first step includes the compilation. Subtract the time of a normal step.
    usual = 0.0
    if steps > 1:
        usual = min(spent["compile"], spent["step"] / (steps - 1))
    # A later attempt repeated the steps after kept_step.
    kept = _at(attempt, kept_step)
    lost = spent["step"] - kept["step"] + spent["data"] - kept["data"]
    productive = kept["step"]
    # Without compilation, the first step would take the usual time. Count this time as part of the step.
    if kept_step > first_step:
        productive += usual
    else:
        lost += usual
    return {
        "productive": productive,
        "checkpoint": last.seconds.get("checkpoint", 0.0),
        "data": kept["data"],
        "validation": last.seconds.get("validation", 0.0),
        "compile": spent["compile"] - usual,
        "start": spent["start"] + spent["end"],
        "restart": 0.0,
        "lost": lost,
    }


def _at(attempt: Attempt, step: float) -> dict[str, float]:
    """Return the seconds in "step" and "data" until ``step``, interpolated linearly between records."""
    names = ("step", "data")
    if step >= attempt.points[-1].step:
        return {name: attempt.points[-1].seconds.get(name, 0.0) for name in names}
    before_step = attempt.start.step
    before = dict.fromkeys(names, 0.0)
    for point in attempt.points:
        now = {name: point.seconds.get(name, 0.0) for name in names}
        if point.step > step:
            if step <= before_step:  # the attempt started after this step
                return before
            share = (step - before_step) / (point.step - before_step)
            return {name: before[name] + share * (now[name] - before[name]) for name in names}
        before_step = point.step
        before = now
    return before
