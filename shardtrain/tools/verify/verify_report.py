"""The table, the sentences and the JSON document of a verification."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from shardtrain.tools.verify.verify_request import VerifyOptions


@dataclass(frozen=True)
class MeshResult:
    """The result of one mesh. Errors are the largest over ranks, steps and tensors; None where nothing ran.

    ``initial`` counts tensors that do not start bitwise equal; ``loss`` and ``weights`` are absolute, ``gradient`` and
    ``norm`` relative. ``rounding`` is said of a model whose tolerance is its own.
    """

    mesh: str
    schedule: str
    verdict: Literal["same", "differs", "failed", "not possible"]
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


BLIND = "rounding may be all of it"
"""How the cause begins where a model amplifies rounding so much that nothing can be told from its numbers."""
HEADER = ("mesh", "schedule and options", "initial", "loss", "gradient", "norm", "weights", "verdict", "seconds")


def exit_code(rows: Sequence[MeshResult], request: VerifyOptions) -> int:
    """Return 0 if all meshes give the same numbers, else 4.

    A mesh of the default list may be impossible, and with ``--allow-impossible`` any. Without that flag, one mesh at
    least must have been compared.
    """
    verdicts = {row.verdict for row in rows}
    accepted = {"same"} if request.meshes and not request.allow_impossible else {"same", "not possible"}
    compared = "same" in verdicts or request.allow_impossible
    return 0 if compared and verdicts <= accepted else 4


def table(rows: Sequence[MeshResult]) -> str:
    """Rows in columns, then one line for each mesh that is not the same."""
    cells = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    for row in rows:
        name = " ".join(word for word in (row.mesh, _with(row)) if word)
        if row.verdict == "differs":
            lines += ["", f"{name}: {row.first}", f"  likely cause: {row.cause}"]
        elif row.verdict in ("failed", "not possible"):
            lines += ["", f"{name}: {row.verdict}: {row.cause}"]
    for rounding in dict.fromkeys(row.rounding for row in rows if row.rounding):  # the same of all meshes
        lines += ["", rounding]
    return "\n".join(lines)


def _with(row: MeshResult) -> str:
    return ", ".join(word for word in (row.schedule, row.options) if word)


def _cells(row: MeshResult) -> tuple[str, ...]:
    initial = "-"
    if row.initial is not None:
        initial = "bitwise" if row.initial == 0 else f"{row.initial} differ"
    errors = ("-" if value is None else f"{value:.1e}" for value in (row.loss, row.gradient, row.norm, row.weights))
    seconds = f"{row.seconds:.1f}" if row.verdict != "not possible" else "-"
    return (row.mesh, _with(row) or "-", initial, *errors, row.verdict, seconds)


def document(model: str, notes: Sequence[str], rows: Sequence[MeshResult], status: int) -> str:
    """Return one JSON document: model, changes made for the comparison, rows and exit status.

    JSON has no infinity, so an infinite error is null.
    """
    finite = []
    for row in rows:
        fields = asdict(row)
        for name, value in fields.items():
            if isinstance(value, float) and value in (float("inf"), float("-inf")):
                fields[name] = None
        finite.append(fields)
    document = {"model": model, "notes": list(notes), "rows": finite, "exit_code": status}
    return json.dumps(document, indent=2, allow_nan=False)
