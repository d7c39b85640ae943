"""The weights of a model that is opened: whole or adapters beside frozen ones, of a checkpoint or in HF format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.checkpoint import tensor_reader, tensors
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX, Manifest
from shardtrain.config import Config
from shardtrain.hf import importing
from shardtrain.hf.opening import is_hub_folder
from shardtrain.lora import frozen, spec
from shardtrain.lora.peft import PeftFolder
from shardtrain.tools.generate.locate_checkpoint import find_checkpoint
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem


class Held:
    """What lies at a path, found good; filled into a model in two steps, because adapters are modules of their own."""

    _stored: Manifest | None

    def __init__(
        self, path: Path, config: Config, module: ModuleType, shape: Any, base: Path | None, adapter: Path | None
    ) -> None:
        """Find and check it (a collective); for what is raised see ``open_model``."""
        self.from_hub = is_hub_folder(path)
        self.where = path
        self._stored = None
        if not self.from_hub:
            self.where, self._stored = find_checkpoint(path, config)
        self._config = config
        self._module = module
        self._shape = shape
        self._base = base
        self._spec = None if self._stored is None else spec.read_facts(self._stored.facts, self.where)
        if self._spec is None and base is not None:
            rule = "is for adapters, and what is opened is a whole model"
            raise ConfigError(Problem("--base", str(base), rule, "leave it out"))
        if self._spec is not None and adapter is not None:
            rule = f"would be added to {self.where}, which holds adapters itself"
            raise ConfigError(Problem("--adapter", str(adapter), rule, "merge those first (shardtrain merge)"))
        self._peft = None if adapter is None else PeftFolder(adapter, module, shape)

    def adapt(self, model: nn.Module) -> None:
        """Put adapters beside the weights of a model on the meta device, where there are some."""
        wanted = self._peft.spec if self._peft is not None else self._spec
        if wanted is not None:
            spec.apply(model, wanted)

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Read this rank's part of the model's tensors."""
        named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        wanted = self._peft.spec if self._peft is not None else self._spec
        adapters = {name: tensor for name, tensor in named.items() if wanted is not None and wanted.holds(name)}
        whole = {name: tensor for name, tensor in named.items() if name not in adapters}
        if self._stored is None:
            importing.fill(_prefixed(whole), self.where, self._module, self._shape)
        elif self._spec is None:
            self._read(whole)
        else:
            found = frozen.find(self._stored.facts, self.where, self._config, self._base, self._module, self._shape)
            with found as weights:
                weights.fill(whole)
            self._read(adapters)
        if self._peft is not None:
            self._peft.fill(named)

    def _read(self, named: Mapping[str, Tensor]) -> None:
        assert self._stored is not None
        weights = _prefixed(named)
        tensors.check_names(weights, self._stored, self.where)
        try:
            tensor_reader.read(weights, self._stored, self.where)
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.where} cannot be loaded: {error}") from error


def _prefixed(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{WEIGHTS_PREFIX}{name}": tensor.detach() for name, tensor in named.items()}
