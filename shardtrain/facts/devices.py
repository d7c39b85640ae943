"""Accelerators by name: the rows of ``devices.toml``, found by their own name or by the name that a driver reports.

A device that is not in the table has no figures: nothing is guessed.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

DeviceType = Literal["auto", "cpu", "cuda", "xpu", "mps"]
"""PyTorch's names of the devices that can train. ``auto`` is the accelerator that PyTorch finds, else the CPU.

It does not choose Apple's ``mps``, which trains in one process and adds in float32.
"""

DEVICE_TYPES: tuple[str, ...] = get_args(DeviceType)
ACCELERATOR_TYPES = tuple(name for name in DEVICE_TYPES if name not in ("auto", "cpu", "mps"))
"""Accelerators that ``auto`` chooses: PyTorch has collectives and 64-bit numbers on them."""

# Short names of devices with several memory sizes.
_ALIASES = {
    "v100": "v100-32gb",
    "a100": "a100-80gb",
    "a100-80": "a100-80gb",
    "a100-40": "a100-40gb",
}


@functools.cache
def table() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the tables ``devices`` and ``links``. Do not change them."""
    return tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """Names of the devices."""
    return sorted(table()["devices"])


def find(name: str) -> str | None:
    """Return the name of a device's row in the table, from that name, an alias or the name that a driver reports.

    Returns None if the device is unknown.

    A MIG slice is a part of a device and has no row.

    >>> find("H100"), find("rtx4090"), find("NVIDIA A100-SXM4-40GB"), find("NVIDIA H200"), find("AMD EPYC")
    ('h100', 'rtx-4090', 'a100-40gb', 'h200', None)
    """
    rows = table()["devices"]
    # Names may be written without hyphens.
    by_name = {known.replace("-", ""): known for known in rows}
    known = by_name.get(_ALIASES.get(name.lower(), name.lower()).replace("-", ""))
    # The name of a MIG slice contains that of its device, which has more units.
    if known or re.search(r"\bMIG\b", name):
        return known
    # Otherwise it may be the name that a driver reports.
    for known_name, facts in rows.items():
        pattern = facts.get("driver")
        if pattern and re.search(pattern, name, re.IGNORECASE):
            return known_name
    return None


def peak_flops(name: str, dtype: str) -> float | None:
    """Return the dense peak of one device in FLOP/s, or None if it is unknown or the device has no such units.

    ``name`` is one that ``find`` knows, ``dtype`` PyTorch's name of a dtype, with or without ``torch.``.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "torch.bfloat16"), peak_flops("AMD EPYC", "bfloat16")
    (989400000000000.0, None)
    """
    known = find(name)
    # The row "cpu" describes one core of a particular processor.
    if known is None or known == "cpu":
        return None
    # All float8 formats have the same peak.
    dtype = dtype.removeprefix("torch.")
    if dtype.startswith("float8"):
        dtype = "float8"
    peak: float | None = table()["devices"][known]["flops"].get(dtype)
    return peak
