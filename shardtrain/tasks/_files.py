"""Read the rows of a task in chunks from the files that the configuration names.

Apply the policy for bad rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from shardtrain.config.schema import Config, DataSource, Training, Validation
from shardtrain.data import sources
from shardtrain.data.build_dataset import NamedDataset, request_for
from shardtrain.data.documents.bad_rows import attempt
from shardtrain.data.documents.growth import Growth
from shardtrain.data.documents.read_documents import (
    TOO_LONG,
    BadRows,
    RowStats,
    chunks,
    log_skipped_rows,
)
from shardtrain.data.documents.row_template import template_of
from shardtrain.data.sources import BadRow, Key, Row, Shards, Table, every_row, place_of
from shardtrain.utils.errors import DataError

T = TypeVar("T")
Make = Callable[[Sequence[Row | BadRow]], Iterable[T | BadRow]]
"""Converts rows of a file to rows of a task, in order. Yields a BadRow for a row that cannot be used."""


class FileRows(list[T], Generic[T]):
    """Rows of a dataset with its fingerprint and files; see ``data.row_stream.Rows``."""

    fingerprint: str = ""
    files: Mapping[str, str]


def section_of(config: Config, split: str) -> tuple[Training | Validation, NamedDataset]:
    """Return the section and the dataset of a split, "train", "validation" or "test"."""
    training = config.training
    validation = config.validation
    if split == "train":
        source = DataSource(training.dataset, training.dataset_path)
        return training, NamedDataset(
            training.dataset, source, "training.dataset", "training.dataset_path"
        )
    # a test set is read like the validation set, from other files
    path = validation.dataset_path
    part = validation.split
    option = "validation.dataset_path"
    if split == "test":
        path = config.task.test_dataset_path
        part = config.task.test_split
        option = "task.test_dataset_path"
    source = DataSource(validation.dataset, path, split=part)
    return validation, NamedDataset(validation.dataset, source, "validation.dataset", option)


def open_files(config: Config, split: str) -> Table | Shards:
    """Open the files of a split. Raises ConfigError if they cannot be opened."""
    _, named = section_of(config, split)
    module = sources.find(named.source.dataset, option=named.dataset_option)
    return module.open_source(request_for(config, named))


def read(config: Config, split: str, make: Make[T]) -> FileRows[T]:
    """Read all rows of a split. The task sets ``fingerprint``, because only it knows what its rows depend on.

    Empty and too long rows of the training and validation sets are skipped, counted and logged.

    Raises:
        ConfigError: the dataset cannot be opened.
        DataError: a row is bad, with file and line, unless data.bad_rows skips bad rows of the training set.
    """
    source = open_files(config, split)
    _, named = section_of(config, split)
    policy = BadRows.of(config.data)
    stats = RowStats()
    template = template_of(config.data, None, "row")

    def apply_template(rows: Sequence[Row | BadRow]) -> Iterable[T | BadRow]:
        if template is None:
            return make(rows)
        return make([attempt(template.row, row) for row in rows])

    rows = Growth(named.name, source.total_bytes).rows(every_row(source))
    good_rows = FileRows(_good_rows(source, rows, split, apply_template, policy, stats))
    if stats.rows > stats.documents:
        policy.judge(stats, f"dataset {named.name}")
    log_skipped_rows(
        f"dataset {named.name}", stats.reasons(), stats.num_bad + stats.harmless[TOO_LONG]
    )
    good_rows.files = source.files()
    return good_rows


def _good_rows(
    source: Table | Shards,
    rows: Iterable[tuple[Key, Row]],
    split: str,
    make: Make[T],
    policy: BadRows,
    stats: RowStats,
) -> Iterator[T]:
    """Yield the usable rows, and count all rows in ``stats``. Raises DataError as ``read`` does."""
    for chunk in chunks(rows):
        task_rows = make([row for _, row in chunk])
        for (key, _), task_row in zip(chunk, task_rows, strict=True):
            if not isinstance(task_row, BadRow):
                stats.documents += 1
                stats.rows += 1
                yield task_row
                continue
            place = place_of(source, key)
            stats.add_bad(task_row, place)
            # Every row of a held-out set affects the result. A bad row of a test set is an error, and in a
            # validation set only harmless ones are skipped.
            if split == "test" or (split == "validation" and not task_row.harmless):
                raise DataError(
                    f"{place}: {task_row}; correct it, because each row of a held-out set counts"
                )
            policy.meet(task_row, place)
