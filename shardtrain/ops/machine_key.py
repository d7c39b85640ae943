"""Key of this type of processor, for cached measurements and compiled code."""

from __future__ import annotations

import hashlib
import platform

import torch


def machine_key(*facts: str) -> str:
    """Return 16 hexadecimal digits that identify this processor, this version of PyTorch and ``facts``."""
    text = "\n".join([_processor(), torch.__version__, *facts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's name and its instruction sets."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read(16384).splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = {}
    for line in lines:
        name, _, value = line.partition(":")
        if value:
            fields[name.strip()] = value
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU part", "Features")
    return "\n".join(fields.get(name, "") for name in names)
