"""Recognize the model in a Hugging Face folder, translate its tensors, and compare it with a configured model."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shardtrain import models
from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.storage import Place
from shardtrain.config import folder_model
from shardtrain.config.describe_folder import describe
from shardtrain.config.schema import Model as ModelOptions
from shardtrain.hf import as_is, source
from shardtrain.hf.mapping import Translation, translate
from shardtrain.hub_formats.config_json import CONFIG, Quantized, read_json
from shardtrain.hub_formats.format import (
    CHANGEABLE,
    FREE,
    TRANSFORMERS_HINT,
    Fields,
    HubFormat,
    OnlyInTransformers,
)
from shardtrain.models import architecture
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

_MISSING_CLASS = "Llama4ForSequenceClassification"
"""Class of a classifier that the naming scheme of transformers implies, but that it does not have."""


@dataclass(frozen=True)
class HubModel:
    """Model that a ``config.json`` describes: a model of this package, or a class of ``transformers``.

    Attributes:
        name: Model file: ``model.name``.
        flavor: ``model.flavor``.
        overrides: ``model.overrides``: fields of the model that differ from ``flavor``.
        config: The model's Config.
        hub: Hugging Face format. None for a class of ``transformers``.
        passed_over: Regular expressions for tensors that an import skips.
        block: Quantization of the weights in the files.
        notices: Messages for the user about the recognition.
        num_mtp_layers: Number of layers of multi-token prediction in config.json. ``config`` has none.
    """

    name: str
    flavor: str
    overrides: Mapping[str, Any]
    config: Any
    hub: HubFormat | None
    passed_over: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    block: Quantized = dataclasses.field(default=None, compare=False)
    notices: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    num_mtp_layers: int = dataclasses.field(default=0, compare=False)

    def toml(self) -> str:
        """Return the ``[model]`` section of a configuration that trains this model."""
        lines = ["[model]", f'name = "{self.name}"', f'flavor = "{self.flavor}"']
        if self.overrides:
            lines += ["", "[model.overrides]"]
        for key, value in self.overrides.items():
            lines.append(f"{key} = {_toml(value)}")
        return "\n".join(lines)


def recognise(folder: Path, name: str = "") -> HubModel:
    """Recognize the model from a folder's ``config.json``.

    Prefer a model of this package. Otherwise return the class of ``transformers`` for its ``model_type``.

    Raises:
        ConfigError: neither supports the model, its values are invalid, or its quantization is not supported.
        CheckpointError: the file is missing or not a JSON object.
    """
    try:
        hub_model = describe(folder, name)
    except OnlyInTransformers as reason:
        return _as_it_is(folder, reason)
    config = models.find(hub_model.name).Config(**hub_model.values)
    # Skip DeepSeek's layers for multi-token prediction, which follow the last layer. The number comes from a
    # file that was downloaded, so limit it.
    num_extra = hub_model.config.get("num_nextn_predict_layers") or 0
    if not isinstance(num_extra, int):
        num_extra = 0
    patterns = []
    for number in range(min(num_extra, 8)):
        layer = config.num_layers + number
        patterns.append(rf"model\.layers\.{layer}\..*")
    return HubModel(
        name=hub_model.name,
        flavor=hub_model.flavor,
        overrides=hub_model.overrides,
        config=config,
        hub=hub_model.hub,
        passed_over=tuple(patterns),
        block=hub_model.block,
        notices=hub_model.notices,
        num_mtp_layers=num_extra,
    )


def with_mtp(hub_model: HubModel, folder: Path) -> HubModel:
    """Return the model of a folder with all its layers of multi-token prediction.

    Raises:
        ConfigError: the folder has no such layers, or the model of this package does not support them.
    """
    name = "num_nextn_predict_layers"
    if not hasattr(hub_model.config, name) or hub_model.num_mtp_layers == 0:
        rule = f"has no effect, because {folder} has no layers of multi-token prediction ({name})"
        raise ConfigError(Problem("--keep_mtp", True, rule, "remove it"))
    # The Config and the overrides that reproduce it must agree.
    changed = {name: hub_model.num_mtp_layers}
    return dataclasses.replace(
        hub_model,
        overrides={**hub_model.overrides, **changed},
        config=dataclasses.replace(hub_model.config, **changed),
    )


def check_mtp(config: Any, hub_model: HubModel, folder: Path) -> None:
    """Raise ConfigError if a model has more layers of multi-token prediction than a folder."""
    name = "num_nextn_predict_layers"
    wanted = getattr(config, name, 0)
    if wanted > hub_model.num_mtp_layers:
        rule = (
            f"exceeds the {hub_model.num_mtp_layers} layers of multi-token prediction in {folder}"
        )
        fix = f"set it to {hub_model.num_mtp_layers}"
        raise ConfigError(Problem(f"model.overrides.{name}", wanted, rule, fix))


def _as_it_is(folder: Path, reason: OnlyInTransformers) -> HubModel:
    """Return a folder's model as one that runs the class of ``transformers`` for its architecture.

    Raises:
        ConfigError: transformers is not installed or has no such class.
    """
    why = str(reason).split(TRANSFORMERS_HINT)[0]
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"{why}; install shardtrain[hf], because transformers may support it"
        ) from None
    architecture.read(str(folder))
    config = models.find(folder_model.NAME).Config(path=str(folder))
    notice = f"{why}; using {config.class_name} of transformers"
    return HubModel(
        folder_model.NAME, "folder", {"path": str(folder)}, config, None, notices=(notice,)
    )


def hub_of(module: ModuleType, where: str, num_labels: int = 0) -> HubFormat:
    """Return the Hugging Face format of a model file: its HUB, with a classification head if ``num_labels`` is not 0.

    Raises:
        ConfigError: the model file has no HUB, or transformers has no such class with a classification head.
    """
    hub: HubFormat | None = getattr(module, "HUB", None)
    if hub is None:
        raise ConfigError(
            f"{where}: the model file has no HUB, so it has no Hugging Face format; add a HUB"
        )
    if not num_labels:
        return hub
    # An architecture whose name has no "ForCausalLM" stays the same, and has no such class.
    architecture = hub.architecture.replace("ForCausalLM", "ForSequenceClassification")
    has_class = architecture not in (hub.architecture, _MISSING_CLASS)
    if not has_class:
        rule = f"transformers has no class like {hub.architecture} with a classification head"
        raise ConfigError(f"{where}: {rule}, so it has no Hugging Face format; use its checkpoint")
    # transformers calls the head of every such class "score".
    head = f"{module.LAYOUT.last[-1]}.weight"
    names = {**hub.names, head: "score.weight"}
    return dataclasses.replace(hub, architecture=architecture, names=names)


def translation_of(module: ModuleType, config: Any, where: str, num_labels: int = 0) -> Translation:
    """Map the tensors of a model to its Hugging Face format. With ``num_labels``, the model is a classifier.

    Raises:
        ConfigError: the model file has no HUB, or transformers has no such class with a classification head.
        CheckpointError: the format has no place for a tensor.
    """
    if as_is.is_as_is(module):
        return as_is.translation(models.build(module, config), config)
    hub = hub_of(module, where, num_labels)
    model = models.build(module, config, num_labels)
    shapes = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shapes[name] = tuple(tensor.shape)
    return translate(hub, config, shapes)


def check_same(
    module: ModuleType,
    config: Any,
    hub_model: HubModel,
    folder: Path,
    chosen: Collection[str] = (),
) -> None:
    """Raise ConfigError if the model in a folder differs from the configured model. See ``check_fields``."""
    if hub_model.hub is None or getattr(module, "HUB", None) != hub_model.hub:
        holds = hub_model.hub.architecture if hub_model.hub else hub_model.config.class_name
        fix = f'set model.name = "{hub_model.name}" and model.flavor = "from_folder"'
        name = module.__name__.rpartition(".")[2]
        raise ConfigError(
            Problem(
                "model.name",
                name,
                rule=f"does not fit {folder}, which contains {holds}",
                fix=fix,
            )
        )
    file = hub_model.hub.text_config(read_json(folder / CONFIG))
    theirs = hub_model.hub.read(Fields(file, str(folder / CONFIG), hub_model.hub.defaults))
    check_fields(hub_model.hub, config, theirs, folder, chosen)


def check_noted(model: ModelOptions, path: Place) -> None:
    """Raise ConfigError if the model of an ``import`` or ``merge`` checkpoint differs from the run's.

    Checkpoints of runs are not checked, because they do not describe their model. Checkpoints of custom model
    files are not checked, because their fields may have any meaning. See ``check_fields``.
    """
    stored = manifest.read(path)
    described = stored.facts.get("model")
    if not isinstance(described, dict) or model.name.endswith(".py"):
        return
    # With another model file, the names of the tensors differ, and loading reports that.
    if described.get("name") != model.name:
        return
    noted = source.noted_model(Path(str(path)), stored)
    assert noted is not None, "the manifest describes the model"
    module, config = models.configured(model)
    if as_is.is_as_is(module):
        as_is.check_same(config, Path(noted["overrides"]["path"]))
        return
    stored_fields = dataclasses.asdict(
        models.shape_of(module, noted["flavor"], noted["overrides"], model.norm_type),
    )
    # Loading the weights checks the vocabulary size by their shapes.
    del stored_fields["vocab_size"]
    check_fields(module.HUB, config, stored_fields, path, model.overrides.keys())


def check_fields(
    hub: HubFormat,
    config: Any,
    stored_fields: Mapping[str, Any],
    where: object,
    chosen: Collection[str],
) -> None:
    """Raise ConfigError if a Config differs from the Config of the weights.

    Args:
        stored_fields: Fields of the weights' Config.
        where: Location of the weights, for messages.
        chosen: Names in ``model.overrides``. Those that match ``CHANGEABLE`` may differ, with a warning.

    Raises:
        ConfigError: another field differs. The message lists all of them.
    """
    differences = []
    for name in _differing(hub, config, stored_fields):
        value = getattr(config, name)
        if name in chosen and CHANGEABLE.fullmatch(name):
            logger.warning(
                f"model.overrides.{name}={value!r} is used; {where} has {stored_fields[name]!r}"
            )
        else:
            differences.append(f"{name}={value!r} instead of {stored_fields[name]!r}")
    if differences:
        rule = f"does not fit {where}: {'; '.join(differences)}"
        fix = (
            'use the same values, or set model.flavor = "from_folder"; model.overrides may only change rope_*, mscale, '
            "the attention window and dropout"
        )
        raise ConfigError(Problem("model", None, rule, fix))


def changed_fields(
    hub: HubFormat | None, config: Any, base: source.FolderSource | None
) -> list[str]:
    """Return "field=value" for each field that matches ``CHANGEABLE`` and differs from the base model.

    Return [] if the base model is unknown or has another architecture.
    """
    if hub is None or base is None:
        return []
    file = hub.text_config(base.config)
    if file.get("model_type") != hub.model_type:
        return []
    base_fields = hub.read(Fields(file, CONFIG, hub.defaults))
    changes = []
    for key in _differing(hub, config, base_fields):
        if CHANGEABLE.fullmatch(key):
            changes.append(f"{key}={getattr(config, key)!r}")
    return changes


def _differing(hub: HubFormat, config: Any, stored_fields: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that differ and affect the model."""
    # Ignore fields that either Config disables. The option that disables them is itself compared.
    ignored = FREE | hub.unused(stored_fields) | hub.unused(dataclasses.asdict(config))
    # Layers of multi-token prediction are optional. Loading their weights checks their names.
    ignored = ignored | {"num_nextn_predict_layers"}
    differing = []
    for name, stored in stored_fields.items():
        # Coefficients of auxiliary losses only affect training.
        if name in ignored or name.endswith("_coeff"):
            continue
        if getattr(config, name) != stored:
            differing.append(name)
    return differing


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return repr(value)
