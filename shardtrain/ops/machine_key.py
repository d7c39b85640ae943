"""Key of this type of processor, for cached measurements and compiled code."""

from __future__ import annotations

import hashlib
import platform

import torch

from shardtrain.utils.processor import cpuinfo_fields


def machine_key(*facts: str) -> str:
    """Return 16 hexadecimal digits that identify this processor, this version of PyTorch and ``facts``."""
    text = "\n".join([_processor(), torch.__version__, *facts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's name and its instruction sets. ARM cores have a part instead of a name."""
    fields = cpuinfo_fields()
    names = ("vendor_id", "cpu family", "model", "model name", "flags")
    arm_names = ("CPU implementer", "CPU part", "CPU variant", "Features")
    values = [fields.get(name, "") for name in (*names, *arm_names)]
    return "\n".join([platform.machine(), *values])
