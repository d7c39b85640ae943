"""The recorded metrics of a run without those that depend on its speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardtrain.utils.checked_json import record_of

MEASURED = frozenset(
    {
        "tps",
        "tokens_per_second",
        "targets_per_second",
        "tflops",
        "memory_gib",
        "step_seconds",
        "data_seconds",
    }
)
"""Metrics that differ between two equal runs. Those of goodput do too."""


def computed_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records in ``metrics.jsonl`` of a run folder, without measured metrics."""
    records = [record_of(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    for record in records:
        for key in list(record):
            if key in MEASURED or key.startswith("goodput"):
                del record[key]
    return records
