"""Datasets through the library ``datasets``: from the hub, streamed or downloaded, or as it saved them on disk."""

from __future__ import annotations

import glob
import hashlib
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtrain.data import sandbox, shared_opening
from shardtrain.data.sources import Request, Row, Shards, Table
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
    """A dataset of the hub: its id, and what a preset knows of it.

    data_files: files of it to read in place of what its subset and split name.
    """

    name: str
    subset: str | None = None
    streaming: bool = False
    split: str | None = None
    data_files: str | None = None


def open_hub(request: Request, dataset: HubSet) -> Table | Shards:
    """Open a dataset of the hub; ``request.subset`` and ``request.streaming`` go before what the preset knows.

    Raises:
        ConfigError: with one line on what the hub or the library refused.
    """
    library = _datasets(request)
    streaming = dataset.streaming if request.streaming is None else request.streaming
    if streaming and "[" in (dataset.split or request.split):
        rule = f"cannot be had of a part of a split ({dataset.split or request.split})"
        raise ConfigError(Problem("data.streaming", True, rule, "set it to false, or read all of the split"))
    options: dict[str, Any] = {
        "name": request.subset or dataset.subset,
        "split": dataset.split or request.split,
        "streaming": streaming,
    }
    if dataset.data_files is not None:
        options |= {"name": None, "data_files": {"train": dataset.data_files}}
    own: list[Any] = []

    def look() -> dict[str, Any]:
        try:
            options["revision"] = _revision(dataset.name, streaming)
            own.append(library.load_dataset(dataset.name, **options))
        except (Exception, SystemExit) as error:
            raise refusal(error, request, dataset.name, options) from error
        if streaming or "[" in options["split"]:
            return {"revision": options["revision"], "files": [], "rows": 0}
        files = [entry["filename"] for entry in own[0].cache_files]
        return {"revision": options["revision"], "files": files, "rows": len(own[0])}

    # One rank asks the hub for the version and downloads it; the others open what lies in the cache then, or ask
    # themselves: for a stream, a part of a split, or on a node with a cache of its own.
    shared = shared_opening.once(dataset.name, look)
    options["revision"] = shared["revision"]
    opened = own[0] if own else _cached(library, shared["files"], shared["rows"])
    if opened is None:
        try:
            opened = library.load_dataset(dataset.name, **options)
        except (Exception, SystemExit) as error:
            raise refusal(error, request, dataset.name, options) from error
    place = f"{dataset.name}/{options['name'] or 'default'}/{options['split']}"
    if not streaming:
        return DatasetTable(opened, place, request)
    return DatasetShards(opened, place, request, {place: f"{options['revision']}:{dataset.data_files or ''}"})


def _cached(library: Any, files: Sequence[str], num_rows: int) -> Any:
    """What another rank has put into the cache of the library; None where not all of it is here, or it is more."""
    if not files or not all(map(os.path.exists, files)):
        return None
    whole = library.concatenate_datasets([library.Dataset.from_file(file) for file in files])
    return whole if len(whole) == num_rows else None


def open_saved(request: Request) -> Table | Shards:
    """Open a folder that ``save_to_disk`` wrote; ``request.streaming`` gives shards, one per file.

    Raises:
        ConfigError: when the folder has no such split, or is not what it seems.
    """
    library = _datasets(request)
    folder = os.path.abspath(str(request.path))

    # A pipe among the files would be waited for, and a file of unknown origin may fill the memory: looked at first.
    def look() -> list[str]:
        paths = glob.glob(os.path.join(glob.escape(folder), "**", "*"), recursive=True)
        kinds = {path: bounded_reads.kind(path) for path in sorted(paths)}
        files = [path for path, kind in kinds.items() if kind not in ("", "folder")]
        for path in files:
            if kinds[path] != "file":
                rule = f"holds {os.path.basename(path)!r}, which is not a file"
                raise ConfigError(Problem(request.option, request.path, rule, "remove it from the folder"))
        _prove({"folder": folder}, files, request)
        return []

    shared_opening.once(f"{folder} in a trial", look)
    try:
        saved = library.load_from_disk(request.path)
    except Exception as error:
        rule = f"cannot be opened as a saved dataset ({describe_error(error)})"
        raise ConfigError(Problem(request.option, request.path, rule, "save it again by save_to_disk")) from error

    # A dataset that was saved by itself may know of which split it is
    splits = saved if isinstance(saved, Mapping) else {str(saved.split or request.split): saved}
    if request.split not in splits:
        rule = f'has no split "{request.split}"'
        fix = f"set {request.split_option} to {' or '.join(splits)}"
        raise ConfigError(Problem(request.option, request.path, rule, fix))
    return _opened(splits[request.split], request)


def open_arrow_files(files: Sequence[File], request: Request) -> Table | Shards:
    """Open Arrow files as the library writes them into its cache."""
    library = _datasets(request)

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
        whole = library.concatenate_datasets(parts)
    except Exception as error:
        rule = f"holds Arrow files of different columns ({describe_error(error)})"
        raise ConfigError(Problem(request.option, request.path, rule, "name files of one kind by a pattern")) from error
    return _opened(whole, request)


def _prove(what: Mapping[str, Any], paths: Sequence[str], request: Request) -> None:
    """Let a child open Arrow files first: they may be compressed, and may say any length. Raises DataError."""
    statuses = [os.stat(path) for path in paths]
    key = hashlib.sha256(
        repr([(p, s.st_size, s.st_mtime_ns, s.st_ino) for p, s in zip(paths, statuses, strict=True)]).encode()
    )
    asked = {**what, "file_bytes": sum(stat.st_size for stat in statuses), "max_row_bytes": request.max_row_bytes}
    try:
        sandbox.prove("arrow", asked, f"{what} {key.hexdigest()}")
    except sandbox.Refused as refused:
        fix = "get the files from their source again, leave them out, or write them without compression"
        raise DataError(f"{request.option}={request.path}: {refused}; {fix}") from None


def _opened(dataset: Any, request: Request) -> Table | Shards:
    place = str(request.path)
    # a dataset stays what it is when its folder moves
    table = DatasetTable(dataset, place, request, short=os.path.basename(os.path.abspath(place)))
    if not request.streaming:
        return table
    shards = max(min(len(dataset.cache_files), len(dataset)), 1)
    return DatasetShards(dataset.to_iterable_dataset(num_shards=shards), place, request, table.files(), table)


class DatasetTable:
    """A dataset that is on this machine, over Arrow files mapped into memory; see Table.

    Values are as they are stored: an image or a sound is not decoded.
    """

    def __init__(self, dataset: Any, name: str, request: Request, short: str | None = None) -> None:
        self._dataset = dataset.with_format("arrow")
        self._name = name
        self._request = request
        self._short = short or name
        self.num_rows: int = len(dataset)
        self.total_bytes: int | None = int(dataset.data.nbytes)
        paths = sorted({entry["filename"] for entry in dataset.cache_files})
        files = []
        for path in paths:
            status = os.stat(path)
            kept = File(os.path.basename(path), path, request.option, status.st_size, status.st_mtime_ns, status.st_ino)
            files.append(kept)
        self._cached = FileSource(files)

    def row(self, index: int) -> Row:
        if not 0 <= index < self.num_rows:
            raise IndexError(index)
        (row,) = rows_of_batch(self._dataset[index], self._request.max_row_bytes)
        return row

    def place(self, index: int) -> str:
        return f"{self._name}: row {index} from 0"

    def files(self) -> Mapping[str, str]:
        """One entry, of the columns, the number of rows, and the content of 64 rows.

        It is not of the files, as the library writes other bytes for the same rows in each version.
        """
        digest = hashlib.sha256(f"{self.num_rows}\0{self._dataset.column_names}".encode())
        for sample in range(min(_SAMPLES, self.num_rows)):
            index = sample * (self.num_rows - 1) // max(min(_SAMPLES, self.num_rows) - 1, 1)
            digest.update(repr(self.row(index)).encode("utf-8", "surrogatepass"))
        return {self._short: f"{self.num_rows}:{digest.hexdigest()}"}

    def check_unchanged(self) -> None:
        self._cached.check_unchanged()


class DatasetShards:
    """A dataset that is read in sequence, by the library's own shards; see Shards."""

    total_bytes: int | None = None

    def __init__(
        self, dataset: Any, name: str, request: Request, files: Mapping[str, str], table: DatasetTable | None = None
    ) -> None:
        self._dataset = dataset.with_format("arrow")
        self._name = name
        self._request = request
        self._table = table
        self.num_shards: int = dataset.num_shards if hasattr(dataset, "num_shards") else dataset.n_shards
        self._files = {name: f"{fingerprint}:{self.num_shards}" for name, fingerprint in files.items()}
        if table is not None:
            self.total_bytes = table.total_bytes

    def rows(self, shard: int, start: int = 0) -> Iterator[Row]:
        """Rows of a shard, from number ``start`` on.

        Raises:
            DataError: when a shard cannot be read further; skipping the rest of it would be a loss without a count.
        """
        # iter(), not a loop over the dataset: in a worker process of PyTorch's a loop gives some workers nothing, since
        # the library believes that the others read it.
        batches = self._dataset.shard(num_shards=self.num_shards, index=shard).iter(batch_size=_ROWS_AT_ONCE)
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
                yield from rows_of_batch(batch.slice(max(start - passed, 0)), self._request.max_row_bytes)
            passed += batch.num_rows

    def shard_place(self, shard: int, number: int) -> str:
        return f"{self._name}: shard {shard}, row {number}, both from 0"

    def files(self) -> Mapping[str, str]:
        """One entry: of the revision on the hub, or of the local table."""
        return self._files

    def check_unchanged(self) -> None:
        """A revision of the hub never changes."""
        if self._table is not None:
            self._table.check_unchanged()


def _revision(name: str, streaming: bool) -> str | None:
    """Hash of the newest commit of a dataset, so that all of it is one version; None offline, where the cache has it.

    Asking first also says within seconds what is wrong, where the library would try again for minutes.
    """
    hub = importlib.import_module("huggingface_hub")
    if hub.constants.HF_HUB_OFFLINE and not streaming:
        return None
    return hub.HfApi().dataset_info(name, timeout=10).sha


def _datasets(request: Request) -> Any:
    library = libraries.load("datasets", request.option, request.path)
    if hasattr(library.config, "HF_DATASETS_TRUST_REMOTE_CODE"):
        library.config.HF_DATASETS_TRUST_REMOTE_CODE = False  # before version 4 the environment could allow it
    return library
