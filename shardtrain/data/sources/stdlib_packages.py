"""Lines of the running Python's standard library, labelled with their package: something to classify on any
machine.

The text differs between Python versions; its fingerprint says so when a run is continued on another one.
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
"""Labels, as [task] names them."""
SPLITS = {"train": range(2, 10), "validation": (0,), "test": (1,)}
"""Of ten lines in a row, those of a split."""
MIN_CHARACTERS = 24
MAX_LINES = 1500
"""Shorter lines say little, and a package with many lines gives its first."""


def open_source(request: Request) -> Table:
    """One row ``{"text": ..., "label": ...}`` per line that is in one place alone, package after package.

    Raises:
        ConfigError: when a path is given, as this dataset takes none, or the split is unknown.
        DataError: when the files are missing or unreadable.
    """
    if request.path is not None:
        rule = "has no effect with the dataset stdlib_packages"
        raise ConfigError(Problem(request.option, request.path, rule, 'remove it, or use the dataset "tsv"'))
    if request.split not in SPLITS:
        fix = f"use one of {', '.join(SPLITS)}"
        raise ConfigError(Problem(request.split_option, request.split, "is not a split of stdlib_packages", fix))
    library = open_folder(Path(sysconfig.get_path("stdlib")))
    assert isinstance(library, Library)
    rows = shared_opening.once(library.listed_at, lambda: _rows(library, SPLITS[request.split]))
    if not rows:
        raise DataError("the dataset stdlib_packages found none of its packages; install the full Python")
    return Lines(library.members, [(text, label, place) for text, label, place in rows])


def _rows(library: Library, parts: Container[int]) -> list[list[str]]:
    """Text, label and place of each row of a split, which are these of ten."""
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
    # Lines that are in one place alone: one that two packages have would have two labels.
    rows = []
    for package, lines in lines_of.items():
        unique = [(line, place) for line, place in lines if len(line) >= MIN_CHARACTERS and count[line] == 1]
        for number, (line, place) in enumerate(unique[:MAX_LINES]):
            if number % 10 in parts:
                rows.append([line, package, place])
    return rows


@dataclass
class Lines(Library):
    """Lines as rows; see Table."""

    lines: list[tuple[str, str, str]]

    @property
    def num_rows(self) -> int:
        """Lines."""
        return len(self.lines)

    def row(self, index: int) -> Row:
        text, label, _ = self.lines[index]
        return {"text": text, "label": label}

    def place(self, index: int) -> str:
        return self.lines[index][2]
