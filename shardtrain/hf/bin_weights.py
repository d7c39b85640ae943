"""``pytorch_model.bin`` of a Hugging Face folder, read as data: no pickle is loaded, see ``checkpoint/torch_file.py``.

Weights are read from it only if ``checkpoint.initial_load_legacy_bin`` or ``import --legacy_bin`` asks for that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardtrain.checkpoint.torch_file import Stored, TorchFile
from shardtrain.hf.config_json import MAX_JSON_BYTES
from shardtrain.hf.weights import INDEX, SINGLE, HubWeights
from shardtrain.utils import reading
from shardtrain.utils.errors import CheckpointError, ConfigError

BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"


class BinWeights(HubWeights):
    """Tensors by name of files of ``torch.save``; one tensor at a time is in memory."""

    def __init__(self, folder: Path) -> None:
        """Read what each file says it holds.

        Raises:
            ConfigError: the folder has safetensors.
            CheckpointError: the folder has no such file, one is missing or damaged, or holds more than a table of
                tensors.
        """
        self.folder = folder
        self._files: dict[str, TorchFile] = {}
        self._file_of: dict[str, str] = {}
        self._stored: dict[str, Stored] = {}
        if (folder / SINGLE).exists() or (folder / INDEX).exists():
            raise ConfigError(
                f"{folder} has safetensors, which are used instead of {BIN}; remove checkpoint.initial_load_legacy_bin "
                "or --legacy_bin"
            )
        for file in self._names_of_files():
            opened = self._files[file] = TorchFile(folder / file)
            table = opened.value
            if isinstance(table, dict) and isinstance(table.get("state_dict"), dict):
                table = table["state_dict"]
            if not isinstance(table, dict) or not table:
                raise CheckpointError(f"{folder / file} holds no table of tensors")
            for name, stored in table.items():
                if not isinstance(name, str) or not isinstance(stored, Stored):
                    raise CheckpointError(f"{folder / file}: {str(name)[:100]} is not a tensor; use another file")
                if name in self._stored:
                    raise CheckpointError(f"{name} is both in {self._file_of[name]} and in {file} of {folder}")
                self._stored[name] = stored
                self._file_of[name] = file

    def _names_of_files(self) -> list[str]:
        index = self.folder / BIN_INDEX
        if not index.is_file():
            if not (self.folder / BIN).is_file():
                raise CheckpointError(f"{self.folder} has neither {SINGLE} nor {BIN}; name the folder of a model")
            return [BIN]
        try:
            found = json.loads(reading.whole(index, MAX_JSON_BYTES))["weight_map"].values()
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of weights ({type(error).__name__}: {error})") from None
        for file in found:
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".bin"):
                raise CheckpointError(f"{index} names {str(file)[:100]!r}, which is not a .bin file of this folder")
            if not (self.folder / file).is_file():
                raise CheckpointError(f"{self.folder / file} is missing; {BIN_INDEX} names it")
        return sorted(set(found))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self._stored[name].dtype)  # type: ignore[no-any-return]

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        tensor = self._files[self._file_of[name]].tensor(self._stored[name])
        return tensor[tuple(box)] if len(box) else tensor
