"""One frame of the live view as lines of text: a pure function of the runs and the terminal's size."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.metrics.record import TOTAL_SPEED
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
TITLES = {"loss": "loss", "grad_norm": "grad norm", "tokens_per_second": TOTAL_SPEED, "memory_gib": "memory GiB"}
_TITLE = len(TOTAL_SPEED) + 1
"""Width of a title in columns."""
COUNTS = ("skipped_updates", "spikes", "rewinds", "stragglers")
Curve = tuple[list[int], list[float]]
"""Steps and values."""
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
        return BARS if self.unicode else ASCII_BARS

    def paint(self, text: str, number: int) -> str:
        """Return text with an ANSI color code, if supported."""
        return f"\x1b[{number}m{text}\x1b[0m" if self.color else text


def frame(followed: Sequence[FollowedRun], selected: int, terminal: Terminal) -> list[str]:
    """Return the lines of a frame that fits the terminal."""
    lines: list[str] = []
    if len(followed) > 1:
        names = [_name(one) for one in followed]
        widest = max(8, min(max(map(len, names)), terminal.columns // 3))
        for number, (one, name) in enumerate(zip(followed, names, strict=True)):
            mark = ">" if number == selected else " "
            head = f"{mark}{number + 1:>2} {name[-widest:]:<{widest}} {one.state:<12} {_step(one):>9} "
            loss = f"{_value(one, 'loss'):>8} "
            curve = sparkline(*_curve(one, "loss"), terminal.columns - len(head) - len(loss), terminal.bars)
            lines.append(_cut(head + loss + curve, terminal.columns))
        lines.append("")
    lines += _details(followed[selected], terminal)
    return [*lines[: terminal.lines - 2], "", _cut(KEYS if len(followed) > 1 else "q quit", terminal.columns)]


def _details(one: FollowedRun, terminal: Terminal) -> list[str]:
    """Return the lines of one run: state, progress bar, curves, goodput, counts and alerts."""
    width = terminal.columns
    age = f"{format_seconds(round(one.age_seconds))} ago" if math.isfinite(one.age_seconds) and one.last else ""
    whole = f" of {one.total_steps:,}" if one.total_steps else ""
    state = one.state
    colour = 33  # yellow
    if state in ("under way", "ended"):
        colour = 32  # green
    elif state.startswith("failed"):
        colour = 31  # red
    text = f"{_name(one)}  {state}  step {_step(one)}{whole}  {age}".rstrip()
    lines = [terminal.paint(_cut(text, width), colour)]

    if one.total_steps and one.last:
        share = min(1.0, one.last["step"] / one.total_steps)
        seconds = one.last.get("step_seconds")
        left = ""
        if type(seconds) in (int, float) and state == "under way":
            left = f" {format_seconds(round((one.total_steps - one.last['step']) * seconds))} left"
        full, empty = ("█", "░") if terminal.unicode else ("#", ".")
        bar = width - len(left) - 6
        lines.append(f"{full * round(bar * share)}{empty * (bar - round(bar * share))} {share:>4.0%}{left}"[:width])
    for name, title in TITLES.items():
        curve = _curve(one, name)
        if not curve[1]:
            continue
        span = f" {format_number(min(curve[1]))} to {format_number(max(curve[1]))}"
        head = f"{title:<{_TITLE}}{_value(one, name):>8} "
        lines.append(_cut(head + sparkline(*curve, width - len(head) - len(span), terminal.bars) + span, width))
    if one.validation:
        loss = _number(one.validation.get("loss"))
        lines.append(_cut(f"{'validation':<{_TITLE}}{loss:>8}  step {one.validation['step']:,}", width))
    lines += _time(one, terminal)
    counted = [name for name in COUNTS if type(one.last.get(name)) in (int, float) and one.last[name]]
    counts = [f"{name.replace('_', ' ')} {one.last[name]:g}" for name in counted]
    if counts:
        lines.append(terminal.paint(_cut(", ".join(counts), width), 33))
    lines += [terminal.paint(_cut(redact(visible(alert, lines=False)), width), 33) for alert in one.alerts[-3:]]
    return lines


def _time(one: FollowedRun, terminal: Terminal) -> list[str]:
    """Return two lines: goodput with a bar of how the time was spent, and the percentage of each bin."""
    total = one.account.running_seconds
    if not total:
        return []
    head = f"{'goodput':<{_TITLE}}{100 * one.account.goodput:>6.1f} % "
    bar = ""
    elapsed = 0.0
    # Round the end of each bin and not its width, so that rounding errors do not add up and the bar fills the
    # line
    for name, seconds in one.account.seconds.items():
        elapsed += seconds
        end = round((terminal.columns - len(head)) * elapsed / total)
        bar += BINS[name] * (end - len(bar))
    percent = {name: 100 * seconds / total for name, seconds in one.account.seconds.items()}
    parts = [f"{name} {value:.1f} %" for name, value in percent.items() if value >= 0.05]
    percentages = f"{'of the time':<{_TITLE}} {', '.join(parts)}"
    return [_cut(head + bar, terminal.columns), _cut(percentages, terminal.columns)]


def _curve(one: FollowedRun, name: str) -> Curve:
    return one.curves.get(name, ([], []))


def _name(one: FollowedRun) -> str:
    return redact(visible(os.path.basename(os.path.realpath(one.folder)), lines=False))


def _step(one: FollowedRun) -> str:
    return f"{one.last['step']:,}" if one.last else "-"


def _value(one: FollowedRun, name: str) -> str:
    return _number(one.last.get(name))


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    return format_number(float(value))


def _cut(text: str, width: int) -> str:
    return text[:width]
