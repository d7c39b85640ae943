"""Processor and library versions of a measurement, which every result file contains."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path

_MATRIX_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def measurement_facts(*libraries: str) -> dict[str, str]:
    """Return the versions of PyTorch, Python and the named libraries, and the processor.

    >>> list(measurement_facts())
    ['torch', 'python', 'processor']
    """
    # Import torch lazily, because some benchmarks measure commands that do not import it.
    import torch

    facts = {"torch": str(torch.__version__)}
    for name in libraries:
        facts[name] = importlib.import_module(name).__version__
    return {**facts, "python": platform.python_version(), "processor": processor_facts()}


def processor_facts() -> str:
    """Return name, family, model and matrix instructions of the processor.

    Family and model are included because some hosts report the same name for every processor.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    facts: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    flags = set(facts.get("flags", "").split())
    instructions = " ".join(flag for flag in _MATRIX_INSTRUCTIONS if flag in flags)
    model = facts.get("model name", platform.machine())
    return f"{model}, family {facts.get('cpu family')} model {facts.get('model')}: {instructions}"
