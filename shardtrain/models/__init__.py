"""Find, configure and build models. Each model is one file; ``model.name`` is its name, or the path
of a user's .py file.

A model file defines ``Config`` (a frozen dataclass), ``Model`` (built from a Config), ``LAYOUT``,
``FLAVORS`` (name -> fields of Config) and ``initial(config)`` (parameter pattern -> initial
distribution).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardtrain import layout as layouts
from shardtrain.layout import Layout
from shardtrain.ops.lost_in_build import Values, lost, unsupported_parameters
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem

_NO_MODELS = (
    "__init__",
    "architecture",
    "experts_interface",
    "layers",
    "moe",
    "multi_token",
    "yarn",
)


def find(name: str) -> ModuleType:
    """Return the module of a model file, by its name in this package or by the path of a user's file.

    Raises ConfigError if the file does not exist or lacks one of the five definitions.
    """
    if name.endswith(".py"):
        return own_file.load(name, own_file.MODEL, "model.name")
    # Only files of this folder are imported by name. "llama" is not suggested, because it has no
    # flavors: llama2, llama3 and others are built on it
    files = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    if name not in files or name in _NO_MODELS:
        known = [file for file in files if file not in (*_NO_MODELS, "llama")]
        raise ConfigError(
            Problem(
                "model.name",
                name,
                rule="is not a model file",
                fix=f"use {', '.join(known)} or the path of a .py file",
            )
        )
    module = importlib.import_module(f"shardtrain.models.{name}")
    missing = own_file.MODEL.missing_in(module)
    if missing:
        raise ConfigError(Problem("model.name", name, *own_file.MODEL.lacks(missing)))
    return module


def shape_of(module: ModuleType, flavor: str, overrides: Mapping[str, Any], norm_type: str) -> Any:
    """Return the Config of a flavor with overrides. ``norm_type`` is set if the model's Config has
    this field.

    Raises ConfigError for an unknown flavor or override, and for a ``norm_type`` that the model ignores.
    """
    if flavor not in module.FLAVORS:
        raise ConfigError(
            Problem(
                "model.flavor",
                flavor,
                rule="is unknown",
                fix=f"use one of {', '.join(module.FLAVORS)}",
            )
        )
    types = {field.name: field.type for field in dataclasses.fields(module.Config)}
    unknown = sorted(set(overrides) - set(types))
    if unknown:
        rule = "is not a field of the model's Config"
        fix = f"use {sorted(types)}"
        raise ConfigError(
            [Problem(f"model.overrides.{name}", overrides[name], rule, fix) for name in unknown]
        )

    values = dict(module.FLAVORS[flavor])
    if "norm_type" in types:
        values["norm_type"] = norm_type
    elif norm_type != "rmsnorm":
        raise ConfigError(
            Problem(
                "model.norm_type",
                norm_type,
                rule="has no effect because this model supports one norm",
                fix="remove it",
            )
        )
    for name, value in overrides.items():
        # TOML reads 1e3 as a float; integer fields accept it, as integer options do
        is_integer_field = types[name] in (int, "int", "int | None")
        if is_integer_field and isinstance(value, float) and value.is_integer():
            values[name] = int(value)
        else:
            values[name] = value
    return module.Config(**values)


def without_mtp(model_config: Any) -> Any:
    """Return a model's Config without layers of multi-token prediction, which only training uses."""
    if getattr(model_config, "num_nextn_predict_layers", 0):
        return dataclasses.replace(model_config, num_nextn_predict_layers=0)
    return model_config


def configured(options: Any) -> tuple[ModuleType, Any]:
    """Return the model file and the model's Config for the options of ``[model]``. Raises ConfigError."""
    module = find(options.name)
    return module, shape_of(module, options.flavor, options.overrides, options.norm_type)


def build(module: ModuleType, model_config: Any, num_labels: int = 0) -> nn.Module:
    """Build a model on the meta device (names and shapes, no memory) and check that its layout covers it.

    If ``num_labels`` is not 0, a classification head replaces the vocabulary head. ``model.name =
    "transformers"`` ignores it, because a class of transformers has the head of its own
    configuration.

    Raises:
        ConfigError: lists every gap of the layout, and every value set in ``__init__`` that
            training would lose.
    """
    # The layout of a transformers class is derived from the model, so there is nothing to check
    if getattr(module, "AS_IS", False):
        return module.Model(model_config)  # type: ignore[no-any-return]
    values = Values()
    with torch.device("meta"), values:
        model = module.Model(model_config)

    # Unsupported parameters (without a shape, or with computed values) are reported separately,
    # because the later checks would report them a second time
    broken = unsupported_parameters(model)
    if not broken:
        # Collect all problems: gaps of the layout, values that would be lost, parameters without an
        # initializer
        names = [name for name, _ in model.named_parameters()]
        broken = layouts.check(module.LAYOUT, (name for name, _ in model.named_modules()), names)
        broken += _broken_promises(model, module.LAYOUT)
        broken += lost(model, module.LAYOUT, values)
        initializers = module.initial(model_config)
        for name in names:
            if any(layouts.matches(name, pattern) for pattern in initializers):
                continue
            hint = _pattern_hint(name, initializers)
            broken.append(f"initial() has no rule for parameter {name}{hint}")
    if broken:
        # Name a user's file by its path
        is_user_file = own_file.is_from(module, own_file.MODEL)
        name = module.__file__ if is_user_file else module.__name__.rpartition(".")[2]
        messages = _merge_layers(broken, module.LAYOUT.layers)
        raise ConfigError([f"model {name}: {message}" for message in messages])
    if num_labels:
        replace_head(model, module.LAYOUT, num_labels)
    return model


def replace_head(model: nn.Module, layout: Layout, num_labels: int, device: str = "meta") -> None:
    """Replace a model's head by a head with a row per label, in place.

    The new head is not tied to the embedding.
    Raises ConfigError if the model's last module is not a linear layer.
    """
    name = layout.last[-1] if layout.last else ""
    head = getattr(model, name, None)
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            Problem(
                "model.name",
                None,
                rule="names a model that does not end in a linear layer, which the classification head would replace",
                fix="use another model",
            )
        )
    new_head = nn.Linear(head.in_features, num_labels, bias=head.bias is not None, device=device)
    setattr(model, name, new_head)


def _pattern_hint(name: str, patterns: Iterable[str]) -> str:
    """Return a hint if a pattern would match with a ``*`` that crosses dots, as in a shell; else an
    empty string.
    """
    for pattern in patterns:
        if fnmatch.fnmatchcase(name, pattern):
            return f": each * of {pattern!r} stops at a dot, so write one for each part of the name"
    return ""


def _merge_layers(messages: list[str], layers: str) -> list[str]:
    """Merge messages that differ only in the number of the layer, and write ``*`` instead of the number."""
    layer_number = re.compile(rf"\b{re.escape(layers)}\.\w+(?=[. ]|$)")
    groups: dict[str, list[str]] = {}
    for message in messages:
        merged = layer_number.sub(f"{layers}.*", message)
        groups.setdefault(merged, []).append(message)
    texts = []
    for merged, group in groups.items():
        texts.append(merged if len(group) > 1 else group[0])
    return texts


def check_documents(module: ModuleType, name: str) -> None:
    """Raise ConfigError if the model's forward has no argument ``documents_BT``.

    Call it if batches contain packed documents, which would attend to each other in such a model.
    """
    if "documents_BT" not in inspect.signature(module.Model.forward).parameters:
        rule = "cannot keep packed documents apart: its forward has no argument documents_BT"
        fix = (
            "add documents_BT=None as the third argument and pass it to the attention cores, "
            'or set data.document_mask="off"'
        )
        raise ConfigError(Problem("model.name", name, rule, fix))


def _broken_promises(model: nn.Module, layout: Layout) -> list[str]:
    """Return a message for each structural rule that the model violates and ``layout.check`` cannot
    see in names.
    """
    layers = dict(model.named_modules()).get(layout.layers)
    broken = []
    if layers is not None and not isinstance(layers, nn.ModuleDict):
        broken.append(
            f"{layout.layers} must be an nn.ModuleDict with string keys, not {type(layers).__name__}"
        )
    for name in (*layout.first, layout.layers, *layout.last):
        if "." in name:
            broken.append(f"{name} must be a direct child of the model")
    return broken
