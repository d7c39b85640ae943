"""Parse and format numbers with units: bytes, durations and large counts.

>>> format_bytes(parse_bytes("1.5 GiB")), format_seconds(parse_seconds("1h30m")), format_count(parse_count("8B"))
('1.50 GiB', '1h30m', '8.00B')
"""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GIGA = 1e9

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
    "pib": 1024**5,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
}
_SECOND_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def gib(num_bytes: float) -> float:
    """Convert bytes to GiB (2**30 bytes).

    >>> gib(3 * 2**29)
    1.5
    """
    return num_bytes / GIB


def parse_bytes(text: str | int) -> int:
    """Read a size: ``"80 GiB"``, ``"512MB"``, or a plain number of bytes. GiB is 2**30 bytes, GB is 10**9.

    Raises ValueError on anything else.

    >>> parse_bytes("80 GiB"), parse_bytes("2kb"), parse_bytes("17"), parse_bytes(5)
    (85899345920, 2000, 17, 5)
    """
    return _parse_scaled(text, _BYTE_UNITS, 'a size like "80 GiB" or "512 MB"')


def format_bytes(num_bytes: float) -> str:
    """Write a size in the largest binary unit that keeps it at or above one.

    >>> [format_bytes(n) for n in (0, 512, 1536, 3 * 2**30, -2**20)]
    ['0 B', '512 B', '1.50 KiB', '3.00 GiB', '-1.00 MiB']
    """
    for name, size in (
        ("PiB", 1024**5),
        ("TiB", 1024**4),
        ("GiB", GIB),
        ("MiB", MIB),
        ("KiB", KIB),
    ):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {name}"
    return f"{num_bytes:.0f} B"


def parse_seconds(text: str | float) -> float:
    """Read a duration: ``"90"``, ``"1.5s"``, ``"1h30m"``, ``"2d 4h"``, ``"250ms"``, or Slurm's ``"[D-]HH:MM:SS"``.

    Raises ValueError on anything else.

    >>> parse_seconds("1h30m"), parse_seconds(90), parse_seconds("250ms"), parse_seconds("1-02:00:30")
    (5400.0, 90.0, 0.25, 93630.0)
    """
    # A plain number counts seconds.
    if isinstance(text, int | float):
        if not math.isfinite(text):
            raise ValueError(f"{text!r} is not a duration")
        return float(text)
    # Slurm's format.
    clock = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d)(?::([0-5]\d))", text.strip())
    if clock:
        days, hours, minutes, seconds = [int(group or 0) for group in clock.groups()]
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    # A plain number in text.
    if re.fullmatch(r"\d+(?:\.\d+)?", text.strip()):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d)\s*", text.strip())
    # findall skips text that does not match, so compare with the entire text.
    known = "".join(number + unit for number, unit in parts)
    if not parts or known != re.sub(r"\s+", "", text):
        raise ValueError(f'{text!r} is not a duration; write it like "90s", "1h30m" or "12:30:00"')
    return sum(float(number) * _SECOND_UNITS[unit] for number, unit in parts)


def format_seconds(seconds: float) -> str:
    """Write a duration with at most two units. Times below a minute have three digits.

    >>> [format_seconds(s) for s in (0.0042, 9.81, 75, 5400, 200000)]
    ['4.2ms', '9.81s', '1m15s', '1h30m', '2d07h']
    """
    # A rate of 0 leads to an infinite remaining time.
    if not math.isfinite(seconds):
        return "-"
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    # The limits account for rounding: 59.97 would be shown as 60s instead of 1m00s.
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g}ms" if seconds else "0s"
    if seconds < 59.95:
        return f"{seconds:.3g}s"
    rounded = round(seconds)
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    if rounded < 86400:
        return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"
    return f"{rounded // 86400}d{rounded % 86400 // 3600:02d}h"


def real_number(value: Any) -> float | None:
    """Return a real number of Python, NumPy or PyTorch (a 0-d tensor) as a float, or None for anything else.

    >>> from fractions import Fraction
    >>> real_number(Fraction(1, 4)), real_number(2), real_number(True), real_number("1"), real_number(1j)
    (0.25, 2.0, None, None, None)
    """
    # NumPy scalars and 0-d tensors.
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def parse_count(text: str | int) -> int:
    """Read a count: ``"8B"``, ``"1.5T"``, ``"524_288"``, ``"16k"``. K, M, B and T are powers of a thousand.

    Raises ValueError on anything else.

    >>> parse_count("8B"), parse_count("1.5k"), parse_count("524_288")
    (8000000000, 1500, 524288)
    """
    if isinstance(text, str):
        # Remove thousands separators.
        text = text.replace("_", "").replace(",", "")
    return _parse_scaled(text, _COUNT_UNITS, 'a count like "8B" or "524288"')


def format_count(count: float) -> str:
    """Write a count in K, M, B or T with two decimals.

    >>> [format_count(n) for n in (12, 1234, 6738415616, 15.6e12)]
    ['12', '1.23K', '6.74B', '15.60T']
    """
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f}{name}"
    return f"{count:.0f}"


def _parse_scaled(text: str | int, units: dict[str, int], wanted: str) -> int:
    """Parse ``number unit``. The number times the unit must be an integer."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?\s*([a-zA-Z]*)", text.strip())
    scale = units.get(match[3].lower()) if match else None
    if match is None or scale is None:
        raise ValueError(f"{text!r} is not {wanted}")
    # Integer arithmetic: a float would lose the last digits of a large count.
    decimals = match[2] or ""
    return int(match[1] + decimals) * scale // 10 ** len(decimals)
