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
        curves = [
            {"name": line.name, "x": list(line.steps), "y": [float(f"{value:.6g}") for value in line.values],
             "color": COLORS[line.color % len(COLORS)], "dots": line.dots}
            for line in self.lines
        ]  # fmt: skip
        return {"title": self.title, "log": self.is_logarithmic, "lines": curves}

    @property
    def is_logarithmic(self) -> bool:
        """True if the axis is logarithmic, which requires positive values."""
        return self.logarithmic and all(value > 0 for line in self.lines for value in line.values)

    def svg(self, label: str) -> str:
        """Return the drawing. ``label`` describes it to screen readers."""
        # Determine the ranges of both axes.
        steps = [step for line in self.lines for step in line.steps]
        values = [self._height(value) for line in self.lines for value in line.values]
        x0, x1 = (min(steps), max(steps)) if steps else (0, 1)
        y0, y1 = (min(values), max(values)) if values else (0.0, 1.0)
        if not y1 > y0:  # one value: in the middle
            y0 = y0 - (abs(y0) / 2 or 0.5)
            y1 = y1 + (abs(y1) / 2 or 0.5)
        x1 = max(x1, x0 + 1)
        inner_width = WIDTH - LEFT - RIGHT
        inner_height = HEIGHT - TOP - BOTTOM

        def place(step: float, height: float) -> tuple[float, float]:
            return (
                LEFT + (step - x0) / (x1 - x0) * inner_width,
                TOP + (1 - (height - y0) / (y1 - y0)) * inner_height,
            )

        # Draw grid lines and their numbers, then the curves above them.
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">']
        for value in ticks(10**y0, 10**y1, True) if self.is_logarithmic else ticks(y0, y1):
            _, y = place(x0, self._height(value))
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            text = f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_number(value)}</text>'
            parts.append(text)
        for step in ticks(x0, x1):
            x, _ = place(step, y0)
            anchor = "end" if x > WIDTH - RIGHT - 16 else "middle"
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{format_number(step)}</text>'
            )
        for line in self.lines:
            points = [place(*pair) for pair in zip(line.steps, map(self._height, line.values), strict=True)]
            color = COLORS[line.color % len(COLORS)]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.2" points="{path}"/>')
            if line.dots or len(points) == 1:
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        return "".join([*parts, "</svg>"])

    def _height(self, value: float) -> float:
        return math.log10(value) if self.is_logarithmic else value


def ticks(low: float, high: float, logarithmic: bool = False) -> list[float]:
    """Return three to seven round numbers between two values. ``report.js`` has the same function.

    >>> ticks(3.511, 8.053), ticks(1, 300), ticks(0.0002, 0.004)
    ([4.0, 5.0, 6.0, 7.0, 8.0], [100.0, 200.0, 300.0], [0.001, 0.002, 0.003, 0.004])
    >>> ticks(0.02, 300, logarithmic=True)
    [0.1, 1.0, 10.0, 100.0]
    """
    if logarithmic and high > 30 * low:
        first = math.ceil(math.log10(low) - 1e-9)
        last = math.floor(math.log10(high) + 1e-9)
        each = -(-(last - first + 1) // 6)
        return [10.0**power for power in range(first, last + 1, each)]
    rough = (high - low) / 4
    if not rough > 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(rough))
    distance = size * min((1, 2, 5, 10), key=lambda factor: abs(math.log(size * factor / rough)))
    count = math.floor(high / distance + 1e-9)
    # Start at the smallest multiple, and round each number to the float nearest to its decimal.
    return [float(f"{place * distance:.12g}") for place in range(math.ceil(low / distance - 1e-9), count + 1)]


def format_number(value: float) -> str:
    """Format a number of an axis in few characters.

    >>> [format_number(value) for value in (0.0, 2.5, 1234567.0, 0.0003142, 150000.0, 100.0, 2e18, math.inf)]
    ['0', '2.5', '1.23M', '3.14e-4', '150k', '100', '2e18', 'inf']
    """
    if not math.isfinite(value) or abs(value) >= 1e15:
        return f"{value:.3g}".replace("e+", "e")
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    if 0 < abs(value) < 1e-2:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.4g}"
