"""Report of the doctor: a table for users, JSON for programs, and the exit status."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from shardtrain.tools.doctor.result import Finding, Reports, Verdict, plural, worst

EXIT_CODES = {
    "config": 2,
    "versions": 2,
    "environment": 2,
    "ranks": 6,
    "network": 6,
    "memory": 7,
    "storage": 8,
}
"""Exit status if the first failure is in this area, see ``errors.py``.

Failures of other areas exit with 1.
"""

WIDTH = 118


def exit_code(findings: Sequence[Finding], strict: bool = False) -> int:
    """Return 0, or the status of the first area with a failure. ``strict`` counts warnings as failures."""
    for finding in findings:
        if finding.verdict == "fail" or (strict and finding.verdict == "warn"):
            return EXIT_CODES.get(finding.area, 1)
    return 0


def document(reports: Reports, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """Return the document of ``--json``: all findings, and the hosts or ranks that they name."""
    from shardtrain.tools.doctor import rates  # imports torch, which --help does not need

    devices = {str(facts["name"]) for facts in reports.of("devices").values()}

    # Group the findings by the ranks that they name. These are the first nodes to inspect.
    named: dict[str, list[str]] = {}
    for finding in findings:
        if finding.ranks and finding.verdict != "pass":
            subjects = named.setdefault(reports.who(finding.ranks), [])
            subjects.append(f"{finding.area}: {finding.subject}")

    ranks_per_host = {}
    for host, ranks in reports.hosts().items():
        ranks_per_host[host] = len(ranks)
    return {
        "format": 1,
        "ranks": reports.size,
        "hosts": ranks_per_host,
        "device": ", ".join(sorted(devices)) or "unknown",
        "verdict": worst([finding.verdict for finding in findings]),
        "seconds": round(seconds, 1),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "named": named,
        "rates": rates.of(reports),
    }


def text_of(document: dict[str, Any]) -> str:
    """Format the document as a table. A fix follows its finding in a separate line."""
    ranks = plural(document["ranks"], "rank")
    hosts = plural(len(document["hosts"]), "host")
    lines = [f"{ranks} on {hosts}, {document['device']}", ""]

    # Only the first row of an area shows its name.
    counts: Counter[str] = Counter()
    last_area = ""
    for row in document["findings"]:
        counts[row["verdict"]] += 1
        lines += _row(row, show_area=row["area"] != last_area)
        last_area = row["area"]

    # Users read the end of the output first, so the ranks to inspect and the verdict come last.
    lines.append("")
    for who, subjects in document["named"].items():
        lines += textwrap.wrap(
            f"inspect {who}: {', '.join(subjects)}", WIDTH, subsequent_indent="  "
        )
    totals = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict))
    lines.append(f"{document['verdict']}: {totals}, in {document['seconds']:.1f} s")
    return "\n".join(lines)


def _row(row: dict[str, Any], show_area: bool) -> list[str]:
    area = row["area"] if show_area else ""
    text = f"{row['verdict']}  {area:<12}{row['subject']}: {row['measured']}"
    is_problem = row["verdict"] != "pass"
    if is_problem and row["expected"]:
        text += f" (expected: {row['expected']})"

    # Never break a path or a command, which users copy.
    indent = " " * 18
    lines = textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if is_problem and row["fix"]:
        fix = f"fix: {row['fix']}"
        lines += textwrap.wrap(
            fix,
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
    return lines


def to_json(document: dict[str, Any]) -> str:
    """Serialize the document."""
    return json.dumps(document, indent=1)
