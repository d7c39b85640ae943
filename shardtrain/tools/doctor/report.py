"""The report: a table for people, a document for programs, and the exit status."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from shardtrain.tools.doctor.result import Finding, Said, worst

EXIT_CODES = {"config": 2, "versions": 2, "environment": 2, "ranks": 6, "network": 6, "memory": 7, "storage": 8}
"""With what a run would end that meets such a failure; 1 for other areas. See ``errors.py``."""

WIDTH = 118


def exit_code(findings: Sequence[Finding], strict: bool = False) -> int:
    """0 where nothing failed, else the status of the first area that did; with ``strict`` a warning is a failure."""
    bad = [one for one in findings if one.verdict == "fail" or (strict and one.verdict == "warn")]
    return EXIT_CODES.get(bad[0].area, 1) if bad else 0


def document(said: Said, findings: Sequence[Finding], seconds: float) -> dict[str, Any]:
    """What ``--json`` prints: all findings, and who is slow, odd or failing."""
    return {
        "format": 1,
        "ranks": said.size,
        "hosts": {host: len(ranks) for host, ranks in said.hosts().items()},
        "device": _device(said),
        "verdict": worst([one.verdict for one in findings]),
        "seconds": round(seconds, 1),
        "findings": [dataclasses.asdict(one) for one in findings],
        "named": _named(said, findings),
    }


def _device(said: Said) -> str:
    names = {str(facts["name"]) for facts in said.of("devices").values()}
    return ", ".join(sorted(names)) or "unknown"


def _named(said: Said, findings: Sequence[Finding]) -> dict[str, list[str]]:
    """Ranks that some row is about, and those rows: the nodes to look at first."""
    found: dict[str, list[str]] = {}
    for one in findings:
        if one.ranks and one.verdict != "pass":
            found.setdefault(said.who(one.ranks), []).append(f"{one.area}: {one.subject}")
    return found


def text_of(told: dict[str, Any]) -> str:
    """The same document as a table; a fix stands below each row that needs one."""
    hosts, device = len(told["hosts"]), told["device"]
    ranks = f"{told['ranks']} rank{'s' if told['ranks'] > 1 else ''}"
    lines = [f"{ranks} on {hosts} host{'s' if hosts > 1 else ''}, {device}", ""]
    area = ""
    for row in told["findings"]:
        shown = row["area"] if row["area"] != area else ""
        area = row["area"]
        lines += _row(row, shown)
    counts = {
        verdict: sum(row["verdict"] == verdict for row in told["findings"]) for verdict in ("pass", "warn", "fail")
    }
    lines.append("")
    for who, subjects in told["named"].items():
        lines += textwrap.wrap(f"look at {who}: {', '.join(subjects)}", WIDTH, subsequent_indent="  ")
    totals = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines.append(f"{told['verdict']}: {totals}, in {told['seconds']:.1f} s")
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


def to_json(told: dict[str, Any]) -> str:
    """The document as text."""
    return json.dumps(told, indent=1)
