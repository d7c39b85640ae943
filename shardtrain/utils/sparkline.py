"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = ".:-=+*#@"


def sparkline(places: Sequence[float], values: Sequence[float], width: int, bars: str = BARS) -> str:
    """The mean of each stretch of ``places`` (ascending, such as steps), drawn from the least to the greatest of them.

    >>> sparkline([1, 2, 7, 8], [1.0, 3.0, 8.0, 8.0], 4)
    '▁▁▁█'
    >>> sparkline([1, 2], [2.0, 2.0], 8, ASCII_BARS)
    '--'
    """
    if width < 1 or not values:
        return ""
    width = min(width, len(values))
    first = places[0]
    span = places[-1] - places[0]
    sums = [0.0] * width
    counts = [0] * width
    for place, value in zip(places, values, strict=True):
        index = min(int((place - first) * width / span), width - 1) if span else 0
        sums[index] += value
        counts[index] += 1
    means: list[float] = []
    for total, count in zip(sums, counts, strict=True):
        means.append(total / count if count else means[-1])  # the first stretch is never empty
    low, high = min(means), max(means)
    if high == low:
        return bars[2] * width
    return "".join(bars[round((mean - low) / (high - low) * (len(bars) - 1))] for mean in means)


def bars_for(stream: TextIO) -> str:
    """The characters to draw with: ASCII where the stream cannot write others."""
    try:
        BARS.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII_BARS
    return BARS
