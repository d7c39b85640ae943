"""The processor of this machine, as the kernel describes it."""

from __future__ import annotations

import platform
from pathlib import Path

_ARM_FIELDS = ("CPU implementer", "CPU part", "CPU variant", "CPU revision")
"""The fields of /proc/cpuinfo that identify an ARM processor. On ARM, Linux reports no model name."""


def cpuinfo_fields(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the fields of one core. Empty without such a file, for example on macOS."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = file.read(16384).splitlines()
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if value.strip():
            fields[name.strip()] = value.strip()
    return fields


def processor_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name, or the architecture with the implementer and part of an ARM core."""
    fields = cpuinfo_fields(path)
    if "model name" in fields:
        return fields["model name"]
    arm = [f"{name} {fields[name]}" for name in _ARM_FIELDS if name in fields]
    return ", ".join([platform.machine(), *arm]) or platform.processor()
