"""The report: a table for people, a document for programs, and the exit status."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any, get_args

from shardtrain.tools.doctor.result import Finding, Reports, Verdict, worst

EXIT_CODES = {"config": 2, "versions": 2, "environment": 2, "ranks": 6, "network": 6, "memory": 7, "storage": 8}
"""With what a run would end that meets such a failure; 1 for other areas. See ``errors.py``."""

WIDTH = 118


def exit_code(findings: Sequence[Finding], strict: bool = False) -> int:
    """0 where nothing failed, else the status of the first area that did; with ``strict`` a warning is a failure."""
    bad = [one for one in findings if one.verdict == "fail" or (strict and one.verdict == "warn")]
    return EXIT_CODES.get(bad[0].area, 1) if bad else 0


def document(reports: Reports, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """What ``--json`` prints: all findings, and who is slow, odd or failing."""
    from shardtrain.tools.doctor import rates  # which knows torch, and --help need not

    names = {str(facts["name"]) for facts in reports.of("devices").values()}
    # ranks that some row is about, and those rows: the nodes to look at first
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
    """The same document as a table; a fix is below each row that needs one."""
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
        lines += textwrap.wrap(f"look at {who}: {', '.join(subjects)}", WIDTH, subsequent_indent="  ")
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
    """The document as text."""
    return json.dumps(document, indent=1)
