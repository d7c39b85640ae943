"""Findings of the doctor, and the facts of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["pass", "warn", "fail"]
Facts = dict[str, Any]
"""Facts of one area, serializable as JSON."""

EQUAL = "equal on all ranks"
STOPPED = "stopped"
"""Key in the facts of an area that exceeded its time limit. The value is the last position of the check."""
ERROR = "error"
"""Key in the facts of an area whose check raised an error. The value is the message."""


@dataclass(frozen=True)
class Finding:
    """One row of the report.

    ``ranks`` are the slow, different or failing ranks. Empty if the finding concerns all ranks.
    """

    area: str
    subject: str
    verdict: Verdict
    measured: str
    expected: str = ""
    fix: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reports:
    """Facts of all ranks that answered.

    Attributes:
        facts: Rank -> area -> facts.
        missing: Rank -> last known position.
    """

    size: int
    facts: Mapping[int, Mapping[str, Facts]]
    missing: Mapping[int, str] = field(default_factory=dict)

    def of(self, area: str) -> dict[int, Facts]:
        """Return the facts of an area by rank, for ranks whose check succeeded."""
        found = {rank: self.facts[rank][area] for rank in sorted(self.facts) if area in self.facts[rank]}
        return {rank: facts for rank, facts in found.items() if STOPPED not in facts and ERROR not in facts}

    def host(self, rank: int) -> str:
        """Return the host of a rank, or "" if unknown."""
        return str(self.facts.get(rank, {}).get("hosts", {}).get("hostname", ""))

    def hosts(self) -> dict[str, list[int]]:
        """Return the ranks of each host."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.facts):
            found.setdefault(self.host(rank), []).append(rank)
        return found

    def who(self, ranks: Collection[int]) -> str:
        """Format ranks, with hosts if there are several: ``rank 3 (host-b)``, ``host-b (ranks 8-15)``."""
        if not ranks:
            return "no rank"
        if len(ranks) == self.size:
            return "rank 0" if self.size == 1 else "all ranks"
        hosts = self.hosts()
        if len(hosts) < 2:
            return _ranks(ranks)
        # Write the host first if all its ranks are included, and otherwise the ranks.
        texts = []
        for host, own in hosts.items():
            named = [rank for rank in own if rank in ranks]
            if named:
                texts.append(f"{host} ({_ranks(named)})" if named == own else f"{_ranks(named)} ({host})")
        silent = [rank for rank in sorted(ranks) if rank not in self.facts]
        if silent:
            texts.append(_ranks(silent))
        return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")


def _ranks(ranks: Collection[int]) -> str:
    """Format ranks with ranges.

    >>> _ranks([3]), _ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    more = f" and {len(texts) - 8} more" if len(texts) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts[:8])}{more}"


Judged = tuple[Verdict, str, str, str]
"""Verdict, measured, expected, fix."""


def warn_if(is_bad: bool, measured: str, expected: str, fix: str) -> Judged:
    """Return a warning with its fix if ``is_bad``, or else a pass."""
    return ("warn", measured, expected, fix) if is_bad else ("pass", measured, expected, "")


def kernel_text(path: str | Path) -> str:
    """Return the text of a kernel file, or "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def kernel_numbers(path: str) -> list[int]:
    """Return the numbers in a kernel file. Empty if it has other text or cannot be read."""
    try:
        return [int(word) for word in kernel_text(path).split()]
    except ValueError:
        return []


def each(reports: Reports, area: str, rules: Mapping[str, Callable[[Facts], Judged | None]]) -> Iterator[Finding]:
    """Apply the rule of each subject to each rank. Ranks with the same verdict share a row.

    The row shows the measurement of the first of these ranks.
    """
    for subject, judge in rules.items():
        rows: dict[tuple[str, str, str], tuple[Judged, list[int]]] = {}
        for rank, facts in reports.of(area).items():
            judged = judge(facts)
            if judged is not None:
                verdict, _, expected, fix = judged
                rows.setdefault((verdict, expected, fix), (judged, []))[1].append(rank)
        for (verdict, measured, expected, fix), ranks in rows.values():
            # Name the ranks of a problem unless it affects all ranks.
            if verdict != "pass" and len(ranks) < len(reports.of(area)):
                text = f"{measured} on {reports.who(ranks)}"
                yield Finding(area, subject, verdict, text, expected, fix, tuple(ranks))
            else:
                yield Finding(area, subject, verdict, measured, expected, fix)


def worst(verdicts: Collection[Verdict]) -> Verdict:
    """Return the worst verdict.

    >>> worst(["pass", "warn"]), worst([])
    ('warn', 'pass')
    """
    if "fail" in verdicts:
        return "fail"
    return "warn" if "warn" in verdicts else "pass"
