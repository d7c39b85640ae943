"""Findings of the doctor, and the facts of all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
        missing: Rank that did not answer -> the last check that it began.
    """

    size: int
    facts: Mapping[int, Mapping[str, Facts]]
    missing: Mapping[int, str] = field(default_factory=dict)

    def of(self, area: str) -> dict[int, Facts]:
        """Return the facts of an area by rank, for ranks whose check succeeded."""
        by_rank: dict[int, Facts] = {}
        for rank in sorted(self.facts):
            facts = self.facts[rank].get(area)
            if facts is not None and STOPPED not in facts and ERROR not in facts:
                by_rank[rank] = facts
        return by_rank

    def host(self, rank: int) -> str:
        """Return the host of a rank, or "" if unknown."""
        facts = self.facts.get(rank, {}).get("hosts", {})
        return str(facts.get("hostname", ""))

    def hosts(self) -> dict[str, list[int]]:
        """Return the ranks of each host."""
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(self.facts):
            ranks_of.setdefault(self.host(rank), []).append(rank)
        return ranks_of

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
        for host, ranks_of_host in hosts.items():
            named = [rank for rank in ranks_of_host if rank in ranks]
            if named == ranks_of_host:
                texts.append(f"{host} ({_ranks(named)})")
            elif named:
                texts.append(f"{_ranks(named)} ({host})")
        # The host of a rank that did not answer is unknown.
        silent = [rank for rank in sorted(ranks) if rank not in self.facts]
        if silent:
            texts.append(_ranks(silent))
        return first_few(texts, 8)


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
    texts = []
    for run in runs:
        if len(run) == 1:
            texts.append(str(run[0]))
        else:
            texts.append(f"{run[0]}-{run[-1]}")
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {first_few(texts, 8)}"


def first_few(texts: Sequence[str], limit: int) -> str:
    """Join texts with commas. Beyond the limit, write only the number of remaining texts.

    >>> first_few(["0", "1", "2"], 2)
    '0, 1 and 1 more'
    """
    listed = ", ".join(texts[:limit])
    if len(texts) <= limit:
        return listed
    return f"{listed} and {len(texts) - limit} more"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun.

    >>> plural(1, "host"), plural(2, "host")
    ('1 host', '2 hosts')
    """
    if count > 1:
        noun += "s"
    return f"{count} {noun}"


Judged = tuple[Verdict, str, str, str]
"""Verdict, measured, expected, fix."""
Rule = Callable[[Facts], Judged | None]
"""Judges the facts of one rank. Returns None if the rule does not apply to it."""


def warn_if(is_bad: bool, measured: str, expected: str, fix: str) -> Judged:
    """Return a warning with its fix if ``is_bad``, or else a pass."""
    if is_bad:
        return "warn", measured, expected, fix
    return "pass", measured, expected, ""


def kernel_text(path: str | Path) -> str:
    """Return the text of a kernel file, or "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def kernel_numbers(path: str) -> list[int]:
    """Return the numbers in a kernel file. Empty if it has other text or cannot be read."""
    try:
        return [int(number) for number in kernel_text(path).split()]
    except ValueError:
        return []


def has_infiniband() -> bool:
    """True if this host has an InfiniBand or RoCE card."""
    folder = "/sys/class/infiniband"
    return os.path.isdir(folder) and bool(os.listdir(folder))


def each(
    reports: Reports,
    area: str,
    rules: Mapping[str, Rule],
) -> Iterator[Finding]:
    """Apply the rule of each subject to each rank. Ranks with the same verdict share a row.

    The row shows the measurement of the first of these ranks.
    """
    by_rank = reports.of(area)
    for subject, judge in rules.items():
        # Ranks may have different measurements in one row, but not different fixes.
        measurements: dict[tuple[Verdict, str, str], str] = {}
        ranks_of_row: dict[tuple[Verdict, str, str], list[int]] = {}
        for rank, facts in by_rank.items():
            judged = judge(facts)
            if judged is None:
                continue
            verdict, measured, expected, fix = judged
            row = (verdict, expected, fix)
            measurements.setdefault(row, measured)
            ranks_of_row.setdefault(row, []).append(rank)

        for row, measured in measurements.items():
            verdict, expected, fix = row
            ranks = ranks_of_row[row]
            # Name the ranks of a problem unless it affects all ranks.
            affects_all = len(ranks) == len(by_rank)
            if verdict == "pass" or affects_all:
                yield Finding(area, subject, verdict, measured, expected, fix)
            else:
                text = f"{measured} on {reports.who(ranks)}"
                yield Finding(area, subject, verdict, text, expected, fix, tuple(ranks))


def worst(verdicts: Collection[Verdict]) -> Verdict:
    """Return the worst verdict.

    >>> worst(["pass", "warn"]), worst([])
    ('warn', 'pass')
    """
    if "fail" in verdicts:
        return "fail"
    if "warn" in verdicts:
        return "warn"
    return "pass"
