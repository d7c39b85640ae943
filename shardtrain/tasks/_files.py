"""Read the rows of a task in chunks from the files that the configuration names. Apply the policy for bad rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from shardtrain.config.schema import Config, DataSource, Training, Validation
from shardtrain.data import sources
from shardtrain.data.build_dataset import NamedDataset, request_for
from shardtrain.data.documents.bad_rows import attempt
from shardtrain.data.documents.growth import Growth
from shardtrain.data.documents.read_documents import TOO_LONG, BadRows, RowStats, chunks, log_left_out
from shardtrain.data.documents.row_template import template_of
from shardtrain.data.sources import BadRow, Key, Row, Shards, Table, every_row, place_of
from shardtrain.utils.errors import DataError

T = TypeVar("T")
Make = Callable[[Sequence[Row | BadRow]], Iterable[T | BadRow]]
"""What a task makes of some rows, one after the other; a row that cannot be used comes back as a BadRow."""


class FileRows(list[T], Generic[T]):
    """Rows of a set with what tells them from others; see ``data.row_stream.Rows``."""

    fingerprint: str = ""
    files: Mapping[str, str]


def section_of(config: Config, split: str) -> tuple[Training | Validation, NamedDataset]:
    """The options that name a split's files: "train", "validation" or "test"."""
    training = config.training
    validation = config.validation
    if split == "train":
        source = DataSource(training.dataset, training.dataset_path)
        return training, NamedDataset(training.dataset, source, "training.dataset", "training.dataset_path")
    # A test set is read as the validation set is, from files of its own.
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
    """The rows of a split as they lie in its files; raises ConfigError when they cannot be opened."""
    _, named = section_of(config, split)
    return sources.find(named.source.dataset, option=named.dataset_option).open_source(request_for(config, named))


def read(config: Config, split: str, make: Make[T]) -> FileRows[T]:
    """Read all rows of a split. The task sets ``fingerprint``, because only it knows what its rows depend on.

    Rows that are empty or too long are left out of the training and validation sets, counted and logged.

    Raises:
        ConfigError: if the dataset cannot be opened.
        DataError: at a bad row, with file and line, unless data.bad_rows leaves it out of the training set.
    """
    source = open_files(config, split)
    _, named = section_of(config, split)
    policy = BadRows.of(config.data)
    tally = RowStats()
    template = template_of(config.data, None, "row")

    def make_of_columns(rows: Sequence[Row | BadRow]) -> Iterable[T | BadRow]:
        return make(rows if template is None else [attempt(template.row, row) for row in rows])

    rows = Growth(named.name, source.total_bytes).rows(every_row(source))
    good_rows = FileRows(_good_rows(source, rows, split, make_of_columns, policy, tally))
    if tally.rows > tally.documents:
        policy.judge(tally, f"dataset {named.name}")
    log_left_out(f"dataset {named.name}", tally.reasons(), tally.num_bad + tally.harmless[TOO_LONG])
    good_rows.files = source.files()
    return good_rows


def _good_rows(
    source: Table | Shards,
    rows: Iterable[tuple[Key, Row]],
    split: str,
    make: Make[T],
    policy: BadRows,
    tally: RowStats,
) -> Iterator[T]:
    for chunk in chunks(rows):
        made = make([row for _, row in chunk])
        for (key, _), one in zip(chunk, made, strict=True):
            if not isinstance(one, BadRow):
                tally.documents += 1
                tally.rows += 1
                yield one
                continue
            place = place_of(source, key)
            tally.add_bad(one, place)
            if split == "test" or (split == "validation" and not one.harmless):
                raise DataError(f"{place}: {one}; correct it, because each row of a held-out set counts")
            policy.meet(one, place)
