"""An architecture as ``transformers`` defines it: read from a folder's config.json and built without memory.

Classes of the installed ``transformers`` alone are used: what a config.json says of code is left out before it is read.
Parameters are on the meta device; what a buffer holds follows from config.json and is computed at once, on the CPU. How
each parameter starts is noted while the architecture's own ``_init_weights`` runs on tensors without memory.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardtrain.hub_formats.config_json import read_json
from shardtrain.hub_formats.format import CODE
from shardtrain.layout import Draw
from shardtrain.utils import libraries
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger, without_torchao_warnings

CONFIG = "config.json"
_OPTION = "model.overrides.path"
_MOST_CHARACTERS = 500
KINDS = {
    "sequence_to_sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
"""What a model is for, and the table of ``transformers`` with its architectures; the first that has one counts."""


@dataclass(frozen=True)
class MetaModel:
    """A model on the meta device, and how each of its parameters starts (by its name in ``transformers``)."""

    module: Any
    draws: Mapping[str, Draw]


@functools.lru_cache(maxsize=16)
def read(folder: str) -> Any:
    """The config of a folder, as ``transformers`` has it.

    Raises:
        ConfigError: for an architecture that ``transformers`` does not have, or weights that are quantised.
        CheckpointError: when the file is missing or no JSON object.
    """
    path = Path(folder) / CONFIG
    found = dict(read_json(path))

    # An architecture that the installed transformers has, with weights that are numbers
    kind = found.get("model_type")
    code = sorted(set(_keys(found, CODE)))
    mapping = _transformers().models.auto.configuration_auto.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in mapping:
        rule = f"is of model_type {kind!r}, which transformers {_transformers().__version__} does not have"
        if "auto_map" in code:
            rule += ", and whose own code (auto_map) is never run here"
        fix = "install a version that does, or write a model file"
        raise ConfigError(Problem(_OPTION, folder, rule, fix))
    if found.get("quantization_config") or found.get("quantization"):
        quantization = found.get("quantization_config") or found.get("quantization")
        method = "?"
        if isinstance(quantization, dict):
            method = quantization.get("quant_method", "MLX" if "bits" in quantization else "?")
        rule = f"holds weights that are quantised by {method} (quantization_config), which are not read here"
        raise ConfigError(Problem(_OPTION, folder, rule, "use the folder of the weights before quantisation"))

    # What it says of code is left out before transformers sees it
    with _listening() as warnings:
        try:
            config = mapping[kind].from_dict(_without(found, CODE))
        except Exception as error:  # whatever a foreign value makes of foreign code
            raise ConfigError(f"{path}: transformers refuses it ({_reason(warnings, error)})") from None
    _warnings[folder] = warnings
    # A forward of training would fill a cache of keys and values that nobody reads
    config.use_cache = False
    if any(value == "dynamic" for value in _values(found, ("rope_type", "type"))):
        rule = 'has rotary angles of type "dynamic", which change with the longest row that a rank has seen'
        raise ConfigError(Problem(_OPTION, folder, rule, "use a model without them"))
    return config


def architecture_of(folder: str, wanted: str = "") -> str:
    """The class of ``transformers`` that is built: ``wanted``, or the one that config.json names."""
    config = read(folder)
    named = [wanted] if wanted else list(config.architectures or [])
    known = {name: kind for kind, table in _tables().items() for name in _classes(table.get(config.model_type))}
    if not named:
        named = _classes(_tables()["causal"].get(config.model_type))
    if len(named) != 1 or named[0] not in known:
        option = ("model.overrides.architecture", wanted) if wanted else (_OPTION, folder)
        rule = f"names {', '.join(named) or 'no architecture'}, which cannot be trained here"
        some = ", ".join(sorted(known)) or f"none: transformers has none for {config.model_type}"
        raise ConfigError(Problem(*option, rule, f"set model.overrides.architecture to one of {some}"))
    return named[0]


def kind_of(folder: str, architecture: str) -> str:
    """What an architecture is for: one of KINDS."""
    model_type = read(folder).model_type
    return next(kind for kind, table in _tables().items() if architecture in _classes(table.get(model_type)))


def build(folder: str, architecture: str, attention: str, num_labels: int = 0, vocab_size: int = 0) -> MetaModel:
    """Build the model on the meta device, its buffers computed; raises ConfigError where its class refuses."""
    # A copy, since a class may write into its config; what transformers says of it was heard when it was read
    with _listening():
        config = type(read(folder)).from_dict(read(folder).to_dict())
    config.use_cache = False
    if num_labels:
        config.num_labels = num_labels
    if vocab_size:
        config.get_text_config().vocab_size = vocab_size
    starts = _Starts()
    with _listening() as warnings:
        cls = getattr(_transformers(), architecture)
        try:
            with torch.device("cpu"), _parameters_on_meta(starts), starts:
                asked = {} if attention == "auto" else {"attn_implementation": attention}
                module = cls._from_config(config, dtype=torch.float32, **asked)
        except Exception as error:
            rule = f"cannot be built as {architecture} ({_reason([*_warnings.get(folder, []), *warnings], error)})"
            raise ConfigError(Problem(_OPTION, folder, rule, "correct its config.json")) from None
    _warn(folder, [*_warnings.get(folder, []), *warnings])
    return MetaModel(module, {name: starts.draw(p) for name, p in module.named_parameters()})


_warnings: dict[str, list[str]] = {}
"""What ``transformers`` said of the config.json of a folder when it was read."""
_warned_of: set[str] = set()


@contextmanager
def _listening() -> Iterator[list[str]]:
    """Collect what ``transformers`` would print, each text once."""
    warnings: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = _line(record.getMessage())
            if text not in warnings:
                warnings.append(text)

    # The only handler in the meantime, and nothing goes to the loggers above
    theirs = logging.getLogger("transformers")
    handlers = theirs.handlers
    theirs.handlers = [Listener(logging.WARNING)]
    propagates = theirs.propagate
    theirs.propagate = False
    try:
        with without_torchao_warnings():
            yield warnings
    finally:
        theirs.handlers = handlers
        theirs.propagate = propagates


def _reason(warnings: Sequence[str], error: Exception) -> str:
    """Why ``transformers`` gives up: what it said before, which names the key, or what it raised."""
    if warnings:
        return "; ".join(warnings)[:_MOST_CHARACTERS]
    # Of a KeyError the text is the key alone
    text = _line(error)
    return text if " " in text else f"{type(error).__name__}: {text}"


def _warn(folder: str, warnings: Sequence[str]) -> None:
    """One line of all that ``transformers`` said of a folder, once a process."""
    if warnings and folder not in _warned_of:
        _warned_of.add(folder)
        logger.warning(f"{folder}/{CONFIG}: transformers says: {'; '.join(warnings)[:_MOST_CHARACTERS]}")


def _transformers() -> Any:
    with without_torchao_warnings():
        for name in ("configuration_auto", "modeling_auto"):
            libraries.load(f"transformers.models.auto.{name}", "model.name", "transformers")
        return libraries.load("transformers", "model.name", "transformers")


def _tables() -> dict[str, Mapping[str, Any]]:
    tables = _transformers().models.auto.modeling_auto
    return {kind: getattr(tables, name, {}) for kind, name in KINDS.items()}


def _classes(found: Any) -> list[str]:
    if found is None:
        return []
    return [found] if isinstance(found, str) else list(found)


def _keys(value: Any, pattern: re.Pattern[str]) -> Iterator[str]:
    """Keys at any depth that a pattern finds."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if pattern.search(str(key)):
                yield str(key)
            yield from _keys(inner, pattern)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, pattern)


def _without(value: Any, pattern: re.Pattern[str]) -> Any:
    """A JSON value without the keys that a pattern finds, at any depth."""
    if isinstance(value, dict):
        return {key: _without(inner, pattern) for key, inner in value.items() if not pattern.search(str(key))}
    if isinstance(value, list):
        return [_without(inner, pattern) for inner in value]
    return value


def _values(found: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[Any]:
    """What the tables of rotary angles, of all layers or of each kind, say under some keys."""
    for table in ("rope_scaling", "rope_parameters"):
        inner = found.get(table)
        if not isinstance(inner, dict):
            continue
        for entry in (inner, *inner.values()):
            if isinstance(entry, dict):
                yield from (entry[key] for key in keys if key in entry)


def _line(error: object) -> str:
    return (str(error).splitlines() or [""])[0][:200]


@contextmanager
def _parameters_on_meta(starts: _Starts) -> Iterator[None]:
    """Move each parameter to the meta device as it is registered; what it held is noted where it is all 0 or all 1."""
    register = nn.Module.register_parameter

    def moved(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or param.is_meta:
            return
        on_meta = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        on_meta.__dict__.update(param.__dict__)
        self._parameters[name] = on_meta
        starts.note_constant(on_meta, param)

    nn.Module.register_parameter = moved  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Starts(TorchDispatchMode):
    """Notes the last in-place operation that filled each whole tensor on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: dict[tuple[int, int], Draw] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if args and isinstance(args[0], Tensor) and args[0].is_meta and name.endswith("_"):
            self._note(name, args[0], [value for value in args[1:] if isinstance(value, int | float)], kwargs or {})
        return func(*args, **(kwargs or {}))

    def note_constant(self, on_meta: Tensor, value: Tensor) -> None:
        """Note a start that is written into the parameter as it is made, such as a norm's ones."""
        if 0 < value.numel() <= 1 << 20 and value.is_floating_point():
            low, high = value.detach().aminmax()
            if float(low) == float(high) and float(low) in (0.0, 1.0):
                found = Draw("ones" if float(low) else "zeros")
                self._draws[self._key(on_meta)] = self._draws[id(on_meta), on_meta.numel()] = found

    def draw(self, parameter: Tensor) -> Draw:
        """How a parameter starts; nan where the architecture says it in a way that is not known here."""
        found = self._draws.get(self._key(parameter)) or self._draws.get((id(parameter), parameter.numel()))
        return found or Draw("normal", std=math.nan)

    @staticmethod
    def _key(tensor: Tensor) -> tuple[int, int]:
        # A part of a tensor, such as the row of a padding token, has the storage of the whole and fewer numbers
        return tensor.untyped_storage()._cdata, tensor.numel()

    def _note(self, name: str, tensor: Tensor, numbers: list[float], named: Mapping[str, Any]) -> None:
        key = self._key(tensor)
        before = self._draws.get(key)
        if name == "normal_":
            mean, std = [*numbers, *[0.0, 1.0][len(numbers) :]]
            found: Draw | None = Draw("normal", std=float(std)) if mean == 0 else None
        elif name == "uniform_":
            low, high = [*numbers, *[0.0, 1.0][len(numbers) :]]
            # The same variance: nothing here rests on the shape of a distribution
            found = Draw("normal", std=(high - low) / math.sqrt(12)) if low == -high else None
        elif name in ("zero_", "fill_"):
            value = 0.0 if name == "zero_" else math.nan
            if numbers:
                value = numbers[0]
            found = {0.0: Draw("zeros"), 1.0: Draw("ones")}.get(float(value))
        elif name == "erfinv_":  # a truncated normal by inverse transform: its deviation and bounds follow
            found = Draw("truncated_normal")
        elif name == "mul_" and numbers and before is not None and before.distribution == "truncated_normal":
            found = Draw("truncated_normal", std=numbers[0] / math.sqrt(2))
        elif name == "clamp_" and before is not None and before.distribution == "truncated_normal":
            found = Draw("truncated_normal", std=before.std, cutoff=float(named.get("max", numbers[-1])) / before.std)
        elif name in ("add_", "detach_", "requires_grad_") and (name != "add_" or numbers == [0.0]):
            return
        else:
            found = None
        # Noted by storage and by object: tying may give a parameter another storage
        for place in (key, (id(tensor), tensor.numel())):
            self._draws.pop(place, None)
            if found is not None:
                self._draws[place] = found


def saved_config(
    found: Mapping[str, Any], architecture: str, labels: Sequence[str] = (), vocab_size: int = 0
) -> dict[str, Any]:
    """Return a folder's config.json for a class of this name, with only the fields changed that the run changed.

    ``labels`` replace those of the folder, except numbered ones (``LABEL_0``, ...) of the same count.
    """
    saved = dict(json.loads(json.dumps(dict(found))))
    is_numbered = list(labels) == [f"LABEL_{number}" for number in range(len(labels))]
    if labels and (not is_numbered or len(labels) != len(saved.get("id2label") or ())):
        saved["id2label"] = {str(number): label for number, label in enumerate(labels)}
        saved["label2id"] = {label: number for number, label in enumerate(labels)}
    text = next(
        (part for part in (saved.get("text_config"), saved) if isinstance(part, dict) and "vocab_size" in part), saved
    )
    if vocab_size:
        text["vocab_size"] = vocab_size
    return saved if architecture in (saved.get("architectures") or ()) else {**saved, "architectures": [architecture]}
