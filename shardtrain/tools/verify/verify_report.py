"""Output of a verification: table, sentences and JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from shardtrain.tools.verify.verify_request import VerifyOptions

Verdict = Literal["same", "differs", "failed", "not possible", "not proven", "not checked"]
USUAL = {"loss": 1e-5, "gradient": 1e-5, "norm": 1e-5, "weights": 1e-6}
"""Tolerances of float32 for a model that does not amplify rounding. Relative for gradients and the norm,
absolute for others.
"""
ROUNDING = 8
"""Tolerance divided by the effect of shaken weights.

It exceeds 1 because a mesh also rounds all sums of a step differently.
"""
MOST = 100
"""Maximum multiple of the usual tolerance for a model that amplifies rounding. An error of more than a
thousandth of a gradient is never rounding.
"""


@dataclass(frozen=True)
class MeshResult:
    """Result of one mesh. Errors are the largest over ranks, steps and tensors, or None if nothing ran.

    ``initial`` is the number of tensors whose initial values are not bitwise equal. ``loss`` and ``weights``
    are absolute errors, ``gradient`` and ``norm`` relative ones. ``rounding`` is a note for a model with
    larger tolerances. ``unproven`` names the numbers that could not be compared, because rounding alone may
    change them by as much as a fault would. If no number differs, the verdict is then "not proven".
    """

    mesh: str
    schedule: str
    verdict: Verdict
    seconds: float = 0.0
    initial: int | None = None
    loss: float | None = None
    gradient: float | None = None
    norm: float | None = None
    weights: float | None = None
    first: str = ""
    cause: str = ""
    options: str = ""
    rounding: str = ""
    unproven: str = ""


ONE_PROCESS = "one process"
"""Name of the row of one process in the run's own precision."""
BLIND = "rounding may be all of it"
"""Start of the cause if a model amplifies rounding so much that the comparison proves nothing."""
HEADER = (
    "mesh",
    "schedule and options",
    "initial",
    "loss",
    "gradient",
    "norm",
    "weights",
    "verdict",
    "seconds",
)


def exit_code(rows: Sequence[MeshResult], request: VerifyOptions) -> int:
    """Return 0 if all meshes compute the same numbers, or else 4, also if a row is not proven.

    Meshes of the default list may be impossible, and with ``--allow-impossible`` any mesh may be. Without
    that flag, at least one mesh must have been compared. The row of one process is not a mesh.
    """
    verdicts = {row.verdict for row in rows}
    accepted = {"same", "not possible"}
    if request.meshes and not request.allow_impossible:
        accepted = {"same"}
    has_same_mesh = any(row.verdict == "same" and row.mesh != ONE_PROCESS for row in rows)
    is_compared = has_same_mesh or request.allow_impossible
    if is_compared and verdicts <= accepted:
        return 0
    return 4


def table(rows: Sequence[MeshResult]) -> str:
    """Format the rows as a table, followed by the reason for each mesh that differs."""
    cells = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    for row in rows:
        name = f"{row.mesh} {_schedule_and_options(row)}".strip()
        if row.verdict == "differs":
            lines += ["", f"{name}: {row.first}", f"  likely cause: {row.cause}"]
        elif row.verdict in ("failed", "not possible"):
            lines += ["", f"{name}: {row.verdict}: {row.cause}"]
        elif row.verdict == "not proven":
            lines += ["", f"{name}: {row.verdict}: {row.unproven}"]
    # Meshes usually have the same note, which is printed once.
    for rounding in dict.fromkeys(row.rounding for row in rows if row.rounding):
        lines += ["", rounding]
    return "\n".join(lines)


def _schedule_and_options(row: MeshResult) -> str:
    return ", ".join(text for text in (row.schedule, row.options) if text)


def _cells(row: MeshResult) -> tuple[str, ...]:
    initial = "-"
    if row.initial is not None:
        initial = "bitwise" if row.initial == 0 else f"{row.initial} differ"
    errors = []
    for value in (row.loss, row.gradient, row.norm, row.weights):
        errors.append("-" if value is None else f"{value:.1e}")
    seconds = "-"
    if row.verdict != "not possible":
        seconds = f"{row.seconds:.1f}"
    return (row.mesh, _schedule_and_options(row) or "-", initial, *errors, row.verdict, seconds)


def document(model: str, notes: Sequence[str], rows: Sequence[MeshResult], status: int) -> str:
    """Return the JSON document: model, changes made for the comparison, rows and exit status.

    Infinite errors are null, because JSON has no infinity.
    """
    json_rows = []
    for row in rows:
        fields = asdict(row)
        for name, value in fields.items():
            if isinstance(value, float) and math.isinf(value):
                fields[name] = None
        json_rows.append(fields)
    document = {"model": model, "notes": list(notes), "rows": json_rows, "exit_code": status}
    return json.dumps(document, indent=2, allow_nan=False)
