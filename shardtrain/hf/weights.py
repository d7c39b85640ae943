"""Weights of a Hugging Face folder: safetensors files and their index, read as data."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardtrain.facts.dtypes import SAFETENSORS_NAMES
from shardtrain.hf.listing import INDEX as INDEX
from shardtrain.hub_formats import safetensors_header
from shardtrain.hub_formats.config_json import MAX_JSON_BYTES
from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import CheckpointError

SINGLE = "model.safetensors"
BIN_INDEX = "pytorch_model.bin.index.json"
BIN = "pytorch_model.bin"
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DataParallel, DistributedDataParallel and torch.compile add to every name of a model."""
T = TypeVar("T")
_TYPES = {word: getattr(torch, name) for name, word in SAFETENSORS_NAMES.items()}


def has_safetensors(folder: Path) -> bool:
    """Return True if the folder has its weights in one safetensors file, or in several with an index."""
    return any(bounded_reads.is_present(folder / name) for name in (SINGLE, INDEX))


def layer_file_reader(folder: Path) -> ModuleType | None:
    """Return ``compat/layer_files.py`` if the folder has one file per layer and no safetensors, or else None.

    The module is found by name, because ``compat`` may not be installed.
    """
    if has_safetensors(folder) or importlib.util.find_spec("shardtrain.compat") is None:
        return None
    reader = importlib.import_module("shardtrain.compat.layer_files")
    return reader if reader.steps_of(folder) else None


def weight_files(folder: Path) -> list[Path]:
    """Return the weights files of a folder in order: safetensors if there are any, otherwise one file per layer."""
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    reader = layer_file_reader(folder)
    if reader is not None:
        return sorted(reader.files_of(reader.step_of(folder)).values())
    return []


def without_wrappers(table: dict[str, T]) -> dict[str, T]:
    """Remove the ``WRAPPERS`` that all names begin with, repeatedly if the model was wrapped several times.

    >>> without_wrappers({"module.module.a": 1, "module.module.b": 2}), without_wrappers({"module.a": 1, "b": 2})
    ({'a': 1, 'b': 2}, {'module.a': 1, 'b': 2})
    """
    for wrapper in WRAPPERS:
        # A wrapper adds its prefix to every name. If some names lack it, it is a module of the model.
        if table and all(name.startswith(wrapper) for name in table):
            unwrapped = {name.removeprefix(wrapper): value for name, value in table.items()}
            return without_wrappers(unwrapped)
    return table


def read_index(folder: Path, single: str, index: str) -> dict[str, str]:
    """Map each tensor name to its file. Return {} for a folder with ``single``, which has no index.

    Raises:
        CheckpointError: the folder has neither ``single`` nor ``index``, or the index is damaged or
            names a missing file.
    """
    path = folder / index
    if not bounded_reads.is_present(path):
        if bounded_reads.is_present(folder / single):
            return {}
        raise _no_weights(folder, index)
    try:
        content = bounded_reads.read_all(path, MAX_JSON_BYTES)
        table = checked_json.parse(content, memory_bytes=checked_json.LARGE_MEMORY_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); download it again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not an index of weights ({error}); download it again"
        ) from None
    file_of_tensor = None
    if isinstance(table, dict):
        file_of_tensor = table.get("weight_map")
    if not isinstance(file_of_tensor, dict) or not file_of_tensor:
        raise CheckpointError(
            f"{path} is not an index of weights (weight_map is not a table of names); download it again"
        )
    existing: set[str] = set()
    for name, file in file_of_tensor.items():
        # An index may have a million tensors in a thousand files, so check each file once.
        if isinstance(file, str) and file in existing:
            continue
        # A name with a path separator could point outside the model's folder.
        is_file_name = isinstance(file, str) and Path(file).name == file
        if not is_file_name or Path(file).suffix != Path(single).suffix:
            raise CheckpointError(
                f"{path}: {name} is in {file!r}, which is not a file name like {single}"
            )
        if not bounded_reads.is_present(folder / file):
            raise CheckpointError(
                f"{folder / file} does not exist, but {path} refers to it; download it"
            )
        existing.add(file)
    return file_of_tensor


def _no_weights(folder: Path, index: str) -> CheckpointError:
    """Return the error for a folder that has neither ``index`` nor a single weights file."""
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    parts = sorted(file.name for file in folder.glob("*.safetensors"))
    # The weights exist, and only their index is missing.
    if parts or (pickles and index == BIN_INDEX):
        missing = folder / BIN_INDEX
        if parts:
            missing = folder / INDEX
        first, *others = parts or pickles
        return CheckpointError(
            f"{missing}, the index of {first} and {len(others)} more files, does not exist; download it"
        )
    if pickles:
        return CheckpointError(
            f"{folder} has only {', '.join(pickles[:3])}, a pickle; "
            "save it with safe_serialization=True, or read it with import --legacy_bin or, "
            "in a run, checkpoint.initial_load_legacy_bin"
        )
    return CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; name the folder of a model")


class HubWeights:
    """Tensors of a folder by name, read lazily. Use as a context manager."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Open every file and read its header.

        Args:
            prefix: Prefix to remove from tensor names. Names without it are kept.

        Raises:
            CheckpointError: the folder has no safetensors, a file is missing, truncated or not safetensors,
                the index is wrong, or the names are those of a wrapped model.
        """
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        index = read_index(folder, SINGLE, INDEX)
        for file in sorted(set(index.values())) or [SINGLE]:
            self._open(file)
        for name, file in index.items():
            # An index may list a tied head that no file contains. A caller that
            # needs the absent tensor reports it.
            if self._file_of.get(name, file) != file:
                raise CheckpointError(
                    f"{folder / INDEX} assigns {name} to {file}, which does not contain it; download both again"
                )
        # All names begin with the prefix of a wrapper.
        if without_wrappers(self._file_of).keys() != self._file_of.keys():
            first_name = next(iter(self._file_of))
            wrapper = first_name.partition(".")[0]
            raise CheckpointError(
                f"{folder}: all names begin with {wrapper!r}, which transformers cannot read either; "
                f"save model.{wrapper}.state_dict() instead"
            )
        self._stored_as = {name.removeprefix(prefix): name for name in self._file_of}
        if len(self._stored_as) < len(self._file_of):
            raise CheckpointError(
                f"{folder} has tensors with the same name both with and without the prefix {prefix!r}"
            )
        self._file_of = {name.removeprefix(prefix): file for name, file in self._file_of.items()}

    def _open(self, file: str) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.folder / file
        try:
            # This check has limits on memory that the library does not have.
            safetensors_header.read(path)
            opened = safe_open(str(path), framework="pt")
            names = list(opened.keys())
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{path} is truncated or not a safetensors file ({error}); download it again"
            ) from None
        for name in names:
            if name in self._file_of:
                raise CheckpointError(
                    f"{name} is in both {self._file_of[name]} and {file} of {self.folder}; download the folder again"
                )
            self._file_of[name] = file
        self._files[file] = opened

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            CheckpointError: torch does not support the dtype.
        """
        word = self._slice(name).get_dtype()
        if word not in _TYPES:
            raise CheckpointError(
                f"{self.folder / self._file_of[name]}: {name} has the unsupported dtype {word}",
            )
        return _TYPES[word]

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """Read a box of a tensor (one slice per dimension) in the dtype of the file, on the CPU."""
        part = self._slice(name)
        # The library reads a scalar with an ellipsis, and not with an empty tuple.
        if not len(box):
            return part[...]  # type: ignore[no-any-return]
        return part[tuple(box)]  # type: ignore[no-any-return]

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(self._stored_as[name])

    def __enter__(self) -> HubWeights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
