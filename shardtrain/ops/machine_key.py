"""A key of this kind of processor, for files of measurements and of compiled code."""

from __future__ import annotations

import hashlib
import platform

import torch


def machine_key(*facts: str) -> str:
    """Return part of a file name that identifies this processor, this version of PyTorch and ``facts``."""
    return hashlib.sha256("\n".join([_processor(), torch.__version__, *facts]).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's name and its instruction sets."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read(16384).splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU part", "Features")
    found = {name.strip(): value for name, _, value in (line.partition(":") for line in lines) if value}
    return "\n".join(found.get(name, "") for name in names)
