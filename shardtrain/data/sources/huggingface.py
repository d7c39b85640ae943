"""Any Hugging Face dataset: one on the hub by its id, or a local folder; named presets are files beside this one.

No code of a dataset is ever run: a dataset that is a script is refused. A token for the hub is read from HF_TOKEN, or
from where ``hf auth login`` keeps it, by the library itself.
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

_READERS: Mapping[tuple[str, ...], Callable[[Sequence[File], Request], Table | Shards]] = MappingProxyType(
    {
        parquet.ENDINGS: parquet.open_files,
        jsonl.ENDINGS: jsonl.open_files,
        tsv.ENDINGS: tsv.open_files,
        text.ENDINGS: text.open_files,
        (".arrow",): _hub.open_arrow_files,
    }
)
# what the hub and the library put beside the data
_SAVED = ("dataset_dict.json", "state.json")
_NO_DATA = re.compile(
    r"dataset_infos?\.json|dataset_dict\.json|state\.json|config\.json|(requirements|license)\.txt", re.I
)
_SPLITS = MappingProxyType(
    {word: word for word in ("train", "test")}
    | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
    | {"training": "train", "testing": "test", "eval": "test", "evaluation": "test"}
)


def open_source(request: Request) -> Table | Shards:
    """Open a dataset of the hub (``"org/name"``), or a local path.

    A local path is a folder that ``save_to_disk`` wrote, or files (a file, a folder, or a pattern) of one of: parquet,
    jsonl or json, csv or tsv, txt, arrow. Where names of files or folders have a word such as "test" or "validation",
    those of ``request.split`` are read. Streaming has shards; what is downloaded first is a table.

    Raises:
        ConfigError: when the path is not set, the dataset, split or subset is unknown, access is refused, the hub is
            out of reach, or the library ``datasets`` is not installed.
        DataError: when a file cannot be used at all.
    """
    if not request.path:
        fix = 'name a dataset of the hub ("org/name"), or a local folder'
        raise ConfigError(Problem(request.option, None, 'is not set, and the dataset "huggingface" needs it', fix))
    path = request.path
    # A path is meant for this machine where it exists, or where it could not be the id of a dataset on the hub.
    is_local = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1 or any(mark in path for mark in "*?[")
    if is_local or shared_opening.once(path, lambda: bool(bounded_reads.kind(path))):
        return open_local(request)
    return _hub.open_hub(request, _hub.HubSet(path))


def open_preset(request: Request, dataset: _hub.HubSet) -> Table | Shards:
    """Open a dataset known by name: from the hub, or the user's own copy of it where ``request.path`` is set.

    Raises:
        ConfigError, DataError: as open_source.
    """
    own_split = (dataset.split or "train").partition("[")[0]
    if dataset.split is not None and request.split != own_split and not request.has_default_split:
        rule = "has no effect with this dataset, which is a part of one split"
        raise ConfigError(Problem(request.split_option, request.split, rule, "remove it"))
    if request.path is not None:
        return open_local(replace(request, split=own_split) if dataset.split else request, sole_split=own_split)
    if request.subset is not None and dataset.data_files is not None:
        rule = "has no effect with this dataset, which is a part of one subset"
        raise ConfigError(Problem(request.subset_option, request.subset, rule, "remove it"))
    # The user named the dataset, not a path: messages about it name that option.
    return _hub.open_hub(replace(request, path=dataset.name, option=request.option.removesuffix("_path")), dataset)


def open_local(request: Request, sole_split: str = "train") -> Table | Shards:
    """Open a local copy of a dataset, in any of the forms that open_source lists.

    ``sole_split`` is the split that all files are of, where their names tell none.
    """
    path = os.path.expanduser(request.path or "")
    if request.subset is not None:
        path = os.path.join(path, request.subset)

    def look() -> dict[str, bool]:
        if request.subset is not None and bounded_reads.kind(path) != "folder":
            rule = f"has no folder {request.subset}, the subset that is asked for"
            fix = f"remove {request.subset_option}, or correct it"
            raise ConfigError(Problem(request.option, request.path, rule, fix))
        return {
            "is_saved": any(bounded_reads.kind(os.path.join(path, name)) == "file" for name in _SAVED),
            "is_folder": bounded_reads.kind(path) == "folder",
            "is_file": bounded_reads.kind(os.path.expanduser(request.path or "")) == "file",
        }

    kind = shared_opening.once(path, look)
    if kind["is_saved"]:
        return _hub.open_saved(replace(request, path=path))

    # Files that hold data, of the split that is asked for, all of one kind.
    endings = [ending for group in _READERS for ending in group]
    files = list_files(replace(request, path=path), "huggingface", endings)
    if kind["is_folder"]:
        data = [n for n, name in enumerate(files.names()) if not _NO_DATA.fullmatch(os.path.basename(name))]
        if len(data) < len(files):
            files = files.chosen(data)
    files = _of_split(files, request, sole_split, kind["is_file"])
    readers = {reader for group, reader in _READERS.items() for file in files if file.kind in group}
    if len(readers) != 1:
        kinds = ", ".join(sorted({f"*{file.kind}" for file in files}))
        rule = f"holds files of several kinds ({kinds})" if readers else f"is of a kind that is not known ({kinds})"
        fix = 'name one kind by a pattern, as "folder/*.parquet"' if readers else f"use {', '.join(endings)}"
        raise ConfigError(Problem(request.option, request.path, rule, fix))
    return readers.pop()(files, request)


def _of_split(files: FileList, request: Request, sole_split: str, is_file: bool) -> FileList:
    """Files of the split that is asked for, where their names tell splits apart; else all of them are of one."""
    splits = [_split_of(name) for name in files.names()]
    known = sorted({split for split in splits if split is not None} or {sole_split})
    wanted = _SPLITS.get(request.split, request.split)
    if wanted == sole_split and (not any(splits) or is_file):
        return files
    chosen = [number for number, split in enumerate(splits) if split == wanted]
    if not chosen:
        rule = f'has no files of the split "{request.split}"'
        raise ConfigError(
            Problem(request.option, request.path, rule, f"set {request.split_option} to {' or '.join(known)}")
        )
    if len(chosen) == len(files):
        return files
    logger.info("%s: read are %d of %d files, those of the split %s", request.path, len(chosen), len(files), wanted)
    return files.chosen(chosen)


def _split_of(name: str) -> str | None:
    """The split that a name within the dataset tells, by its last word of that kind: ``data/test-00000.parquet``."""
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word in _SPLITS]
    return _SPLITS[words[-1]] if words else None
