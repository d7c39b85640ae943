"""Which model of ours a Hugging Face folder holds, and how its tensors translate."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shardtrain import models
from shardtrain.config.model_file import model_names
from shardtrain.errors import ConfigError
from shardtrain.hub import as_is
from shardtrain.hub.block_fp8 import block_of
from shardtrain.hub.format import Fields, Hub
from shardtrain.hub.mapping import Translation, translate
from shardtrain.hub.weights import read_json

CONFIG = "config.json"


@dataclass(frozen=True)
class HubModel:
    """A model of ours, as ``config.json`` describes it."""

    name: str
    """The model file: ``model.name``."""
    flavor: str
    overrides: Mapping[str, Any]
    """What makes ``flavor`` this model: ``model.overrides``."""
    config: Any
    hub: Hub
    passed_over: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Regular expressions for their tensors that we have no place for, and say so."""
    block: tuple[int, int] | None = dataclasses.field(default=None, compare=False)
    """Rows and columns that share a scale, where the weights are quantised."""

    def toml(self) -> str:
        """The ``[model]`` section that trains it."""
        lines = ["[model]", f'name = "{self.name}"', f'flavor = "{self.flavor}"']
        if self.overrides:
            lines += ["", "[model.overrides]", *(f"{key} = {_toml(value)}" for key, value in self.overrides.items())]
        return "\n".join(lines)


def recognise(folder: Path) -> HubModel:
    """Read a folder's ``config.json``.

    Raises:
        ConfigError: for an architecture that is none of ours, or a key whose meaning is not known.
        CheckpointError: when the file is missing or no JSON object.
    """
    path = folder / CONFIG
    found = read_json(path)
    named = {name: module for name in model_names() if hasattr(module := models.find(name), "HUB")}
    kind, architectures = found.get("model_type"), found.get("architectures") or []
    fitting = {name: module for name, module in named.items() if module.HUB.model_type == kind}
    if not fitting:
        known = sorted({module.HUB.model_type for module in named.values()})
        raise ConfigError(
            f"{path}: model_type={kind!r} is none of {', '.join(known)}; train it as it is with "
            f'model.name = "transformers" and model.hf_assets_path = "{folder}"'
        )
    hub: Hub = next(iter(fitting.values())).HUB
    if isinstance(architectures, list) and architectures and hub.architecture not in architectures:
        raise ConfigError(f"{path}: architectures={architectures!r} is not {hub.architecture}; a base model is needed")
    fields = Fields(found, str(path))
    values = hub.read(fields)
    fields.take("num_nextn_predict_layers", int, 0)
    block = block_of(found, str(path))
    fields.take("quantization_config", dict, {})
    fields.refuse_rest()
    name, flavor, overrides = _nearest(fitting, values)
    config = fitting[name].Config(**values)
    layers, more = config.num_layers, found.get("num_nextn_predict_layers") or 0
    beyond = tuple(rf"model\.layers\.{layers + i}\..*" for i in range(min(more, 8)) if isinstance(more, int))
    return HubModel(name, flavor, overrides, config, hub, beyond, block)


def _nearest(modules: Mapping[str, ModuleType], values: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """The flavor with the fewest fields that differ, and those fields."""
    candidates = []
    for name, module in modules.items():
        wanted = dataclasses.asdict(module.Config(**values))
        for flavor, fields in module.FLAVORS.items():
            has = dataclasses.asdict(module.Config(**fields))
            overrides = {key: value for key, value in wanted.items() if has[key] != value and key in values}
            # what the format does not say (how weights start, ...) is the flavor's own
            candidates.append((len(overrides), "debug" in flavor, name, flavor, overrides))
    _, _, name, flavor, overrides = min(candidates, key=lambda candidate: candidate[:4])
    return name, flavor, overrides


def translation_of(module: ModuleType, config: Any, where: str) -> Translation:
    """How the tensors of a model of ours lie in its Hugging Face format.

    Raises:
        ConfigError: when the model file has no HUB.
        CheckpointError: when the format has no place for a tensor.
    """
    if as_is.is_as_is(module):
        return as_is.translation(models.build(module, config), config)
    hub = getattr(module, "HUB", None)
    if hub is None:
        raise ConfigError(f"{where}: the model file has no HUB, so it has no Hugging Face format; add one")
    model = models.build(module, config)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return translate(hub, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})


def check_same(module: ModuleType, config: Any, found: HubModel, folder: Path) -> None:
    """Refuse a folder whose model is not the one configured; raises ConfigError naming each field that differs."""
    if getattr(module, "HUB", None) != found.hub:
        raise ConfigError(f"{folder} holds a {found.hub.architecture}, which model.name does not; use\n{found.toml()}")
    said = found.hub.read(Fields(read_json(folder / CONFIG), str(folder / CONFIG)))
    training_only = re.compile(r".*_coeff|depth_init|init_std|norm_type")
    differ = [
        f"{key}={getattr(config, key)!r} in place of {value!r}"
        for key, value in said.items()
        if getattr(config, key) != value and not training_only.fullmatch(key)
    ]
    if differ:
        raise ConfigError(f"{folder} holds another model than configured: {'; '.join(differ)}; use\n{found.toml()}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
