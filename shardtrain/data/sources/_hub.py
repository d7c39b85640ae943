"""Datasets that the library ``datasets`` reads: from the hub (streamed or downloaded), or saved on disk."""

from __future__ import annotations

import glob
import hashlib
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtrain.data import sandbox, shared_opening
from shardtrain.data.sources import BadRow, Request, Row, Shards, Table
from shardtrain.data.sources._arrow_offsets import (
    FULL_CHECK_BYTES,
    OUTSIDE,
    CheckedChunks,
    are_valid,
)
from shardtrain.data.sources._batches import rows_of_batch
from shardtrain.data.sources._data_files import File, FileSource
from shardtrain.data.sources._hub_errors import refusal
from shardtrain.utils import bounded_reads, libraries
from shardtrain.utils.errors import ConfigError, DataError, Problem
from shardtrain.utils.hub_errors import describe_error

_SAMPLES = 64
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class HubSet:
    """A dataset on the hub: its id, and the default options of a preset.

    If ``data_files`` is set, these files are read instead of the files of a subset and split.
    """

    name: str
    subset: str | None = None
    streaming: bool = False
    split: str | None = None
    data_files: str | None = None


def open_hub(request: Request, dataset: HubSet) -> Table | Shards:
    """Open a dataset on the hub. The user's subset and streaming options take precedence over the preset.

    Raises:
        ConfigError: the dataset cannot be opened.
            The message is one line, with the reason of the hub or library.
    """
    library = _datasets(request)
    streaming = dataset.streaming if request.streaming is None else request.streaming
    split = dataset.split or request.split
    is_part_of_split = "[" in split
    if streaming and is_part_of_split:
        rule = f"is not supported for a part of a split ({split})"
        fix = "set it to false, or read all of the split"
        raise ConfigError(Problem("data.streaming", True, rule, fix))
    options: dict[str, Any] = {
        "name": request.subset or dataset.subset,
        "split": split,
        "streaming": streaming,
    }
    if dataset.data_files is not None:
        options |= {"name": None, "data_files": {"train": dataset.data_files}}
    loaded: list[Any] = []

    def look() -> dict[str, Any]:
        try:
            options["revision"] = _revision(dataset.name, streaming)
            loaded.append(library.load_dataset(dataset.name, **options))
        except (Exception, SystemExit) as error:
            raise refusal(error, request, dataset.name, options) from error
        if streaming or is_part_of_split:
            return {"revision": options["revision"], "files": [], "rows": 0}
        files = [entry["filename"] for entry in loaded[0].cache_files]
        return {"revision": options["revision"], "files": files, "rows": len(loaded[0])}

    # One rank gets the revision from the hub and downloads it. The other ranks open the downloaded files in
    # the cache. If the dataset is a stream or part of a split, or if their node has a different cache, they
    # load the dataset themselves.
    shared = shared_opening.once(dataset.name, look)
    options["revision"] = shared["revision"]
    opened = loaded[0] if loaded else _cached(library, shared["files"], shared["rows"])
    if opened is None:
        try:
            opened = library.load_dataset(dataset.name, **options)
        except (Exception, SystemExit) as error:
            raise refusal(error, request, dataset.name, options) from error
    place = f"{dataset.name}/{options['name'] or 'default'}/{split}"
    if not streaming:
        return DatasetTable(opened, place, request)
    fingerprint = f"{options['revision']}:{dataset.data_files or ''}"
    return DatasetShards(opened, place, request, {place: fingerprint})


def _cached(library: Any, files: Sequence[str], num_rows: int) -> Any:
    """Open the files that another rank has downloaded to the library's cache.

    None if they are missing or incomplete on this node.
    """
    if not files or not all(map(os.path.exists, files)):
        return None
    dataset = library.concatenate_datasets([library.Dataset.from_file(file) for file in files])
    if len(dataset) != num_rows:
        return None
    return dataset


def open_saved(request: Request) -> Table | Shards:
    """Open a folder that ``save_to_disk`` has written, as a table, or with ``request.streaming`` as shards.

    Raises:
        ConfigError: the folder has no such split, or is not a saved dataset.
    """
    library = _datasets(request)
    folder = os.path.abspath(str(request.path))

    # Check the files in the sandbox first, once per host: opening a pipe would wait forever, and a
    # malicious file may fill the memory.
    def look() -> list[str]:
        pattern = os.path.join(glob.escape(folder), "**", "*")
        files = []
        for path in sorted(glob.glob(pattern, recursive=True)):
            kind = bounded_reads.kind(path)
            if kind in ("", "folder"):
                continue
            if kind != "file":
                rule = f"contains {os.path.basename(path)!r}, which is not a regular file"
                fix = "remove it from the folder"
                raise ConfigError(Problem(request.option, request.path, rule, fix))
            files.append(path)
        _prove({"folder": folder}, files, request)
        return []

    shared_opening.once(f"{folder} in a trial", look)
    try:
        saved = library.load_from_disk(request.path)
    except Exception as error:
        rule = f"cannot be opened as a saved dataset ({describe_error(error)})"
        fix = "save it again by save_to_disk"
        raise ConfigError(Problem(request.option, request.path, rule, fix)) from error

    # A dataset that was saved without a DatasetDict may know its split.
    splits = saved
    if not isinstance(saved, Mapping):
        splits = {str(saved.split or request.split): saved}
    if request.split not in splits:
        rule = f'has no split "{request.split}"'
        fix = f"set {request.split_option} to {' or '.join(splits)}"
        raise ConfigError(Problem(request.option, request.path, rule, fix))
    return _opened(splits[request.split], request)


def open_arrow_files(files: Sequence[File], request: Request) -> Table | Shards:
    """Open Arrow files in the format of the library's cache."""
    library = _datasets(request)

    # Try the files in the sandbox first, once per host, because a damaged file can crash a process.
    def look() -> list[str]:
        paths = [os.path.abspath(file.path) for file in files]
        _prove({"paths": paths}, paths, request)
        return []

    shared_opening.once(f"{request.path} in a trial", look)
    parts = []
    for file in files:
        try:
            parts.append(library.Dataset.from_file(file.path))
        except Exception as error:
            rule = f"cannot be read as Arrow ({describe_error(error)})"
            raise file.unusable(rule, "get the file again, or remove it") from error
    try:
        dataset = library.concatenate_datasets(parts)
    except Exception as error:
        raise ConfigError(
            Problem(
                request.option,
                request.path,
                rule=f"contains Arrow files with different columns ({describe_error(error)})",
                fix="select files with the same columns by a pattern",
            )
        ) from error
    return _opened(dataset, request)


def _prove(what: Mapping[str, Any], paths: Sequence[str], request: Request) -> None:
    """Let a child process open Arrow files within limits,
    because they may be compressed or contain wrong lengths.

    Raises:
        ConfigError: the folder is not a saved dataset.
        DataError: the child could not open the files.
        StorageError: the storage failed.
    """
    identities = []
    file_bytes = 0
    for path in paths:
        status = os.stat(path)
        identities.append((path, status.st_size, status.st_mtime_ns, status.st_ino))
        file_bytes += status.st_size
    key = hashlib.sha256(repr(identities).encode()).hexdigest()
    arguments = {**what, "file_bytes": file_bytes, "max_row_bytes": request.max_row_bytes}
    try:
        sandbox.open_in_child("arrow", arguments, f"{what} {key}")
    except sandbox.Failed as failed:
        error = OSError(failed.errno, failed.lines[0])
        trouble = bounded_reads.trouble(str(request.path), error)
        if trouble is not None:
            raise trouble from None
        reason = f"({failed.lines[0]})"
        if "folder" in what:
            rule = f"cannot be opened as a saved dataset {reason}"
            raise ConfigError(
                Problem(request.option, request.path, rule, "save it again by save_to_disk")
            ) from None
        rule = f"cannot be read as Arrow {reason}"
        fix = "get the file again, or remove it"
        raise DataError(str(Problem(request.option, request.path, rule, fix))) from None
    except sandbox.Refused as refused:
        fix = refused.fix or (
            "get the files from their source again, remove them, or write them without compression"
        )
        raise DataError(f"{request.option}={request.path}: {refused}; {fix}") from None


def _opened(dataset: Any, request: Request) -> Table | Shards:
    """Return a dataset as a table or, with ``request.streaming``, as shards."""
    place = str(request.path)
    # The fingerprint uses only the last part of the path. It stays the same if the folder is moved.
    table = DatasetTable(dataset, place, request, short=os.path.basename(os.path.abspath(place)))
    if not request.streaming:
        return table
    num_shards = max(min(len(dataset.cache_files), len(dataset)), 1)
    shards = dataset.to_iterable_dataset(num_shards=num_shards)
    return DatasetShards(shards, place, request, table.files(), table)


class DatasetTable:
    """A local dataset in memory-mapped Arrow files, see ``Table``.

    Values are returned in their stored form. Images and sounds are not decoded.
    """

    def __init__(self, dataset: Any, name: str, request: Request, short: str | None = None) -> None:
        self._dataset = dataset.with_format("arrow")
        self._name = name
        self._request = request
        self._short = short or name
        self._chunks: CheckedChunks | None = None
        table = dataset.data.table
        if table.nbytes > FULL_CHECK_BYTES:
            self._chunks = CheckedChunks(table)
        self.num_rows: int = len(dataset)
        self.total_bytes: int | None = int(dataset.data.nbytes)
        paths = sorted({entry["filename"] for entry in dataset.cache_files})
        files = []
        for path in paths:
            status = os.stat(path)
            size, mtime, inode = status.st_size, status.st_mtime_ns, status.st_ino
            files.append(File(os.path.basename(path), path, request.option, size, mtime, inode))
        self._cached = FileSource(files)

    def row(self, index: int) -> Row:
        if not 0 <= index < self.num_rows:
            raise IndexError(index)
        if self._chunks is not None and not self._chunks.is_valid(self._stored_at(index)):
            batch = self._dataset[index]
            # other rows of the chunk may be valid
            if not are_valid(batch):
                return BadRow(OUTSIDE)
        (row,) = rows_of_batch(self._dataset[index], self._request.max_row_bytes)
        return row

    def _stored_at(self, index: int) -> int:
        """Return the number of a row in the table. A saved dataset may be a selection of its rows."""
        selection = getattr(self._dataset, "_indices", None)
        if selection is None:
            return index
        return int(selection.column(0)[index].as_py())

    @property
    def is_checked_by_row(self) -> bool:
        """True if the table is too large to have been checked when it was opened."""
        return self._chunks is not None

    def __getstate__(self) -> dict[str, Any]:
        # Omit the chunks, because pickle would copy the batches of the table.
        return {**self.__dict__, "_chunks": self._chunks is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        is_large = bool(self._chunks)
        self._chunks = CheckedChunks(self._dataset.data.table) if is_large else None

    def place(self, index: int) -> str:
        return f"{self._name}: row {index} from 0"

    def files(self) -> Mapping[str, str]:
        """Return one entry: a hash of the columns, the number of rows, and the contents of 64 rows.

        The files are not hashed, because different versions of the library write
        different bytes for the same rows.
        """
        digest = hashlib.sha256(f"{self.num_rows}\0{self._dataset.column_names}".encode())
        num_samples = min(_SAMPLES, self.num_rows)
        for sample in range(num_samples):
            # Samples are evenly spread, and include the first and the last row.
            index = sample * (self.num_rows - 1) // max(num_samples - 1, 1)
            row = repr(self.row(index))
            digest.update(row.encode("utf-8", "surrogatepass"))
        return {self._short: f"{self.num_rows}:{digest.hexdigest()}"}

    def check_unchanged(self) -> None:
        self._cached.check_unchanged()


class DatasetShards:
    """A dataset whose rows are read in sequence, in the library's own shards, see ``Shards``."""

    total_bytes: int | None = None

    def __init__(
        self,
        dataset: Any,
        name: str,
        request: Request,
        files: Mapping[str, str],
        table: DatasetTable | None = None,
    ) -> None:
        self._dataset = dataset.with_format("arrow")
        self._name = name
        self._request = request
        self._table = table
        self.num_shards: int = (
            dataset.num_shards if hasattr(dataset, "num_shards") else dataset.n_shards
        )
        self._files = {
            name: f"{fingerprint}:{self.num_shards}" for name, fingerprint in files.items()
        }
        self._is_checked = True
        if table is not None:
            self.total_bytes = table.total_bytes
            self._is_checked = not table.is_checked_by_row

    def rows(self, shard: int, start: int = 0) -> Iterator[Row]:
        """Yield the rows of a shard, starting at number ``start``.

        Raises:
            DataError: reading failed inside a shard.
                Skipping the other rows would silently change the dataset.
        """
        # Use iter() instead of a loop over the dataset. In a PyTorch worker process, a loop may yield
        # nothing, because the library itself divides shards among workers.
        dataset = self._dataset.shard(num_shards=self.num_shards, index=shard)
        batches = dataset.iter(batch_size=_ROWS_AT_ONCE)
        passed = 0
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:
                place = self.shard_place(shard, passed)
                raise DataError(
                    f"{place}: cannot be read further ({describe_error(error)}); start the run again"
                ) from error
            if batch is None:
                return
            if passed + batch.num_rows > start:
                wanted = batch.slice(max(start - passed, 0))
                if not self._is_checked and not are_valid(wanted):
                    yield from self._rows_of_damaged(wanted)
                else:
                    yield from rows_of_batch(wanted, self._request.max_row_bytes)
            passed += batch.num_rows

    def _rows_of_damaged(self, batch: Any) -> Iterator[Row]:
        """Yield the rows of a batch, with a BadRow for each row that has an invalid offset."""
        for index in range(batch.num_rows):
            row = batch.slice(index, 1)
            if are_valid(row):
                yield from rows_of_batch(row, self._request.max_row_bytes)
            else:
                yield BadRow(OUTSIDE)

    def shard_place(self, shard: int, number: int) -> str:
        return f"{self._name}: shard {shard}, row {number}, both from 0"

    def files(self) -> Mapping[str, str]:
        """Return one entry: the revision on the hub, or the hash of the local table."""
        return self._files

    def check_unchanged(self) -> None:
        """Check the local table. A revision on the hub never changes."""
        if self._table is not None:
            self._table.check_unchanged()


def _revision(name: str, streaming: bool) -> str | None:
    """Return the hash of a dataset's newest commit, with which all ranks read the same version.

    None offline, where the library uses its cache. This function reports errors within seconds. The library
    itself would retry for minutes.
    """
    hub = importlib.import_module("huggingface_hub")
    if hub.constants.HF_HUB_OFFLINE and not streaming:
        return None
    return hub.HfApi().dataset_info(name, timeout=10).sha


def _datasets(request: Request) -> Any:
    library = libraries.load("datasets", request.option, request.path)
    if hasattr(library.config, "HF_DATASETS_TRUST_REMOTE_CODE"):
        # Before version 4, an environment variable could enable code from the hub.
        library.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    return library
