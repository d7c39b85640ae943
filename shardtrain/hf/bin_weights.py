"""``pytorch_model.bin`` of a Hugging Face folder, read without unpickling: see ``checkpoint/torch_file.py``.

Requires ``checkpoint.initial_load_legacy_bin`` or ``import --legacy_bin``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardtrain.checkpoint.torch_file import Stored, TorchFile
from shardtrain.hf.weights import (
    BIN,
    BIN_INDEX,
    INDEX,
    SINGLE,
    HubWeights,
    read_index,
    without_wrappers,
)
from shardtrain.utils.errors import CheckpointError, ConfigError


class BinWeights(HubWeights):
    """Tensors by name from files of ``torch.save``. Only one tensor is in memory at a time."""

    def __init__(self, folder: Path) -> None:
        """Read the state dict of each file, and remove the prefixes of wrapped models from names.

        Raises:
            ConfigError: the folder has safetensors.
            CheckpointError: the folder has no such file, or a file is missing, damaged or contains
                no state dict.
        """
        self.folder = folder
        self._files: dict[str, TorchFile] = {}
        file_of: dict[str, str] = {}
        tensors: dict[str, Stored] = {}
        if (folder / SINGLE).exists() or (folder / INDEX).exists():
            raise ConfigError(
                f"{folder} has safetensors, which are used instead of {BIN}; "
                "remove checkpoint.initial_load_legacy_bin or --legacy_bin"
            )
        for file in sorted(set(read_index(folder, BIN, BIN_INDEX).values())) or [BIN]:
            opened = self._files[file] = TorchFile(folder / file)
            table = opened.value
            if isinstance(table, dict) and isinstance(table.get("state_dict"), dict):
                table = table["state_dict"]
            if not isinstance(table, dict) or not table:
                raise CheckpointError(f"{folder / file} contains no state dict; use another file")
            for name, stored in table.items():
                if not isinstance(name, str) or not isinstance(stored, Stored):
                    raise CheckpointError(
                        f"{folder / file}: {str(name)[:100]} is not a tensor; use another file",
                    )
                if name in tensors:
                    raise CheckpointError(
                        f"{name} is in both {file_of[name]} and {file} of {folder}; download the folder again"
                    )
                tensors[name] = stored
                file_of[name] = file
        self.stored = without_wrappers(tensors)
        self._file_of = without_wrappers(file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self.stored[name].dtype)  # type: ignore[no-any-return]

    def read(self, name: str, box: Sequence[slice]) -> Tensor:
        tensor = self._files[self._file_of[name]].tensor(self.stored[name])
        return tensor[tuple(box)] if len(box) else tensor
