"""Draw a curve as one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = ".:-=+*#@"


def sparkline(
    places: Sequence[float], values: Sequence[float], width: int, bars: str = BARS
) -> str:
    """Return a curve of ``width`` characters at most, scaled from its minimum to its maximum.

    ``places`` are ascending x values, such as steps. Each character is the mean of an equal range of them.

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
        # A range without values repeats the one before. The first range always has a value.
        means.append(total / count if count else means[-1])
    low = min(means)
    high = max(means)
    if high == low:
        return bars[2] * width
    curve = ""
    for mean in means:
        height = (mean - low) / (high - low)
        curve += bars[round(height * (len(bars) - 1))]
    return curve


def bars_for(stream: TextIO) -> str:
    """Return the characters to draw with: ASCII if the stream's encoding has no block characters."""
    try:
        BARS.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII_BARS
    return BARS
