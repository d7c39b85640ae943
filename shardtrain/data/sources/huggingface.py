"""Any Hugging Face dataset: on the hub, by its id, or in a local folder. (Presets have their own files here.)

Code of a dataset is never run, so a dataset with a script is rejected. The library reads the hub's token from
HF_TOKEN, or from the file that ``hf auth login`` writes.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from shardtrain.data import shared_opening
from shardtrain.data.sources import Request, Shards, Table, _hub, jsonl, parquet, text, tsv
from shardtrain.data.sources._data_files import File, FileList, list_files
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

_READERS: Mapping[tuple[str, ...], Callable[[Sequence[File], Request], Table | Shards]] = (
    MappingProxyType(
        {
            parquet.ENDINGS: parquet.open_files,
            jsonl.ENDINGS: jsonl.open_files,
            tsv.ENDINGS: tsv.open_files,
            text.ENDINGS: text.open_files,
            (".arrow",): _hub.open_arrow_files,
        }
    )
)
# Names of files that the hub and the library put next to the data.
_SAVED = ("dataset_dict.json", "state.json")
_NO_DATA = re.compile(
    r"dataset_infos?\.json|dataset_dict\.json|state\.json|config\.json|(requirements|license)\.txt",
    re.I,
)
_SPLITS = MappingProxyType(
    {word: word for word in ("train", "test")}
    | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
    | {"training": "train", "testing": "test", "eval": "test", "evaluation": "test"}
)


def open_source(request: Request) -> Table | Shards:
    """Open a dataset on the hub (``"org/name"``), or a local path.

    A local path is a folder that ``save_to_disk`` has written, or names files (by a file, a folder, or a
    pattern) in one of these formats: parquet, jsonl or json, csv or tsv, txt, arrow. If names of files or
    folders contain a word such as "test" or "validation", only the files of ``request.split`` are read. A
    streamed dataset is returned as shards, and a downloaded one as a table.

    Raises:
        ConfigError: the path is not set, the dataset, split or subset is unknown, access is denied, the hub
            cannot be reached, or the library ``datasets`` is not installed.
        DataError: a file cannot be used.
    """
    if not request.path:
        raise ConfigError(
            Problem(
                request.option,
                None,
                rule='is not set, and the dataset "huggingface" requires it',
                fix='name a dataset of the hub ("org/name"), or a local folder',
            )
        )
    path = request.path
    # A path is local if it exists, or if it cannot be the id of a dataset on the hub.
    is_local = (
        path.startswith(("/", "./", "../", "~"))
        or path.count("/") > 1
        or any(mark in path for mark in "*?[")
    )
    if is_local or shared_opening.once(path, lambda: bool(bounded_reads.kind(path))):
        return open_local(request)
    return _hub.open_hub(request, _hub.HubSet(path))


def open_preset(request: Request, dataset: _hub.HubSet) -> Table | Shards:
    """Open a dataset known by name: from the hub, or the user's copy if ``request.path`` is set.

    Raises:
        ConfigError, DataError: see ``open_source``.
    """
    own_split = (dataset.split or "train").partition("[")[0]
    if dataset.split is not None and request.split != own_split and not request.has_default_split:
        raise ConfigError(
            Problem(
                request.split_option,
                request.split,
                rule="has no effect with this dataset, which is a part of one split",
                fix="remove it",
            )
        )
    if request.path is not None:
        if dataset.split:
            request = replace(request, split=own_split)
        return open_local(request, sole_split=own_split)
    if request.subset is not None and dataset.data_files is not None:
        raise ConfigError(
            Problem(
                request.subset_option,
                request.subset,
                rule="has no effect with this dataset, which is a part of one subset",
                fix="remove it",
            )
        )
    # The user has set the option of the dataset and not of a path, so messages must name this option.
    option = request.option.removesuffix("_path")
    return _hub.open_hub(replace(request, path=dataset.name, option=option), dataset)


def open_local(request: Request, sole_split: str = "train") -> Table | Shards:
    """Open a local copy of a dataset, in any format that ``open_source`` supports.

    If names of files do not contain a split, all files belong to ``sole_split``.
    """
    path = os.path.expanduser(request.path or "")
    if request.subset is not None:
        path = os.path.join(path, request.subset)

    def look() -> dict[str, bool]:
        if request.subset is not None and bounded_reads.kind(path) != "folder":
            rule = f"has no folder {request.subset}, the requested subset"
            fix = f"remove {request.subset_option}, or correct it"
            raise ConfigError(Problem(request.option, request.path, rule, fix))
        kinds_of_saved = [bounded_reads.kind(os.path.join(path, name)) for name in _SAVED]
        return {
            "is_saved": "file" in kinds_of_saved,
            "is_folder": bounded_reads.kind(path) == "folder",
            "is_file": bounded_reads.kind(os.path.expanduser(request.path or "")) == "file",
        }

    kind = shared_opening.once(path, look)
    if kind["is_saved"]:
        return _hub.open_saved(replace(request, path=path))

    # Find the data files of the requested split. All must have the same format.
    endings = [ending for group in _READERS for ending in group]
    files = list_files(replace(request, path=path), "huggingface", endings)
    if kind["is_folder"]:
        data_files = []
        for number, name in enumerate(files.names()):
            if not _NO_DATA.fullmatch(os.path.basename(name)):
                data_files.append(number)
        if len(data_files) < len(files):
            files = files.chosen(data_files)
    files = _of_split(files, request, sole_split, kind["is_file"])
    endings_of_files = {file.kind for file in files}
    readers = set()
    for group, reader in _READERS.items():
        if not endings_of_files.isdisjoint(group):
            readers.add(reader)
    if len(readers) != 1:
        kinds = ", ".join(sorted(f"*{ending}" for ending in endings_of_files))
        rule = f"has no known format ({kinds})"
        fix = f"use {', '.join(endings)}"
        if readers:
            rule = f"contains files in several formats ({kinds})"
            fix = 'select one format by a pattern, such as "folder/*.parquet"'
        raise ConfigError(Problem(request.option, request.path, rule, fix))
    return readers.pop()(files, request)


def _of_split(files: FileList, request: Request, sole_split: str, is_file: bool) -> FileList:
    """Return the files whose names contain the requested split.

    If no name contains a split, or the path is a single file, all files belong to one split.
    """
    splits = [_split_of(name) for name in files.names()]
    known = sorted(set(filter(None, splits)) or {sole_split})
    wanted = _SPLITS.get(request.split, request.split)
    if wanted == sole_split and (not any(splits) or is_file):
        return files
    chosen = [number for number, split in enumerate(splits) if split == wanted]
    if not chosen:
        raise ConfigError(
            Problem(
                request.option,
                request.path,
                rule=f'has no files of the split "{request.split}"',
                fix=f"set {request.split_option} to {' or '.join(known)}",
            )
        )
    if len(chosen) == len(files):
        return files
    logger.info(
        "%s: reading %d of %d files, which belong to the split %s",
        request.path,
        len(chosen),
        len(files),
        wanted,
    )
    return files.chosen(chosen)


def _split_of(name: str) -> str | None:
    """Return the split that a file's name contains, such as "test" in ``data/test-00000.parquet``.

    If the name contains several splits, the last split counts.
    """
    for part in reversed(re.split(r"[^a-z]+", name.lower())):
        if part in _SPLITS:
            return _SPLITS[part]
    return None
