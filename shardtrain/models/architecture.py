"""Build a Hugging Face ``transformers`` architecture from a folder's config.json, without
allocating its parameters.

Only classes of the installed ``transformers`` are used: keys of config.json that name code are
removed before it is parsed. Parameters are on the meta device. Buffers follow from config.json and
are computed on the CPU. The architecture's own ``_init_weights`` runs on the meta parameters, and a
recorder notes the distribution of each.
"""

from __future__ import annotations

import copy
import dataclasses
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

from shardtrain.hub_formats.config_json import CONFIG, read_json
from shardtrain.hub_formats.format import CODE
from shardtrain.layout import Draw
from shardtrain.utils import libraries
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger, without_torchao_warnings

_OPTION = "model.overrides.path"
_MAX_WARNING_CHARS = 500
_MAX_CONSTANT_NUMEL = 1 << 20
_MAX_VALUES = 64
"""Maximum size of a parameter whose values are kept, unless it is all zeros or all ones."""
_FROM_NUMBERS = ("lift_fresh", "scalar_tensor", "full", "zeros", "ones", "arange", "linspace")
"""Operations whose results follow from numbers."""
_UNKNOWN = ("empty", "rand", "normal", "uniform", "bernoulli", "multinomial", "exponential")
"""Parts of the names of operations that return new memory or random numbers."""
KINDS = {
    "sequence_to_sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image_text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
"""Kind of model -> the mapping in ``transformers`` that lists its architectures. The first match is
the kind.
"""


@dataclass(frozen=True)
class MetaModel:
    """A model on the meta device.

    Attributes:
        module: the network.
        draws: initial distribution of each parameter, by its name in ``transformers``.
        asks_for_balance: True if config.json has ``output_router_logits``, with which
            ``transformers`` adds the balance loss of experts to the main loss.
    """

    module: Any
    draws: Mapping[str, Draw]
    asks_for_balance: bool = False


@functools.lru_cache(maxsize=16)
def read(folder: str) -> Any:
    """Return the config of a folder, as an instance of the ``transformers`` config class of its model_type.

    Raises:
        ConfigError: ``transformers`` has no such model_type, or rejects the file, or the weights
            are quantized.
        CheckpointError: the file is missing or is not a JSON object.
    """
    path = Path(folder) / CONFIG
    content = dict(read_json(path))

    # The installed transformers must have the model_type. The folder's own code is never an alternative
    model_type = content.get("model_type")
    mapping = _transformers().models.auto.configuration_auto.CONFIG_MAPPING
    is_known = isinstance(model_type, str) and model_type in mapping
    if not is_known:
        rule = f"is of model_type {model_type!r}, which transformers {_transformers().__version__} does not have"
        if "auto_map" in _keys(content, CODE):
            rule += ", and whose own code (auto_map) is never run here"
        fix = "install a version that does, or write a model file"
        raise ConfigError(Problem(_OPTION, folder, rule, fix))

    quantization = content.get("quantization_config") or content.get("quantization")
    if quantization:
        method = _quantization_method(quantization)
        rule = f"contains weights quantized with {method} (quantization_config), which is not supported"
        raise ConfigError(Problem(_OPTION, folder, rule, "use the unquantized weights"))

    # Parse without the keys that name code
    content = _with_special_floats(content)
    harmless = _without(content, CODE)
    config_class = mapping[model_type]
    with _collected_warnings() as warnings:
        try:
            config = config_class.from_dict(harmless)
        except Exception as error:  # a config class may raise any exception for a wrong value
            raise ConfigError(
                f"{path}: transformers refuses it ({_reason(warnings, error)})"
            ) from None
    _warnings[folder] = warnings

    # Training would fill a key-value cache that nothing reads
    _disable_cache(config)

    if "dynamic" in _rope_types(content):
        rule = 'has rotary angles of type "dynamic", which change with the longest row that a rank has seen'
        raise ConfigError(Problem(_OPTION, folder, rule, "use a model without them"))
    return config


def _disable_cache(config: Any) -> None:
    """Let a network keep no keys and values, also if its text model has a separate config."""
    config.use_cache = False
    config.get_text_config().use_cache = False


def architecture_of(folder: str, wanted: str = "") -> str:
    """Return the ``transformers`` class to build: ``wanted``, else the class in config.json, else the
    causal language model.

    Raises ConfigError if there is not exactly one such class, or if no class of KINDS has this name.
    """
    config = read(folder)
    known: set[str] = set()
    for table in _tables().values():
        known.update(_classes(table.get(config.model_type)))

    candidates = [wanted] if wanted else list(config.architectures or [])
    if not candidates:
        candidates = _classes(_tables()["causal"].get(config.model_type))
    if len(candidates) == 1 and candidates[0] in known:
        return candidates[0]

    # Refer to the option that named the class.
    option = _OPTION
    value = folder
    if wanted:
        option = "model.overrides.architecture"
        value = wanted
    names = ", ".join(candidates) or "no architecture"
    rule = f"names {names}, which cannot be trained here"
    if known:
        fix = f"set model.overrides.architecture to one of {', '.join(sorted(known))}"
    else:
        fix = f"use another model: transformers has no class for {config.model_type} that can be trained"
    raise ConfigError(Problem(option, value, rule, fix))


def kind_of(folder: str, architecture: str) -> str:
    """Return the kind of an architecture, one of KINDS.

    Raises:
        LookupError: the architecture does not belong to the folder's model_type.
    """
    model_type = read(folder).model_type
    for kind, table in _tables().items():
        if architecture in _classes(table.get(model_type)):
            return kind
    raise LookupError(f"{architecture} is not an architecture of {model_type}")


def reads_images(folder: str, architecture: str) -> bool:
    """True if an architecture generates text from images and text. Its kind may be "causal" as well."""
    model_type = read(folder).model_type
    entry = _tables()["image_text"].get(model_type)
    return architecture in _classes(entry)


def build(
    folder: str, architecture: str, attention: str, num_labels: int = 0, vocab_size: int = 0
) -> MetaModel:
    """Build the model on the meta device with its buffers computed on the CPU.

    Args:
        folder: folder with the config.json.
        architecture: name of the ``transformers`` class.
        attention: its attention implementation, or "auto" for the default of the class.
        num_labels: labels of a classifier; 0 keeps the number of config.json.
        vocab_size: rows of the embedding; 0 keeps the number of config.json.

    Raises:
        ConfigError: the class cannot be constructed from this config.
    """
    # Build from a copy, because a class may modify its config. The warnings of parsing were
    # collected by `read`
    parsed = read(folder)
    with _collected_warnings():
        config = type(parsed).from_dict(parsed.to_dict())
    _disable_cache(config)

    # The network would compute the balance loss of its own tokens, which this package ignores
    text_config = config.get_text_config()
    asks_for_balance = bool(getattr(text_config, "output_router_logits", False))
    if asks_for_balance:
        text_config.output_router_logits = False
    if num_labels:
        config.num_labels = num_labels
    if vocab_size:
        text_config.vocab_size = vocab_size

    # Construct the network. Its parameters move to the meta device one by one, so a network of any size fits
    # into memory, and the recorder sees the operations that initialize them.
    options = {}
    if attention != "auto":
        options["attn_implementation"] = attention
    recorder = _InitRecorder()
    with _collected_warnings() as build_warnings:
        cls = getattr(_transformers(), architecture)
        try:
            with torch.device("cpu"), _parameters_on_meta(recorder), recorder:
                module = cls._from_config(config, dtype=torch.float32, **options)
        except Exception as error:  # a model class may raise any exception for a wrong config
            warnings = [*_warnings.get(folder, []), *build_warnings]
            rule = f"cannot be built as {architecture} ({_reason(warnings, error)})"
            raise ConfigError(Problem(_OPTION, folder, rule, "correct its config.json")) from None

    # Report all warnings of transformers in one line, once per folder and process
    warnings = [*_warnings.get(folder, []), *build_warnings]
    if warnings and folder not in _warned_folders:
        _warned_folders.add(folder)
        logger.warning(
            f"{folder}/{CONFIG}: warning of transformers: {'; '.join(warnings)[:_MAX_WARNING_CHARS]}"
        )

    # Name the initial distribution of each parameter. Some small ones follow from a formula instead
    draws = {}
    for name, parameter in module.named_parameters():
        draw = recorder.draw(parameter)
        if math.isnan(draw.std) and parameter.numel() <= _MAX_CONSTANT_NUMEL:
            draw = _computed(module, name) or draw
        draws[name] = draw
    return MetaModel(module, draws, asks_for_balance)


def _computed(network: nn.Module, name: str) -> Draw | None:
    """Return the initial values of a small parameter that the architecture computes with a formula.

    The draw runs ``_init_weights`` for the owner of the parameter, with all other parameters on the meta
    device. Return None if that does not set the parameter.
    """
    path, _, attribute = name.rpartition(".")
    initialize = _initializer_of(network, path)
    if initialize is None:
        return None
    # Draw into a copy, because the parameters of the network may already have values, which must not change.
    owner = copy.deepcopy(network.get_submodule(path))
    shape = owner.get_parameter(attribute).shape

    def compute(seed: int) -> Tensor:
        values = nn.Parameter(torch.full(shape, math.nan, dtype=torch.float32, device="cpu"))
        owner._parameters[attribute] = values
        with torch.random.fork_rng(devices=()), torch.no_grad(), torch.device("cpu"):
            torch.manual_seed(seed)
            initialize(owner)
        return values.detach()

    # ``compute`` starts from NaN, so remaining NaN values were not set.
    is_set = not bool(compute(0).isnan().any())
    if not is_set:
        return None
    return Draw("computed", compute=compute)


def _initializer_of(network: nn.Module, path: str) -> Any:
    """Return ``_init_weights`` of the innermost network of ``transformers`` that contains a module, or None."""
    initialize = getattr(network, "_init_weights", None)
    names = path.split(".") if path else []
    for count in range(1, len(names) + 1):
        outer = network.get_submodule(".".join(names[:count]))
        initialize = getattr(outer, "_init_weights", initialize)
    return initialize


def follows_from_config(network: nn.Module, path: str, name: str) -> bool:
    """True if ``_init_weights`` sets a buffer to its current value, independent of its previous value."""
    initialize = _initializer_of(network, path)
    owner = copy.deepcopy(network.get_submodule(path))
    buffer = owner.get_buffer(name)
    if initialize is None or not buffer.is_floating_point():
        return False
    # Overwrite the copy, and see if the architecture restores its value
    value = buffer.clone()
    buffer.fill_(math.nan)
    with torch.random.fork_rng(devices=()), torch.no_grad(), torch.device("cpu"):
        initialize(owner)
    return torch.equal(owner.get_buffer(name), value)


_warnings: dict[str, list[str]] = {}
"""Folder -> warnings that ``transformers`` logged while it parsed the config.json."""
_warned_folders: set[str] = set()


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings that ``transformers`` logs in this block instead of printing them; drop
    duplicates.
    """
    warnings: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = _first_line(record.getMessage())
            if text not in warnings:
                warnings.append(text)

    # Make the collector the only handler, and do not propagate records to the root logger
    library_logger = logging.getLogger("transformers")
    handlers = library_logger.handlers
    propagate = library_logger.propagate
    library_logger.handlers = [Collector(logging.WARNING)]
    library_logger.propagate = False
    try:
        with without_torchao_warnings():
            yield warnings
    finally:
        library_logger.handlers = handlers
        library_logger.propagate = propagate


def _reason(warnings: Sequence[str], error: Exception) -> str:
    """Describe a failure of ``transformers``: its earlier warnings if any, since they name the key,
    else the error.
    """
    if warnings:
        return "; ".join(warnings)[:_MAX_WARNING_CHARS]
    # The message of a validation error has its reason in the second line
    text = " ".join(str(error).split())[:_MAX_WARNING_CHARS]
    if " " in text:
        return text
    # The text of a KeyError is only the key
    return f"{type(error).__name__}: {text}"


def _first_line(error: object) -> str:
    lines = str(error).splitlines() or [""]
    return lines[0][:200]


def _quantization_method(quantization: Any) -> str:
    """Return the name of a quantization method; MLX writes ``bits`` without a ``quant_method``."""
    if not isinstance(quantization, dict):
        return "?"
    if "quant_method" in quantization:
        return str(quantization["quant_method"])
    return "MLX" if "bits" in quantization else "?"


def _transformers() -> Any:
    with without_torchao_warnings():
        for name in ("configuration_auto", "modeling_auto"):
            libraries.load(f"transformers.models.auto.{name}", "model.name", "transformers")
        return libraries.load("transformers", "model.name", "transformers")


def _tables() -> dict[str, Mapping[str, Any]]:
    """Return, for each of KINDS, the mapping from model_type to the names of its classes."""
    modeling_auto = _transformers().models.auto.modeling_auto
    return {kind: getattr(modeling_auto, name, {}) for kind, name in KINDS.items()}


def _classes(entry: Any) -> list[str]:
    """Return the class names of a table's entry, which is None, a name, or a tuple of names."""
    if entry is None:
        return []
    if isinstance(entry, str):
        return [entry]
    return list(entry)


def _keys(value: Any, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the keys at any depth of a JSON value that match a pattern."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if pattern.search(str(key)):
                yield str(key)
            yield from _keys(inner, pattern)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, pattern)


def _without(value: Any, pattern: re.Pattern[str]) -> Any:
    """Return a copy of a JSON value without the keys, at any depth, that match a pattern."""
    if isinstance(value, dict):
        kept = {}
        for key, inner in value.items():
            if not pattern.search(str(key)):
                kept[key] = _without(inner, pattern)
        return kept
    if isinstance(value, list):
        return [_without(inner, pattern) for inner in value]
    return value


def _with_special_floats(value: Any) -> Any:
    """Return a copy of a JSON value with infinities and NaN, which ``transformers`` writes as objects.

    >>> _with_special_floats({"limit": [0.0, {"__float__": "Infinity"}]})
    {'limit': [0.0, inf]}
    """
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_special_floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_special_floats(inner) for inner in value]
    return value


def _rope_types(content: Mapping[str, Any]) -> list[Any]:
    """Return the types of rotary angles in config.json; newer files may have one table per kind of layer."""
    types = []
    for name in ("rope_scaling", "rope_parameters"):
        table = content.get(name)
        if not isinstance(table, dict):
            continue
        # The values may be the numbers of one table, or the tables of all kinds of layers
        for entry in (table, *table.values()):
            if not isinstance(entry, dict):
                continue
            for key in ("rope_type", "type"):
                if key in entry:
                    types.append(entry[key])
    return types


@contextmanager
def _parameters_on_meta(recorder: _InitRecorder) -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it. Constant initial values
    are recorded first.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or param.is_meta:
            return
        meta_param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        meta_param.__dict__.update(param.__dict__)
        self._parameters[name] = meta_param
        recorder.record_constant(meta_param, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _InitRecorder(TorchDispatchMode):
    """Record the last in-place operation that filled each entire tensor on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: dict[tuple[int, int], Draw] = {}
        self._kept: list[Tensor] = []
        """References to results of operations, because the address of a freed result may be used again."""
        self._values: set[int] = set()
        """Storages of small tensors whose values follow from numbers, without memory or random numbers as inputs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        output = func(*args, **kwargs)
        is_on_meta = bool(args) and isinstance(args[0], Tensor) and args[0].is_meta
        if not is_on_meta:
            self._follow_values(name, output, args)
            return output

        numbers = [float(value) for value in args[1:] if isinstance(value, int | float)]
        # A copy has the distribution of its source. Other names with an underscore are in place
        if name == "copy_":
            self._store(args[0], self._known(args[1]))
        elif name.endswith("_"):
            self._record(name, args[0], numbers, kwargs)
        elif name in ("mul", "div") and numbers:
            factor = numbers[0]
            if name == "div":
                factor = 1 / numbers[0]
            self._record_scaled(output, self._known(args[0]), abs(factor))
        return output

    def _follow_values(self, name: str, output: Any, args: Sequence[Any]) -> None:
        """Record whether the result of an operation follows from numbers."""
        if not isinstance(output, Tensor) or output.numel() > _MAX_VALUES:
            return
        inputs = [value for value in args if isinstance(value, Tensor)]
        is_unknown = any(part in name for part in _UNKNOWN)
        follows = bool(inputs) and not is_unknown and all(map(self._is_value, inputs))
        storage = output.untyped_storage()._cdata
        if follows or name in _FROM_NUMBERS:
            self._values.add(storage)
            self._kept.append(output)
        else:
            # An operation in place may replace the values by random numbers.
            self._values.discard(storage)

    def _is_value(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._values

    def _record_scaled(self, output: Tensor, draw: Draw | None, factor: float) -> None:
        """Record the result of a multiplication, which ``_init_weights`` may copy to a parameter."""
        if draw is not None and draw.distribution in ("normal", "truncated_normal", "uniform"):
            self._store(output, dataclasses.replace(draw, std=draw.std * factor))
            self._kept.append(output)

    def _known(self, tensor: Tensor) -> Draw | None:
        by_storage, by_object = self._places(tensor)
        return self._draws.get(by_storage) or self._draws.get(by_object)

    def record_constant(self, meta_param: Tensor, value: Tensor) -> None:
        """Record a parameter that is constructed from numbers: zeros or ones of any size, and other small ones.

        Examples are the weight of a norm, and the exponents of the activation function of Apertus.
        """
        if not 0 < value.numel() <= _MAX_CONSTANT_NUMEL or not value.is_floating_point():
            return
        if self._is_value(value):
            values = value.detach().float().clone()
            self._store(meta_param, Draw("computed", compute=lambda _: values))
            return
        low, high = value.detach().aminmax()
        constant = float(low)
        if constant != float(high) or constant not in (0.0, 1.0):
            return
        self._store(meta_param, Draw("ones" if constant else "zeros"))

    def draw(self, parameter: Tensor) -> Draw:
        """Return the initial distribution of a parameter; its ``std`` is NaN if the recorded
        operations are unknown.
        """
        return self._known(parameter) or Draw("normal", std=math.nan)

    @staticmethod
    def _places(tensor: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the two keys of a tensor: by storage, and by object because tying may replace its storage.

        The number of elements is part of a key. It distinguishes a tensor from a view of a part,
        such as the embedding row of the padding token, which has the same storage.
        """
        numel = tensor.numel()
        by_storage = (tensor.untyped_storage()._cdata, numel)
        by_object = (id(tensor), numel)
        return by_storage, by_object

    def _store(self, tensor: Tensor, draw: Draw | None) -> None:
        for place in self._places(tensor):
            self._draws.pop(place, None)
            if draw is not None:
                self._draws[place] = draw

    def _record(
        self, name: str, tensor: Tensor, numbers: list[float], named: Mapping[str, Any]
    ) -> None:
        # These operations do not change the values.
        if name in ("detach_", "requires_grad_") or (name == "add_" and numbers == [0.0]):
            return
        by_storage, _ = self._places(tensor)
        previous = self._draws.get(by_storage)
        self._store(tensor, _draw_after(name, previous, numbers, named))


def _draw_after(
    name: str, before: Draw | None, numbers: list[float], named: Mapping[str, Any]
) -> Draw | None:
    """Return the distribution of a tensor after an in-place operation, or None if it is not known.

    Args:
        name: the operation, such as "normal_".
        before: the distribution before it.
        numbers: its positional arguments that are numbers. Trailing defaults are missing.
        named: its keyword arguments.
    """
    if name in ("normal_", "uniform_"):
        # The arguments of both default to 0 and 1
        first = numbers[0] if numbers else 0.0
        second = numbers[1] if len(numbers) > 1 else 1.0
        if name == "normal_":
            return Draw("normal", std=float(second)) if first == 0 else None
        # Replace a uniform distribution with a normal one of the same variance. Initialization schemes
        # prescribe the variance, not the shape of the distribution
        if first != -second:
            return None
        return Draw("normal", std=(second - first) / math.sqrt(12))

    if name == "zero_":
        return Draw("zeros")
    if name == "fill_" and numbers:
        return {0.0: Draw("zeros"), 1.0: Draw("ones")}.get(float(numbers[0]))

    # nn.init.trunc_normal_ calls uniform_, erfinv_, mul_(std * sqrt(2)), add_(mean) and clamp_(min, max).
    # Recognize it by erfinv_, and read its parameters from the later calls.
    if name == "erfinv_":
        return Draw("truncated_normal")
    if before is None or before.distribution != "truncated_normal":
        return None
    if name == "mul_" and numbers:
        return Draw("truncated_normal", std=numbers[0] / math.sqrt(2))
    if name == "clamp_":
        upper = float(named.get("max", numbers[-1]))
        return Draw("truncated_normal", std=before.std, cutoff=upper / before.std)
    return None


def saved_config(
    content: Mapping[str, Any], architecture: str, labels: Sequence[str] = (), vocab_size: int = 0
) -> dict[str, Any]:
    """Return a folder's config.json for a class of this name, with only the fields changed that the
    run changed.

    ``labels`` replace those of the folder, except numbered ones (``LABEL_0``, ...) of the same count.
    """
    # A copy, which shares no inner dictionary with the content
    saved = dict(json.loads(json.dumps(dict(content))))

    # Numbered labels have no meaning, so the folder's labels are better
    numbered = [f"LABEL_{number}" for number in range(len(labels))]
    num_saved_labels = len(saved.get("id2label") or ())
    keeps_labels = list(labels) == numbered and len(labels) == num_saved_labels
    if labels and not keeps_labels:
        saved["id2label"] = {str(number): label for number, label in enumerate(labels)}
        saved["label2id"] = {label: number for number, label in enumerate(labels)}

    if vocab_size:
        # Models with several modalities store the size in the config of their text model
        text_config = saved.get("text_config")
        if isinstance(text_config, dict) and "vocab_size" in text_config:
            text_config["vocab_size"] = vocab_size
        else:
            saved["vocab_size"] = vocab_size

    if architecture not in (saved.get("architectures") or ()):
        saved["architectures"] = [architecture]
    return saved
