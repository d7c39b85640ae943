"""The weights of a Hugging Face folder: safetensors files and their index, opened without running anything in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardtrain.checkpoint.safetensors_header import TYPES
from shardtrain.hf.config_json import MAX_JSON_BYTES
from shardtrain.utils import reading
from shardtrain.utils.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_TYPES = {word: getattr(torch, name) for name, word in TYPES.items()}


class HubWeights:
    """Tensors by name, whose bytes are read when they are asked for; a context manager."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Open every file and read what they say they hold.

        A tensor whose name begins with ``prefix`` is known by the rest of it.

        Raises:
            CheckpointError: for no safetensors, a file that is missing, cut or none of the format, or an index that
                names another place or another file than the one that holds a tensor.
        """
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        index = self._read_index()
        for file in sorted(set(index.values())) if index is not None else [SINGLE]:
            self._open(file)
        for name, file in (index or {}).items():
            # An index may list a tied head that no file holds. Whoever needs an absent tensor reports it.
            if self._file_of.get(name, file) != file:
                raise CheckpointError(f"{folder / INDEX} says that {name} is in {file}, which does not hold it")
        self._stored_as = {name.removeprefix(prefix): name for name in self._file_of}
        if len(self._stored_as) < len(self._file_of):
            raise CheckpointError(f"{folder} holds tensors both with and without {prefix!r} before the same name")
        self._file_of = {name.removeprefix(prefix): file for name, file in self._file_of.items()}

    def _read_index(self) -> dict[str, str] | None:
        """Which file holds each tensor; None where one file holds all."""
        path = self.folder / INDEX
        if not path.exists() and (self.folder / SINGLE).exists():
            return None
        if not path.exists():
            parts = sorted(file.name for file in self.folder.glob("*.safetensors"))
            pickles = sorted(file.name for file in self.folder.glob("*.bin"))[:3]
            if parts:
                raise CheckpointError(
                    f"{path} is missing, which says what is in {parts[0]} and {len(parts) - 1} more; fetch it"
                )
            what = "no weights"
            if pickles:
                what = f"only {', '.join(pickles)}, a pickle, which import --legacy_bin opens, and a run "
                what += "with checkpoint.initial_load_legacy_bin"
            raise CheckpointError(
                f"{self.folder} has {what}; it needs {SINGLE} or {INDEX}: save it with safe_serialization=True"
            )
        try:
            found = json.loads(reading.whole(path, MAX_JSON_BYTES))["weight_map"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not an index of weights ({type(error).__name__}: {error})") from None
        if not isinstance(found, dict) or not found:
            raise CheckpointError(f"{path}: weight_map is not a table of names")
        # A name with a folder in it could lead anywhere
        for name, file in found.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path}: {name} lies in {file!r}, which is not a safetensors file of this folder"
                )
        return found

    def _open(self, file: str) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.folder / file
        try:
            # A pipe in the place of a file would be waited for
            reading.check_regular(path)
            opened = safe_open(str(path), framework="pt")
            names = list(opened.keys())
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing; {self.folder / INDEX} names it") from None
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path} is cut short or no safetensors file ({error}); fetch it again") from None
        for name in names:
            if name in self._file_of:
                raise CheckpointError(f"{name} is both in {self._file_of[name]} and in {file} of {self.folder}")
            self._file_of[name] = file
        self._files[file] = opened

    def names(self) -> list[str]:
        """The names of all tensors."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor; raises CheckpointError for one that torch does not have."""
        word = self._slice(name).get_dtype()
        if word not in _TYPES:
            raise CheckpointError(f"{self.folder / self._file_of[name]}: {name} has the type {word}, unknown here")
        return _TYPES[word]

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        """A box of a tensor, one slice per dimension, in the type of the file, on the CPU."""
        part = self._slice(name)
        return part[tuple(box)] if len(box) else part[...]  # type: ignore[no-any-return]

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(self._stored_as[name])

    def __enter__(self) -> HubWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
