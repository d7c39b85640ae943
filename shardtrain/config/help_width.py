"""Wrap help texts for narrow terminals."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

_DEEP = 20
"""Minimum indentation of a line that continues the second column of the previous line."""
_LEAST_COLUMN = 36
"""Minimum width of the second column. If it is narrower, its text moves below the first column."""


@dataclass
class _Entry:
    """A paragraph, a row with two columns, or a single line."""

    first: str
    second: str = ""
    column: int = 0
    is_prose: bool = False


def fitted(text: str, width: int) -> str:
    """Wrap a text to ``width`` columns. A text that already fits stays unchanged.

    >>> print(fitted("Trains here, or elsewhere.\\n\\n  --nproc N     processes, one for each device\\n", 24))
    Trains here, or
    elsewhere.
    <BLANKLINE>
      --nproc N
              processes, one
              for each
              device
    <BLANKLINE>
    """
    if all(len(line) <= width for line in text.splitlines()):
        return text
    lines: list[str] = []
    for entry in _entries(text):
        lines += _lines(entry, width)
    return "\n".join(lines) + "\n"


def _entries(text: str) -> list[_Entry]:
    """Parse the text of a help page into paragraphs, rows of two columns, and single lines."""
    entries: list[_Entry] = []
    for line in text.splitlines():
        content = line.strip()
        indent = len(line) - len(line.lstrip())
        # A line continues the previous usage, second column or paragraph.
        before = entries[-1] if entries and entries[-1].first and content else None
        is_deep = indent >= _DEEP
        if before and is_deep and before.first.startswith("usage:"):
            before.first += f" {content}"
            continue
        if before and is_deep:
            before.second = f"{before.second} {content}".strip()
            before.column = before.column or indent
            continue
        if before and before.is_prose and not indent:
            before.first += f" {content}"
            continue

        # It starts a row or a single line. The widest gap within an indented line separates the columns.
        gaps = []
        if indent:
            gaps = [gap for gap in re.finditer(r" {2,}(?=\S)", line) if gap.start()]
        gap = max(gaps, key=lambda gap: len(gap[0]), default=None)
        if gap:
            entries.append(_Entry(line[: gap.start()], line[gap.end() :], gap.end()))
            continue
        is_prose = not indent and not line.startswith("usage:")
        entries.append(_Entry(line.rstrip(), is_prose=is_prose))
    return entries


def _lines(entry: _Entry, width: int) -> list[str]:
    width_of_indent = len(entry.first) - len(entry.first.lstrip())
    if not entry.is_prose:
        # Indent continued lines further, to set the rows apart.
        width_of_indent += 4
    indent = " " * width_of_indent
    first = _wrap(entry.first, width, "", indent) or [""]
    if not entry.second:
        return first
    if width - entry.column < _LEAST_COLUMN or len(first) > 1:
        below = indent + "    "
        return first + _wrap(entry.second, width, below, below)
    column = " " * entry.column
    second = _wrap(entry.second, width, column, column)
    if len(entry.first) >= entry.column:
        return first + second
    return [entry.first.ljust(entry.column) + second[0].lstrip(), *second[1:]]


def _wrap(text: str, width: int, start: str, indent: str) -> list[str]:
    lead = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.lstrip(), width, initial_indent=start or lead, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
