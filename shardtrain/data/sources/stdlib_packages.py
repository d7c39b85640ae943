"""Lines of the running Python's standard library, labelled with their package.

These are data for classification that exist on every machine.
The text differs between Python versions, and so does its fingerprint.
So a run cannot resume with another version.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardtrain.data import shared_opening
from shardtrain.data.sources import Request, Row, Table
from shardtrain.data.sources.python_stdlib import Library, open_folder
from shardtrain.utils.errors import ConfigError, DataError, Problem

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest", "xml")
"""Labels, in the order that [task] uses."""
SPLITS = {"train": range(2, 10), "validation": (0,), "test": (1,)}
"""For each split, its lines among ten consecutive lines."""
MIN_CHARACTERS = 24
MAX_LINES = 1500
"""Lines shorter than MIN_CHARACTERS are skipped. Only the first MAX_LINES lines of each package are used."""


def open_source(request: Request) -> Table:
    """Open one row ``{"text": ..., "label": ...}`` per line that occurs only once, package after package.

    Raises:
        ConfigError: a path is given, which this dataset does not support, or the split is unknown.
        DataError: the files are missing or unreadable.
    """
    if request.path is not None:
        raise ConfigError(
            Problem(
                request.option,
                request.path,
                rule="has no effect with the dataset stdlib_packages",
                fix='remove it, or use the dataset "tsv"',
            )
        )
    if request.split not in SPLITS:
        raise ConfigError(
            Problem(
                request.split_option,
                request.split,
                rule="is not a split of stdlib_packages",
                fix=f"use one of {', '.join(SPLITS)}",
            )
        )
    library = open_folder(Path(sysconfig.get_path("stdlib")))
    assert isinstance(library, Library)
    rows = shared_opening.once(library.listed_at, lambda: _rows(library, SPLITS[request.split]))
    if not rows:
        raise DataError(
            "the dataset stdlib_packages found none of its packages; install the full Python"
        )
    return Lines(library.members, [(text, label, place) for text, label, place in rows])


def _rows(library: Library, parts: Container[int]) -> list[list[str]]:
    """Return text, label and place of each row of a split. ``parts`` is the split's value in ``SPLITS``."""
    lines_of: dict[str, list[tuple[str, str]]] = {name: [] for name in PACKAGES}
    count: dict[str, int] = {}
    for index, file in enumerate(library.members):
        package = file.name.partition("/")[0]
        if package not in lines_of:
            continue
        row = library.row(index)
        assert isinstance(row, Mapping)
        for number, line in enumerate(row["text"].splitlines(), start=1):
            line = line.strip()
            count[line] = count.get(line, 0) + 1
            lines_of[package].append((line, f"{file.path}:{number}"))
    # Use only lines that occur once, because a line in two packages would have two labels.
    rows = []
    for package, lines in lines_of.items():
        number = 0
        for line, place in lines:
            if len(line) < MIN_CHARACTERS or count[line] > 1 or number == MAX_LINES:
                continue
            # The last digit of a line's number decides which split contains it.
            if number % 10 in parts:
                rows.append([line, package, place])
            number += 1
    return rows


@dataclass
class Lines(Library):
    """A table in which each row is a line, see ``Table``."""

    lines: list[tuple[str, str, str]]

    @property
    def num_rows(self) -> int:
        """Number of lines."""
        return len(self.lines)

    def row(self, index: int) -> Row:
        text, label, _ = self.lines[index]
        return {"text": text, "label": label}

    def place(self, index: int) -> str:
        return self.lines[index][2]
