"""A line chart as static SVG. ``report.js`` adds zooming and the value at the pointer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 640
HEIGHT = 240
LEFT = 64
RIGHT = 14
TOP = 10
BOTTOM = 28
COLORS = ("#1f6feb", "#d1570b", "#1a7f37", "#8250df", "#bf3989", "#6e7781", "#0a7ea4", "#9a6700")


@dataclass(frozen=True)
class ChartLine:
    """One curve: name, steps, values, and the index of its run, which selects the color."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    color: int = 0
    dots: bool = False
    """True to mark the points of a sparse series."""


@dataclass(frozen=True)
class Chart:
    """Curves over the step with one vertical axis."""

    title: str
    lines: Sequence[ChartLine]
    logarithmic: bool = False

    def data(self) -> dict[str, object]:
        """Return the curves in the form that ``report.js`` redraws when the user zooms."""
        curves = []
        for line in self.lines:
            rounded = [float(f"{value:.6g}") for value in line.values]
            color = COLORS[line.color % len(COLORS)]
            curves.append(
                {
                    "name": line.name,
                    "x": list(line.steps),
                    "y": rounded,
                    "color": color,
                    "dots": line.dots,
                },
            )
        return {"title": self.title, "log": self.is_logarithmic, "lines": curves}

    @property
    def is_logarithmic(self) -> bool:
        """True if the axis is logarithmic, which requires positive values."""
        if not self.logarithmic:
            return False
        lowest_values = [min(line.values, default=1.0) for line in self.lines]
        return all(lowest > 0 for lowest in lowest_values)

    def svg(self, label: str) -> str:
        """Return the drawing. ``label`` describes it to screen readers."""
        view = _View(self)
        # Draw grid lines and their numbers, then the curves above them.
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
        for value in view.values_of_grid():
            y = view.y_of(view.height_of(value))
            number = format_number(value)
            parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            parts.append(
                f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number}</text>',
            )
        for step in ticks(view.first, view.last):
            x = view.x_of(step)
            number = format_number(step)
            # A number in the middle of the last tick would extend beyond the drawing.
            anchor = "end" if x > WIDTH - RIGHT - 16 else "middle"
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{number}</text>',
            )
        for line in self.lines:
            # With more runs than colors, colors repeat.
            color = COLORS[line.color % len(COLORS)]
            points = []
            circles = []
            for step, value in zip(line.steps, line.values, strict=True):
                x = view.x_of(step)
                y = view.y_of(view.height_of(value))
                points.append(f"{x:.1f},{y:.1f}")
                circles.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')
            path = " ".join(points)
            parts.append(
                f'<polyline fill="none" stroke="{color}" stroke-width="1.2" points="{path}"/>'
            )
            # A line through one point is invisible.
            if line.dots or len(points) == 1:
                parts += circles
        parts.append("</svg>")
        return "".join(parts)


class _View:
    """Part of the plane that a chart shows, in steps and heights.

    A height is a value or, on a logarithmic axis, its power of ten.
    """

    def __init__(self, chart: Chart) -> None:
        self._is_logarithmic = chart.is_logarithmic
        steps: list[int] = []
        heights: list[float] = []
        for line in chart.lines:
            steps += line.steps
            heights += [self.height_of(value) for value in line.values]
        # Draw a single step at the left, and a single value in the middle.
        self.first = min(steps, default=0)
        self.last = max(max(steps, default=1), self.first + 1)
        self._low = min(heights, default=0.0)
        self._high = max(heights, default=1.0)
        if not self._high > self._low:
            self._low -= abs(self._low) / 2 or 0.5
            self._high += abs(self._high) / 2 or 0.5

    def height_of(self, value: float) -> float:
        if self._is_logarithmic:
            return math.log10(value)
        return value

    def x_of(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_of(self, height: float) -> float:
        share = (height - self._low) / (self._high - self._low)
        return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)

    def values_of_grid(self) -> list[float]:
        if self._is_logarithmic:
            return ticks(10**self._low, 10**self._high, logarithmic=True)
        return ticks(self._low, self._high)


def ticks(low: float, high: float, logarithmic: bool = False) -> list[float]:
    """Return three to seven round numbers between two values. ``report.js`` has the same function.

    >>> ticks(3.511, 8.053), ticks(1, 300), ticks(0.0002, 0.004)
    ([4.0, 5.0, 6.0, 7.0, 8.0], [100.0, 200.0, 300.0], [0.001, 0.002, 0.003, 0.004])
    >>> ticks(0.02, 300, logarithmic=True)
    [0.1, 1.0, 10.0, 100.0]
    """
    # On a logarithmic axis with a large enough range, use powers of ten.
    if logarithmic and high > 30 * low:
        first = math.ceil(math.log10(low) - 1e-9)
        last = math.floor(math.log10(high) + 1e-9)
        num_powers = last - first + 1
        each = -(-num_powers // 6)  # rounded up
        return [10.0**power for power in range(first, last + 1, each)]
    rough = (high - low) / 4
    if not rough > 0:
        return [low]
    # The distance is the number 1, 2, 5 or 10 times a power of ten that is nearest to ``rough``.
    size = 10.0 ** math.floor(math.log10(rough))
    factor = min((1, 2, 5, 10), key=lambda factor: abs(math.log(size * factor / rough)))
    distance = size * factor
    first = math.ceil(low / distance - 1e-9)
    last = math.floor(high / distance + 1e-9)
    # Round each multiple to the float nearest to its decimal.
    return [float(f"{multiple * distance:.12g}") for multiple in range(first, last + 1)]


def format_number(value: float) -> str:
    """Format a number of an axis in few characters.

    >>> [format_number(value) for value in (0.0, 2.5, 1234567.0, 0.0003142, 150000.0, 100.0, 2e18, math.inf)]
    ['0', '2.5', '1.23M', '3.14e-4', '150k', '100', '2e18', 'inf']
    """
    if not math.isfinite(value) or abs(value) >= 1e15:
        return f"{value:.3g}".replace("e+", "e")
    # Numbers below 10,000 have no suffix, because four digits need no more space than three and a suffix.
    for least, unit, suffix in (
        (1e12, 1e12, "T"),
        (1e9, 1e9, "G"),
        (1e6, 1e6, "M"),
        (1e4, 1e3, "k"),
    ):
        if abs(value) >= least:
            return f"{value / unit:.3g}{suffix}"
    if 0 < abs(value) < 1e-2:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.4g}"
