"""One frame of the live view as lines of text: a pure function of the runs and the terminal's size."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.metrics.step_record import TOTAL_SPEED
from shardtrain.tools.runs.report.chart import format_number
from shardtrain.tools.runs.watch.following import FollowedRun
from shardtrain.utils.redact import redact, visible
from shardtrain.utils.sparkline import ASCII_BARS, BARS, sparkline
from shardtrain.utils.units import format_seconds

BINS = {
    "productive": "P", "data": "D", "checkpoint": "C", "validation": "V",
    "compile": "K", "start": "S", "restart": "R", "lost": "L",
}  # fmt: skip
"""Goodput bins, with the letter of each bin in the bar."""
TITLES = {
    "loss": "loss",
    "grad_norm": "grad norm",
    "tokens_per_second": TOTAL_SPEED,
    "memory_gib": "memory GiB",
}
_TITLE = len(TOTAL_SPEED) + 1
"""Width of a title in columns."""
COUNTS = ("skipped_updates", "spikes", "rewinds", "stragglers")
Curve = tuple[list[int], list[float]]
"""Steps and values."""
RED, GREEN, YELLOW = 31, 32, 33
"""ANSI codes of colors."""
KEYS = "q quit   tab, arrows, 1-9 next run"


@dataclass(frozen=True)
class Terminal:
    """Size and capabilities of the terminal."""

    columns: int
    lines: int
    unicode: bool = True
    color: bool = False

    @property
    def bars(self) -> str:
        """Characters for drawing curves."""
        if self.unicode:
            return BARS
        return ASCII_BARS

    def paint(self, text: str, number: int) -> str:
        """Return text with an ANSI color code, if supported."""
        if not self.color:
            return text
        return f"\x1b[{number}m{text}\x1b[0m"


def frame(followed: Sequence[FollowedRun], selected: int, terminal: Terminal) -> list[str]:
    """Return the lines of a frame that fits the terminal."""
    lines: list[str] = []
    keys = "q quit"
    if len(followed) > 1:
        keys = KEYS
        lines += _overview(followed, selected, terminal)
        lines.append("")
    lines += _details(followed[selected], terminal)
    return [*lines[: terminal.lines - 2], "", _cut(keys, terminal.columns)]


def _overview(followed: Sequence[FollowedRun], selected: int, terminal: Terminal) -> list[str]:
    """Return one line per run: number, name, state, step, loss and curve of the loss."""
    names = [_name(run) for run in followed]
    longest = max(len(name) for name in names)
    name_width = max(8, min(longest, terminal.columns // 3))
    lines = []
    for index, run in enumerate(followed):
        mark = ">" if index == selected else " "
        # The end of a name differs more often than its start.
        name = names[index][-name_width:]
        step = _step(run)
        loss = _value(run, "loss")
        head = f"{mark}{index + 1:>2} {name:<{name_width}} {run.state:<12} {step:>9} {loss:>8} "
        steps, values = _curve(run, "loss")
        width = terminal.columns - len(head)
        curve = sparkline(steps, values, width, terminal.bars)
        lines.append(_cut(head + curve, terminal.columns))
    return lines


def _details(run: FollowedRun, terminal: Terminal) -> list[str]:
    """Return the lines of one run: state, progress bar, curves, goodput, counts and alerts."""
    width = terminal.columns
    lines = [_state_line(run, terminal)]
    if run.total_steps and run.last:
        lines.append(_progress_bar(run, terminal))

    # Each curve fills the line between its current value and its range.
    for name, title in TITLES.items():
        steps, values = _curve(run, name)
        if not values:
            continue
        head = f"{title:<{_TITLE}}{_value(run, name):>8} "
        lowest = format_number(min(values))
        highest = format_number(max(values))
        tail = f" {lowest} to {highest}"
        curve_width = width - len(head) - len(tail)
        curve = sparkline(steps, values, curve_width, terminal.bars)
        lines.append(_cut(head + curve + tail, width))
    if run.validation:
        loss = _number(run.validation.get("loss"))
        step = run.validation["step"]
        text = f"{'validation':<{_TITLE}}{loss:>8}  step {step:,}"
        lines.append(_cut(text, width))
    lines += _time(run, terminal)

    # Warnings come last: counts of skipped or repeated steps, and the newest lines of the log.
    warnings = []
    counts = _counts(run)
    if counts:
        warnings.append(", ".join(counts))
    for alert in run.alerts[-3:]:
        printable = visible(alert, lines=False)
        warnings.append(redact(printable))
    for warning in warnings:
        lines.append(terminal.paint(_cut(warning, width), YELLOW))
    return lines


def _state_line(run: FollowedRun, terminal: Terminal) -> str:
    """Return the name, state and progress of a run, colored by state."""
    text = f"{_name(run)}  {run.state}  step {_step(run)}"
    if run.total_steps:
        text += f" of {run.total_steps:,}"
    if run.last and math.isfinite(run.age_seconds):
        text += f"  {format_seconds(round(run.age_seconds))} ago"
    color = YELLOW
    if run.state in ("under way", "ended"):
        color = GREEN
    elif run.state.startswith("failed"):
        color = RED
    return terminal.paint(_cut(text, terminal.columns), color)


def _counts(run: FollowedRun) -> list[str]:
    """Return the counts of the last record that are not zero."""
    texts = []
    for name in COUNTS:
        count = run.last.get(name)
        if type(count) in (int, float) and count:
            title = name.replace("_", " ")
            texts.append(f"{title} {count:g}")
    return texts


def _progress_bar(run: FollowedRun, terminal: Terminal) -> str:
    """Return a bar with the completed share of the steps, and the time left if the run is under way."""
    step = run.last["step"]
    share = min(1.0, step / run.total_steps)
    tail = f" {share:>4.0%}"
    seconds = run.last.get("step_seconds")
    if run.state == "under way" and type(seconds) in (int, float):
        seconds_left = (run.total_steps - step) * seconds
        tail += f" {format_seconds(round(seconds_left))} left"
    full = "#"
    empty = "."
    if terminal.unicode:
        full = "█"
        empty = "░"
    # Leave a column free at the right.
    width = terminal.columns - len(tail) - 1
    done = round(width * share)
    bar = full * done + empty * (width - done)
    return _cut(bar + tail, terminal.columns)


def _time(run: FollowedRun, terminal: Terminal) -> list[str]:
    """Return two lines: goodput with a bar of how the time was spent, and the percentage of each bin."""
    total = run.account.running_seconds
    if not total:
        return []
    head = f"{'goodput':<{_TITLE}}{100 * run.account.goodput:>6.1f} % "
    width = terminal.columns - len(head)
    bar = ""
    parts = []
    elapsed = 0.0
    for name, seconds in run.account.seconds.items():
        # Round the end of each bin and not its width, so rounding errors do not add up and the bar fills
        # the line.
        elapsed += seconds
        end = round(width * elapsed / total)
        bar += BINS[name] * (end - len(bar))
        percent = 100 * seconds / total
        if percent >= 0.05:
            parts.append(f"{name} {percent:.1f} %")
    percentages = f"{'of the time':<{_TITLE}} {', '.join(parts)}"
    return [_cut(head + bar, terminal.columns), _cut(percentages, terminal.columns)]


def _curve(run: FollowedRun, name: str) -> Curve:
    return run.curves.get(name, ([], []))


def _name(run: FollowedRun) -> str:
    folder_name = os.path.basename(os.path.realpath(run.folder))
    return redact(visible(folder_name, lines=False))


def _step(run: FollowedRun) -> str:
    if not run.last:
        return "-"
    return f"{run.last['step']:,}"


def _value(run: FollowedRun, name: str) -> str:
    return _number(run.last.get(name))


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    return format_number(float(value))


def _cut(text: str, width: int) -> str:
    return text[:width]
