"""Report of the doctor: a table for users, JSON for programs, and the exit status."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any, get_args

from shardtrain.tools.doctor.result import Finding, Reports, Verdict, worst

EXIT_CODES = {"config": 2, "versions": 2, "environment": 2, "ranks": 6, "network": 6, "memory": 7, "storage": 8}
"""Exit status if the first failure is in this area, see ``errors.py``. Failures of other areas exit with 1."""

WIDTH = 118


def exit_code(findings: Sequence[Finding], strict: bool = False) -> int:
    """Return 0, or the status of the first area with a failure. ``strict`` counts warnings as failures."""
    bad = [one for one in findings if one.verdict == "fail" or (strict and one.verdict == "warn")]
    return EXIT_CODES.get(bad[0].area, 1) if bad else 0


def document(reports: Reports, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """Return the document of ``--json``: all findings, and the hosts or ranks that they name."""
    from shardtrain.tools.doctor import rates  # imports torch, which --help does not need

    names = {str(facts["name"]) for facts in reports.of("devices").values()}
    # Group the findings by the ranks that they name. These are the first nodes to inspect.
    named: dict[str, list[str]] = {}
    for one in findings:
        if one.ranks and one.verdict != "pass":
            named.setdefault(reports.who(one.ranks), []).append(f"{one.area}: {one.subject}")
    return {
        "format": 1,
        "ranks": reports.size,
        "hosts": {host: len(ranks) for host, ranks in reports.hosts().items()},
        "device": (", ".join(sorted(names)) or "unknown"),
        "verdict": worst([one.verdict for one in findings]),
        "seconds": round(seconds, 1),
        "findings": [dataclasses.asdict(one) for one in findings],
        "named": named,
        "rates": rates.of(reports),
    }


def text_of(document: dict[str, Any]) -> str:
    """Format the document as a table. A fix follows its finding in a separate line."""
    hosts = len(document["hosts"])
    device = document["device"]
    ranks = f"{document['ranks']} rank{'s' if document['ranks'] > 1 else ''}"
    lines = [f"{ranks} on {hosts} host{'s' if hosts > 1 else ''}, {device}", ""]
    area = ""
    for row in document["findings"]:
        shown = row["area"] if row["area"] != area else ""
        area = row["area"]
        lines += _row(row, shown)
    counts = {verdict: sum(row["verdict"] == verdict for row in document["findings"]) for verdict in get_args(Verdict)}
    lines.append("")
    for who, subjects in document["named"].items():
        lines += textwrap.wrap(f"inspect {who}: {', '.join(subjects)}", WIDTH, subsequent_indent="  ")
    totals = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines.append(f"{document['verdict']}: {totals}, in {document['seconds']:.1f} s")
    return "\n".join(lines)


def _row(row: dict[str, Any], area: str) -> list[str]:
    start = f"{row['verdict']}  {area:<12}{row['subject']}: "
    expected = f" (expected: {row['expected']})" if row["expected"] and row["verdict"] != "pass" else ""
    indent = " " * 18
    lines = textwrap.wrap(
        f"{start}{row['measured']}{expected}",
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if row["fix"] and row["verdict"] != "pass":
        fix = f"fix: {row['fix']}"
        lines += textwrap.wrap(fix, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return lines


def to_json(document: dict[str, Any]) -> str:
    """Serialize the document."""
    return json.dumps(document, indent=1)
