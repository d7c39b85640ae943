"""Datasets, with one Python file per dataset.

The file's name is the dataset's name in TOML, and its function ``open_source(request)`` returns the rows.

A source is a ``Table`` (rows can be read in any order) or ``Shards`` (rows of a shard are read in sequence,
from any row on). It does not depend on tokens, ranks or the order of training. Its rows must depend only on
the files, because every rank must see the same dataset. A row is a mapping of named columns, or a
``BadRow`` with a reason. A source never stops at a bad row, because the reader decides what to do.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used.

    Attributes:
        reason: why the row cannot be used. Rows are counted by reason, so it must not contain numbers.
        harmless: True if the row is only counted and never stops a run, for example because its text is
            empty.
        detail: the part of the row to correct, such as a column, a length or a key.
    """

    reason: str
    harmless: bool = False
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


Row = Mapping[str, Any] | BadRow


_DEFAULT_SPLITS = {"validation.split": "validation", "task.test_split": "test"}
"""Options that name a split and whose default is not "train"."""


@dataclass(frozen=True)
class Request:
    """A dataset to open.

    Attributes:
        path: value of the option that names the dataset's path, or None.
        option: name of this option, for errors.
        split: the split to read.
        split_option: name of the option that sets ``split``, for errors.
        subset: the subset to read, or None.
        subset_option: name of the option that sets ``subset``, for errors.
        streaming: value of data.streaming.
        max_row_bytes: rows that are larger are bad rows.
        header: True if the first line of a TSV or CSV file names its columns. Otherwise the columns are named
            "0", "1", ...
    """

    path: str | None = None
    option: str = "training.dataset_path"
    split: str = "train"
    split_option: str = "data.split"
    subset: str | None = None
    subset_option: str = "data.subset"
    streaming: bool | None = None
    max_row_bytes: int = 16 * 2**20
    header: bool = True

    @property
    def has_default_split(self) -> bool:
        """True if the split is the default of its option.

        A dataset that has only one split then ignores it.
        """
        return self.split == _DEFAULT_SPLITS.get(self.split_option, "train")


class Source(Protocol):
    """Common interface of tables and shards."""

    @property
    def total_bytes(self) -> int | None:
        """Size of the files, by which ``data.mode`` chooses between memory and stream. None if unknown."""
        ...

    def files(self) -> Mapping[str, str]:
        """Return for each file (or dataset) a fingerprint of its size and of samples of its content."""
        ...

    def check_unchanged(self) -> None:
        """Raise ConfigError with the file's name if a file was changed, moved or removed after it was opened."""
        ...


@runtime_checkable
class Table(Source, Protocol):
    """A dataset whose rows can be read in any order."""

    @property
    def num_rows(self) -> int:
        """Number of rows in all files."""
        ...

    def row(self, index: int) -> Row:
        """Return row ``index``, 0..num_rows-1."""
        ...

    def place(self, index: int) -> str:
        """Return the location of a row for messages: ``data/a.jsonl:17``."""
        ...


@runtime_checkable
class Shards(Source, Protocol):
    """A dataset whose rows can only be read in sequence: compressed files, row groups, streams from a hub."""

    @property
    def num_shards(self) -> int:
        """Number of parts that can be read independently."""
        ...

    def rows(self, shard: int, start: int = 0) -> Iterator[Row]:
        """Yield the rows of one shard, starting at number ``start``. Bad rows are included."""
        ...

    def shard_place(self, shard: int, number: int) -> str:
        """Return the location of a row for messages."""
        ...


def names() -> list[str]:
    """Return the names of all datasets, sorted."""
    return sorted(
        file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_")
    )


def find(name: str, option: str = "training.dataset") -> ModuleType:
    """Return the module of a dataset. ``name`` is a name in this folder, or the path of a user's file.

    Raises:
        ConfigError: the file does not exist (the message suggests a similar name and lists all names), or
            it has no open_source.
    """
    if name.endswith(".py"):
        return own_file.load(name, own_file.DATASET, option)
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f'did you mean "{near[0]}"? there are' if near else "use one of"
        problem = Problem(
            option, name, "is not a file of shardtrain/data/sources", f"{hint} {', '.join(known)}"
        )
        raise ConfigError(problem)
    return importlib.import_module(f"{__name__}.{name}")


Key = tuple[int, int]
"""Identifies a row of any source: its shard (0 in a table), and its number in the shard."""


def every_row(source: Table | Shards) -> Iterator[tuple[Key, Row]]:
    """Yield all rows of a source in its own order, each with its key."""
    for shard in range(num_parts(source)):
        for number, row in enumerate(rows_of(source, shard, 0)):
            yield (shard, number), row


def num_parts(source: Table | Shards) -> int:
    """Return the number of shards of a source. 1 for a table."""
    return 1 if isinstance(source, Table) else source.num_shards


def rows_of(source: Table | Shards, shard: int, start: int) -> Iterator[Row]:
    """Return the rows of one shard, or of a table, starting at number ``start``."""
    if isinstance(source, Table):
        return (source.row(index) for index in range(start, source.num_rows))
    return source.rows(shard, start)


def place_of(source: Table | Shards, key: Key) -> str:
    """Return the location of a row for messages."""
    return source.place(key[1]) if isinstance(source, Table) else source.shard_place(*key)
