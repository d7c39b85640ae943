"""Models: one file each, whose name is ``model.name``; a path ending in .py points outside the package.

A model file holds ``Config`` (a frozen dataclass), ``Model`` (built from a Config), ``LAYOUT``, ``FLAVORS`` (name ->
fields of Config) and ``initial(config)`` (parameter pattern -> how it starts).
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

_NO_MODELS = ("__init__", "architecture", "layers", "moe", "yarn")


def find(name: str) -> ModuleType:
    """Return the module of a model file of this package, or of a user's file by its path.

    Raises ConfigError when the file does not exist or lacks one of its five parts.
    """
    if name.endswith(".py"):
        return own_file.load(name, own_file.MODEL, "model.name")
    # Only a file of this folder is imported by a name. "llama" has no flavors, and those that have build on it
    files = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    if name not in files or name in _NO_MODELS:
        known = [file for file in files if file not in (*_NO_MODELS, "llama")]
        fix = f"use {', '.join(known)} or a path to a .py"
        raise ConfigError(Problem("model.name", name, "is not a model file", fix))
    module = importlib.import_module(f"shardtrain.models.{name}")
    missing = own_file.MODEL.missing_in(module)
    if missing:
        raise ConfigError(Problem("model.name", name, *own_file.MODEL.lacks(missing)))
    return module


def shape_of(module: ModuleType, flavor: str, overrides: Mapping[str, Any], norm_type: str) -> Any:
    """The Config of a flavor with overrides; ``norm_type`` is set where the model's Config has such a field."""
    if flavor not in module.FLAVORS:
        raise ConfigError(Problem("model.flavor", flavor, "is unknown", f"use one of {', '.join(module.FLAVORS)}"))
    kinds = {field.name: field.type for field in dataclasses.fields(module.Config)}
    unknown = sorted(set(overrides) - set(kinds))
    if unknown:
        rule = "is not a field of the model's Config"
        fix = f"use {sorted(kinds)}"
        raise ConfigError([Problem(f"model.overrides.{name}", overrides[name], rule, fix) for name in unknown])
    norm = {"norm_type": norm_type} if "norm_type" in kinds else {}
    if not norm and norm_type != "rmsnorm":
        raise ConfigError(
            Problem("model.norm_type", norm_type, "has no effect: this model has one norm", "leave it out")
        )
    # 1e3 is a whole number here as it is in any other option
    whole = {
        name: int(value)
        for name, value in overrides.items()
        if isinstance(value, float) and value.is_integer() and kinds[name] in (int, "int", "int | None")
    }
    return module.Config(**{**module.FLAVORS[flavor], **norm, **overrides, **whole})


def configured(options: Any) -> tuple[ModuleType, Any]:
    """Return the model file and the model's Config that the options of ``[model]`` name; raises ConfigError."""
    module = find(options.name)
    return module, shape_of(module, options.flavor, options.overrides, options.norm_type)


def build(module: ModuleType, model_config: Any, num_labels: int = 0) -> nn.Module:
    """Build a model on the meta device (names and shapes, no memory) and check that its layout covers it.

    If ``num_labels`` is not 0, a classification head replaces the vocabulary head. A class of transformers has the
    head that its own configuration names.

    Raises:
        ConfigError: with every gap of the layout, and everything set in ``__init__`` that training would lose.
    """
    # The layout of any class of transformers is found in the model at hand, and not promised
    if getattr(module, "AS_IS", False):
        return module.Model(model_config)  # type: ignore[no-any-return]
    values = Values()
    with torch.device("meta"), values:
        model = module.Model(model_config)

    # Parameters without a shape, or with computed values, would be accused of more than that
    broken = unsupported_parameters(model)
    if not broken:
        # All that is wrong at once: names that the layout lacks, what would be lost, parameters that nothing draws
        names = [name for name, _ in model.named_parameters()]
        broken = layouts.check(module.LAYOUT, (name for name, _ in model.named_modules()), names)
        broken += _broken_promises(model, module.LAYOUT)
        broken += lost(model, module.LAYOUT, values)
        starts = module.initial(model_config)
        broken += [
            f"initial() has no rule for parameter {name}{_nearly(name, starts)}"
            for name in names
            if not any(layouts.matches(name, pattern) for pattern in starts)
        ]
    if broken:
        broken = _of_all_layers(broken, module.LAYOUT.layers)
        # A user's file is named by its path
        is_own = own_file.is_from(module, own_file.MODEL)
        name = module.__file__ if is_own else module.__name__.rpartition(".")[2]
        raise ConfigError([f"model {name}: {sentence}" for sentence in broken])
    if num_labels:
        replace_head(model, module.LAYOUT, num_labels)
    return model


def replace_head(model: nn.Module, layout: Layout, num_labels: int, device: str = "meta") -> None:
    """Replace a model's head by one with a row per label, in place. The new head is not tied to the embedding.

    Raises:
        ConfigError: the model's last module is not a linear layer.
    """
    name = layout.last[-1] if layout.last else ""
    head = getattr(model, name, None)
    if not isinstance(head, nn.Linear):
        rule = "names a model that does not end in a linear layer, which the classification head would replace"
        raise ConfigError(Problem("model.name", None, rule, "use another model"))
    setattr(model, name, nn.Linear(head.in_features, num_labels, bias=head.bias is not None, device=device))


def _nearly(name: str, patterns: Iterable[str]) -> str:
    """Which pattern would fit if its stars crossed dots, as those of a shell's file names do."""
    near = next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)
    return "" if near is None else f": each * of {near!r} stops at a dot, so write one for each part of the name"


def _of_all_layers(sentences: list[str], layers: str) -> list[str]:
    """One sentence for what is wrong in many layers alike, with ``*`` for their numbers."""
    alike: dict[str, list[str]] = {}
    for sentence in sentences:
        alike.setdefault(re.sub(rf"\b{re.escape(layers)}\.\w+(?=[. ]|$)", f"{layers}.*", sentence), []).append(sentence)
    return [together if len(same) > 1 else same[0] for together, same in alike.items()]


def check_documents(module: ModuleType, name: str) -> None:
    """Refuse a model whose packed documents would attend to each other: call it where batches have ``documents_BT``.

    Raises ConfigError when the model's forward has no argument ``documents_BT``.
    """
    if "documents_BT" not in inspect.signature(module.Model.forward).parameters:
        rule = "cannot keep packed documents apart: its forward has no argument documents_BT"
        fix = (
            'add documents_BT=None as the third and pass it on to the attention cores, or set data.document_mask="off"'
        )
        raise ConfigError(Problem("model.name", name, rule, fix))


def _broken_promises(model: nn.Module, layout: Layout) -> list[str]:
    """Return a message for each structural rule that the model violates and ``layout.check`` cannot see in names."""
    layers = dict(model.named_modules()).get(layout.layers)
    broken = []
    if layers is not None and not isinstance(layers, nn.ModuleDict):
        broken.append(f"{layout.layers} must be an nn.ModuleDict with string keys, not {type(layers).__name__}")
    broken += [
        f"{name} must be a direct child of the model"
        for name in (*layout.first, layout.layers, *layout.last)
        if "." in name
    ]
    return broken
