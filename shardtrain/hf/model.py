"""Which model of ours a Hugging Face folder holds, and how its tensors translate."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shardtrain import models
from shardtrain.hf import architecture, as_is
from shardtrain.hf.config_json import CONFIG, Quantised, read_json
from shardtrain.hf.format import FREE, TRANSFORMERS_HINT, Fields, Hub, OnlyInTransformers
from shardtrain.hf.mapping import Translation, translate
from shardtrain.hf.reading import describe
from shardtrain.utils.errors import ConfigError
from shardtrain.utils.log import logger

TRANSFORMERS = "transformers"
"""The model file of any class of that library."""


@dataclass(frozen=True)
class HubModel:
    """A model as ``config.json`` describes it: one of ours, or a class of ``transformers`` taken as it is."""

    name: str
    """The model file: ``model.name``."""
    flavor: str
    overrides: Mapping[str, Any]
    """What makes ``flavor`` this model: ``model.overrides``."""
    config: Any
    hub: Hub | None
    """None for a class of ``transformers``."""
    passed_over: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Regular expressions for their tensors that we have no place for, and say so."""
    block: Quantised = dataclasses.field(default=None, compare=False)
    """How the weights are quantised."""
    notices: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """What a user should know of how the folder was understood."""

    def toml(self) -> str:
        """The ``[model]`` section that trains it."""
        lines = ["[model]", f'name = "{self.name}"', f'flavor = "{self.flavor}"']
        if self.overrides:
            lines += ["", "[model.overrides]", *(f"{key} = {_toml(value)}" for key, value in self.overrides.items())]
        return "\n".join(lines)


def recognise(folder: Path, name: str = "") -> HubModel:
    """Read a folder's ``config.json``: a model of this package, else what ``transformers`` has for its ``model_type``.

    Raises:
        ConfigError: for a model that neither has, weights in a form that is not read, or values that make no sense.
        CheckpointError: when the file is missing or no JSON object.
    """
    try:
        found = describe(folder, name)
    except OnlyInTransformers as reason:
        return _as_it_is(folder, reason)
    config = models.find(found.name).Config(**found.values)
    # DeepSeek's layers for the tokens after the next lie beyond the last, and are skipped
    layers = config.num_layers
    more = found.config.get("num_nextn_predict_layers") or 0
    beyond = tuple(rf"model\.layers\.{layers + i}\..*" for i in range(min(more, 8)) if isinstance(more, int))
    return HubModel(found.name, found.flavor, found.overrides, config, found.hub, beyond, found.block, found.notices)


def _as_it_is(folder: Path, reason: OnlyInTransformers) -> HubModel:
    """The class of ``transformers``; raises ConfigError where there is none."""
    why = str(reason).split(TRANSFORMERS_HINT)[0]
    if importlib.util.find_spec(TRANSFORMERS) is None:
        raise ConfigError(f"{why}; install shardtrain[hf], whose transformers may have it") from None
    architecture.read(str(folder))
    config = models.find(TRANSFORMERS).Config(path=str(folder))
    notice = f"{why}: taken as it is, as {config.class_name} of transformers"
    return HubModel(TRANSFORMERS, "folder", {"path": str(folder)}, config, None, notices=(notice,))


def translation_of(module: ModuleType, config: Any, where: str) -> Translation:
    """How the tensors of a model of this package lie in its Hugging Face format.

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
    if found.hub is None or getattr(module, "HUB", None) != found.hub:
        holds = found.hub.architecture if found.hub else found.config.class_name
        raise ConfigError(f"{folder} holds a {holds}, which model.name does not; use\n{found.toml()}")
    # Compared are the fields that either model computes with
    file = found.hub.own_config(read_json(folder / CONFIG))
    theirs = found.hub.read(Fields(file, str(folder / CONFIG), found.hub.defaults))
    unused = FREE | (found.hub.unused(theirs) & found.hub.unused(dataclasses.asdict(config)))

    # A smaller window than the folder's may be asked for. One that a flavor has was taken from another model instead
    window = getattr(config, "sliding_window", 0)
    their_window = theirs.get("sliding_window", 0)
    of_flavors = {fields.get("sliding_window") for fields in module.FLAVORS.values()}
    if window and (not their_window or window < their_window) and window not in of_flavors:
        there = their_window or "all before them"
        logger.warning(f"tokens see {window} tokens (sliding_window), where {folder} says {there}")
        unused |= {"sliding_window"}
    differ = [
        f"{key}={getattr(config, key)!r} in place of {value!r}"
        for key, value in theirs.items()
        if getattr(config, key) != value and key not in unused and not re.fullmatch(r".*_coeff", key)
    ]
    if differ:
        raise ConfigError(f"{folder} holds another model than configured: {'; '.join(differ)}; use\n{found.toml()}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
