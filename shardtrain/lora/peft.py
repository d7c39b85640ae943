"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``, read as data.

Each key of the configuration is checked. An unknown key with a value other than false or empty is an error,
because it may change the output of the adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardtrain import models, tasks
from shardtrain.checkpoint.collectives import all_ranks
from shardtrain.config.schema import Config
from shardtrain.hf import as_is
from shardtrain.hub_formats import safetensors_header
from shardtrain.hub_formats.config_json import read_json
from shardtrain.hub_formats.format import Heads, HubFormat, Stacked
from shardtrain.lora import stacks
from shardtrain.lora.adapter_targets import SCORE, linears_of, stack_name, their_names
from shardtrain.lora.linear import NAMES, FrozenLinear, is_transposed
from shardtrain.lora.spec import CLASSIFIES, Spec
from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.ops.tied import tied_names
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import CheckpointError, ConfigError
from shardtrain.utils.log import logger

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_LISTS = {"modules": "modules", "parameters": "target_parameters", "saved": "modules_to_save"}
_FACTORS = {
    "lora_a": "lora_A.weight",
    "lora_b": "lora_B.weight",
    "lora_magnitude": "lora_magnitude_vector",
}
_BASE = ".base_layer.weight"
"""Suffix of a frozen weight that PEFT saves with an adapter of an embedding or an output layer."""
_FIRST_FACTORS = (".lora_A.weight", ".lora_embedding_A")
"""Name suffixes of factor A, for linear modules and for embeddings."""
_EXCHANGED = ("llama4_text",)
"""Model types whose expert weights are (E, I, O) in transformers without an
``is_transposed`` that PEFT could read.
"""
_READ = {
    "r", "lora_alpha", "use_rslora", "use_dora",
    "target_modules", "target_parameters", "modules_to_save",
}  # fmt: skip
"""Keys of adapter_config.json that describe the adapters."""
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type",
    "lora_dropout", "qalora_group_size", "runtime_config", "ensure_weight_tying", "fan_in_fan_out",
    "megatron_core", "layers_to_transform", "layers_pattern", "exclude_modules",
}  # fmt: skip
"""Keys that do not change the output of trained adapters.

The tensor names show which modules are adapted, and PEFT derives fan_in_fan_out from the class of the module.
"""
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other initializations change the base weights.
    "init_lora_weights": (True, False, "gaussian"),
}
"""Allowed values of keys that can change the output of the adapters."""


def is_folder(path: object) -> bool:
    """True if a path is a local folder in PEFT's format."""
    return isinstance(path, Path) and bounded_reads.is_present(path / CONFIG)


def config_fields(spec: Spec, names: Names, linears: list[str], base: str) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    Args:
        linears: Paths of all linear modules in transformers. ``target_modules`` contains a short name only if
            all linear modules with that name are adapted. Otherwise it contains full paths.
    """
    # A short name adapts every module with that name. Use short names only if all of these modules are adapted.
    paths = {names.modules[path] for path in spec.modules}
    short_names = {_last_component(path) for path in paths}
    with_short_names = {path for path in linears if _last_component(path) in short_names}
    targets = sorted(short_names) if with_short_names == paths else sorted(paths)
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": spec.task_type,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "use_rslora": spec.rank_stabilized,
        "use_dora": spec.use_dora,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": names.transposed,
        "init_lora_weights": True,
        "modules_to_save": sorted(names.saved) or None,
    }
    if spec.parameters:
        fields["target_parameters"] = sorted({stack_name(path) for path in spec.parameters})
    return fields


def _last_component(path: str) -> str:
    return path.rpartition(".")[2]


@dataclass(frozen=True)
class Names:
    """Names and layouts of a model's adapters in PEFT's format.

    Attributes:
        tensors: Our name -> name in ``adapter_model.safetensors``.
        modules: Our path of an adapted module -> PEFT's path.
        saved: PEFT's paths of the fully trained modules.
        transposed: True if adapted modules have weights (I, O).
        experts: Our name of each factor of a stack -> number of experts.
        rows: Our name -> row indices in PEFT's tensor, if our tensor is a part
            of it or has another row order.
        shapes: Name in ``adapter_model.safetensors`` -> shape in that file.
    """

    tensors: Mapping[str, str]
    modules: Mapping[str, str]
    saved: tuple[str, ...]
    transposed: bool
    experts: Mapping[str, int]
    rows: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]

    def theirs(self, name: str, tensor: Tensor) -> Tensor:
        """Convert one of our tensors to its form in PEFT's file."""
        if name in self.experts:
            tensor = stacks.to_peft(name, tensor)
        if name in self.rows:
            tensor = tensor[self.rows[name].argsort()]
        return tensor

    def ours(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a tensor of PEFT's file to our form: the inverse of ``theirs``."""
        if name in self.rows:
            tensor = tensor[self.rows[name]]
        if name in self.experts:
            tensor = stacks.from_peft(name, tensor, self.experts[name])
        return tensor


def names_of(
    spec: Spec, module: ModuleType, shape: Any, num_labels: int = 0, reads: bool = False
) -> Names:
    """Return the PEFT name of every adapter tensor. With ``num_labels``, the model has a classification head.

    One module of the Hugging Face format may be several of our modules, such as q, k and v of GPT-NeoX. Its
    adapter can be read, which requires ``reads``: our modules share A, and each gets its rows of B. It cannot
    be written, because our modules may have different A.

    Raises:
        ConfigError: PEFT's format cannot represent an adapter.
    """
    model = models.build(module, shape, num_labels)
    modules = dict(model.named_modules())
    hub = getattr(module, "HUB", None)
    theirs = their_names(spec.modules, module, shape)
    parts = _parts(spec.modules, hub, shape)
    for path in spec.modules:
        if path not in theirs or (path in parts and not reads):
            raise ConfigError(_not_representable(path, parts.get(path)))
    draft = _Draft()

    # Each linear module has two factors and, with DoRA, magnitudes.
    for path in spec.modules:
        linear: Any = FrozenLinear(modules[path])
        draft.add_linear(path, theirs[path], linear, spec, parts.get(path), shape)

    # Each stack of experts has two factors. If one module owns two adapted stacks, PEFT nests their wrappers.
    _check_experts(
        spec.parameters, hub, "merge the adapters (shardtrain merge) and export the merged model"
    )
    all_stacks = stacks.find(model)
    adapted_stacks = [stack for path, stack in all_stacks.items() if path in spec.parameters]
    for path in spec.parameters:
        stack = all_stacks[path]
        siblings = [other.path for other in adapted_stacks if other.owner == stack.owner]
        # The first parameter of the module has the innermost wrapper.
        num_wrappers_inside = len(siblings) - 1 - siblings.index(path)
        source = None
        if hub is not None:
            source = hub.source(f"{stack.owner}.{stack.weights[0]}", shape)
        draft.add_stack(stack, spec.rank, num_wrappers_inside, source)

    # Add the fully trained modules.
    saved = _saved_names(module, shape, model, spec.task_type == CLASSIFIES, spec)
    for name, their_name in saved.items():
        peft_name = PREFIX + their_name
        draft.tensors[name] = peft_name
        draft.shapes[peft_name] = tuple(model.get_parameter(name).shape)
    # A dict and not a set, to keep the order. A module may have several parameters.
    saved_modules = dict.fromkeys(their_name.rpartition(".")[0] for their_name in saved.values())
    return Names(
        tensors=draft.tensors,
        modules=theirs,
        saved=tuple(saved_modules),
        transposed=any(is_transposed(modules[path]) for path in spec.modules),
        experts=draft.experts,
        rows=draft.rows,
        shapes=draft.shapes,
    )


def _parts(paths: Iterable[str], hub: HubFormat | None, shape: Any) -> dict[str, Heads]:
    """Return the modules that are parts of a larger module in the Hugging Face format."""
    parts: dict[str, Heads] = {}
    if hub is None:
        return parts
    for path in paths:
        source = hub.source(f"{path}.weight", shape)
        if isinstance(source, Heads):
            parts[path] = source
    return parts


def _not_representable(path: str, part: Heads | None) -> str:
    """Return the message for a module whose adapter PEFT's format cannot represent."""
    counterpart = "no module"
    if part is not None:
        counterpart = f"a part of {part.name.removesuffix('.weight')}"
    return (
        f"{path} is {counterpart} in the Hugging Face format of this model, "
        "so PEFT cannot store its adapter; merge the adapters (shardtrain merge) and export "
        "the merged model"
    )


class _Draft:
    """Names, shapes and layouts of adapter tensors, before they become a ``Names``."""

    def __init__(self) -> None:
        self.tensors: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.experts: dict[str, int] = {}
        self.rows: dict[str, Tensor] = {}

    def add_linear(
        self, path: str, their_path: str, linear: Any, spec: Spec, part: Heads | None, shape: Any
    ) -> None:
        """Add the factors of a linear module. ``part`` is its place in a larger module of PEFT, or None."""
        outputs = linear.out_features
        if part is not None:
            outputs *= part.parts
        sizes = {
            "lora_a": (spec.rank, linear.in_features),
            "lora_b": (outputs, spec.rank),
            "lora_magnitude": (outputs,),
        }
        factors = NAMES if spec.use_dora else NAMES[:2]
        for factor in factors:
            name = f"{path}.{factor}"
            peft_name = f"{PREFIX}{their_path}.{_FACTORS[factor]}"
            self.tensors[name] = peft_name
            self.shapes[peft_name] = sizes[factor]
            # Our module has every n-th group of rows, because the Hugging Face module
            # stores the parts of each head together.
            if part is not None and factor != "lora_a":
                heads = torch.arange(outputs).unflatten(0, (-1, part.parts, shape.head_dim))
                self.rows[name] = heads[:, part.part].flatten()

    def add_stack(
        self, stack: stacks.Stack, rank: int, num_wrappers_inside: int, source: object
    ) -> None:
        """Add the factors of a stack of experts. ``source`` is its first weight in the Hugging Face format."""
        # PEFT concatenates the factors of all experts along the rank.
        ranks = rank * stack.experts
        sizes = {"lora_a": (ranks, stack.inputs), "lora_b": (stack.outputs, ranks)}
        their_owner = stack_name(stack.path).rpartition(".")[0]
        their_owner += ".base_layer" * num_wrappers_inside
        for factor, size in sizes.items():
            name = f"{stack.path}_{factor}"
            peft_name = f"{PREFIX}{their_owner}.{_FACTORS[factor]}"
            self.tensors[name] = peft_name
            self.shapes[peft_name] = size
            self.experts[name] = stack.experts
        # An interleaved format alternates the rows of the parts, ours concatenates them.
        if isinstance(source, Stacked) and source.interleaved:
            output_rows = torch.arange(stack.outputs).unflatten(0, (-1, source.parts))
            self.rows[f"{stack.path}_lora_b"] = output_rows.t().flatten()


def _check_experts(parameters: tuple[str, ...], hub: HubFormat | None, fix: str) -> None:
    if parameters and hub is not None and hub.model_type in _EXCHANGED:
        raise ConfigError(
            f"{parameters[0]}: PEFT swaps the inputs and outputs of the experts of "
            f"{hub.architecture}, so their adapters cannot be read or written in PEFT's format; "
            f"{fix}"
        )


def _saved_names(
    module: ModuleType,
    shape: Any,
    model: torch.nn.Module,
    classifies: bool,
    spec: Spec | None = None,
) -> dict[str, str]:
    """Map the tensors of fully trained modules to their PEFT names without the prefix.

    Every name of a tied tensor is included. Without a ``spec``, all tensors that have a PEFT name are mapped.
    """
    peft_names = {}
    hub = getattr(module, "HUB", None)
    new_head = module.LAYOUT.last[-1]
    for name, _ in model.named_parameters(remove_duplicate=False):
        if spec is not None and not spec.holds(name):
            continue
        # A transformers model already has PEFT's names after its wrapper's prefix. A new head has PEFT's fixed name.
        if as_is.is_as_is(module):
            peft_names[name] = name.partition(".")[2]
            continue
        owner, _, leaf = name.rpartition(".")
        if classifies and owner == new_head:
            peft_names[name] = f"{SCORE}.{leaf}"
            continue

        # The other names are those of the Hugging Face format, if the tensor exists there.
        source = None
        if hub is not None:
            source = hub.source(name, shape)
        if isinstance(source, str):
            peft_names[name] = source
        elif spec is not None:
            raise ConfigError(
                f"{name} is not a separate tensor in the Hugging Face format of this model, "
                "so PEFT cannot store it; merge the adapters (shardtrain merge) and export the "
                "merged model"
            )
    return peft_names


class PeftFolder:
    """Adapters of a folder, checked against a model of this package.

    Attributes:
        spec: Description of the adapters.
        names: PEFT names of their tensors.
        copies: Our name -> PEFT name of frozen weights that the file contains, such as
            the weight of an adapted ``lm_head``.
    """

    def __init__(self, folder: Path, module: ModuleType, shape: Any, num_labels: int = 0) -> None:
        """Read the configuration and the header of the weights.

        Args:
            num_labels: Number of rows of a classification head, or 0.

        Raises:
            ConfigError: the configuration uses an unsupported option or module.
            CheckpointError: a file is missing, truncated or not safetensors, or the
                adapters belong to another model.
        """
        self.folder = folder
        fields = read_json(folder / CONFIG)
        partial_spec = _read_config(fields, folder / CONFIG)
        self._file = _open(folder)
        shapes = {}
        for name in self._file.keys():  # noqa: SIM118
            shapes[name] = tuple(self._file.get_slice(name).get_shape())
        # Separate copies of frozen weights from the tensors of the adapters.
        # A base weight next to its own lora_A is a copy.
        copies = {name for name in shapes if f"{name.removesuffix(_BASE)}.lora_A.weight" in shapes}
        adapter_shapes = {name: size for name, size in shapes.items() if name not in copies}
        self.spec, self.names = self._recognise(
            adapter_shapes, partial_spec, module, shape, num_labels
        )
        self.copies = {}
        for path, peft_name in self.names.modules.items():
            key = f"{PREFIX}{peft_name}{_BASE}"
            if key in copies:
                self.copies[f"{path}.weight"] = key

    def _recognise(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        partial_spec: Spec,
        module: Any,
        shape: Any,
        num_labels: int,
    ) -> tuple[Spec, Names]:
        """Find the adapted modules from the tensor names in the file. Raise an error for an unknown tensor."""
        _check_experts(
            partial_spec.parameters,
            getattr(module, "HUB", None),
            "merge them with PEFT (merge_and_unload)",
        )
        model = models.build(module, shape, num_labels)
        modules = self._adapted_linears(shapes, model, module, shape)
        stacked = []
        for path in stacks.find(model):
            if self._has_stack(path, partial_spec.parameters):
                stacked.append(path)

        # Find the fully trained modules in the file.
        task_type = CLASSIFIES if num_labels else partial_spec.task_type
        all_names = _saved_names(module, shape, model, task_type == CLASSIFIES)
        present = {name for name, their_name in all_names.items() if PREFIX + their_name in shapes}
        for group in tied_names(model):
            peft_names = {}
            for name in group:
                if name in all_names:
                    peft_names[name] = PREFIX + all_names[name]
            self._check_tied(peft_names, present)
        saved = dict.fromkeys(name.rpartition(".")[0] for name in all_names if name in present)
        spec = replace(
            partial_spec,
            modules=tuple(modules),
            parameters=tuple(stacked),
            saved=tuple(saved),
            task_type=task_type,
        )

        # The file must have exactly the tensors of these adapters.
        names = names_of(spec, module, shape, num_labels, reads=True)
        expected = names.shapes
        all_tensors = sorted(expected.keys() | shapes.keys())
        wrong = [name for name in all_tensors if expected.get(name) != shapes.get(name)]
        has_adapters = bool(spec.modules or spec.parameters)
        if wrong or not has_adapters:
            first = wrong[0] if wrong else "no adapter"
            raise CheckpointError(
                f"{self.folder / WEIGHTS} does not fit this model: {len(wrong)} tensors differ, "
                f"such as {first}: {_shown(shapes.get(first))} instead of "
                f"{_shown(expected.get(first))}; use the model it was trained on"
            )
        return spec, names

    def _adapted_linears(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        model: torch.nn.Module,
        module: ModuleType,
        shape: Any,
    ) -> list[str]:
        """Return the linear modules that have factors in the file.

        Raise ConfigError if a module has factors that is neither linear nor the owner of a stack.
        """
        owners = set()
        for name in shapes:
            for end in _FIRST_FACTORS:
                if name.endswith(end):
                    owners.add(name.removesuffix(end))
        linears = linears_of(model)
        # PEFT names the factors of a stack after the module that contains the stack.
        with_stacks = {stack.owner for stack in stacks.find(model).values()}
        modules = []
        theirs = their_names([path for path, _ in model.named_modules()], module, shape)
        for path, their_path in theirs.items():
            if PREFIX + their_path not in owners:
                continue
            if path in linears:
                modules.append(path)
            elif path not in with_stacks:
                raise ConfigError(
                    f"{self.folder / WEIGHTS} has an adapter for {their_path}, of class "
                    f"{type(model.get_submodule(path)).__name__}, "
                    "but only nn.Linear and experts can have adapters; "
                    "merge it with PEFT (merge_and_unload), or train the module with lora.modules_to_save"
                )
        return modules

    def _check_tied(self, group: Mapping[str, str], present: set[str]) -> None:
        """Raise CheckpointError if the file has only some names of a tied tensor, or different values for them."""
        stored_names = [peft_name for name, peft_name in group.items() if name in present]
        if not stored_names:
            return
        tensors = [self._file.get_tensor(name) for name in stored_names]
        are_equal = all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        if len(tensors) < len(group) or not are_equal:
            first = stored_names[0]
            others = ", ".join(sorted({*group.values()} - {first}))
            raise CheckpointError(
                f"{self.folder / WEIGHTS} has {first} without an equal {others}, "
                "although this model ties them; merge these adapters with PEFT, which unties them"
            )

    @staticmethod
    def _has_stack(path: str, wanted: tuple[str, ...]) -> bool:
        theirs = stack_name(path)
        return any(theirs == name or theirs.endswith(f".{name}") for name in wanted)

    def read(self, name: str) -> Tensor:
        """Return an unsharded tensor by its name in our model."""
        tensor = self._file.get_tensor(self.names.tensors[name])
        return self.names.ours(name, tensor)

    def check_copies(self, weights: Mapping[str, Tensor]) -> None:
        """Compare this rank's part of the frozen ``weights``, by name, with their copies in the file.

        Raises:
            CheckpointError: a copy differs, so the adapters were trained on another model.
        """
        for name in self.copies.keys() & weights.keys():
            if not self._equals_copy(weights[name], self.copies[name]):
                raise CheckpointError(
                    f"{self.folder / WEIGHTS}: {self.copies[name]} differs from the weights of the "
                    "model; use the model that the adapters were trained on, "
                    "or merge them with PEFT (merge_and_unload)"
                )

    def _equals_copy(self, weight: Tensor, peft_name: str) -> bool:
        """True if this rank's part of a weight is equal to that of its copy in the file."""
        copy = self._file.get_slice(peft_name)
        if tuple(copy.get_shape()) != tuple(weight.shape):
            return False
        ours = local_tensor(weight).detach()
        theirs = copy[tuple(local_slices(weight))].to(ours.device)
        # Either tensor may have been rounded to the dtype of the other.
        if torch.equal(theirs.to(ours.dtype), ours):
            return True
        return torch.equal(ours.to(theirs.dtype), theirs)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill this rank's part of the adapters in place. Keys are names in our model.

        The frozen weights in ``tensors`` must already be loaded, because ``check_copies`` compares them with the
        adapter's file.
        """
        self.check_copies(tensors)
        for name in self.names.tensors.keys() & tensors.keys():
            tensor = tensors[name]
            box = tuple(local_slices(tensor))
            # A converted tensor has another row order, so read all of it. Otherwise read only this part.
            if name in self.names.experts or name in self.names.rows:
                part = self.read(name)[box]
            else:
                part = self._file.get_slice(self.names.tensors[name])[box]
            local_tensor(tensor).detach().copy_(part)


def load(
    config: Config, facts: Mapping[str, Any], parameters: Mapping[str, Tensor], folder: Path
) -> None:
    """Fill a run's adapters from a folder. Collective: an error on one rank is raised on all ranks.

    Args:
        facts: Facts about the run's adapters, as returned by ``Spec.facts``.
        parameters: Parameters of the run by name.

    Raises:
        ConfigError: rank, scale or modules differ from ``[lora]``.
        CheckpointError: the folder is damaged, or its adapters belong to another model.
    """
    module, shape = models.configured(config.model)
    labels = tasks.open_task(config).num_labels

    def fill() -> None:
        peft_folder = PeftFolder(folder, module, shape, labels)
        differ = []
        for key, theirs in peft_folder.spec.facts().items():
            # Dropout and task type may differ between runs.
            if key in ("dropout", "task_type") or facts[key] == theirs:
                continue
            # Lists are too long to print.
            if key in _LISTS:
                differ.append(f"{_LISTS[key]} differ")
            else:
                differ.append(f"{key} is {theirs!r} instead of {facts[key]!r}")
        if differ:
            raise ConfigError(
                f"lora.initial_load_path={folder}: {'; '.join(differ)}; set [lora] to the values of the folder"
            )
        peft_folder.fill(parameters)

    all_ranks(fill)
    logger.info(f"starting from the adapters of {folder}")


def _open(folder: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    path = folder / WEIGHTS
    if not bounded_reads.is_present(path):
        legacy = (folder / "adapter_model.bin").exists()
        what = "no weights"
        if legacy:
            what = "only adapter_model.bin, a pickle, which is never opened,"
        raise CheckpointError(
            f"{folder} has {what} instead of {WEIGHTS}; save it with safe_serialization=True",
        )
    try:
        safetensors_header.read(path)
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}); download it again",
        ) from None


def _read_config(fields: Mapping[str, Any], path: Path) -> Spec:
    """Parse ``adapter_config.json``.

    The returned spec lists no modules, because they follow from the tensor names.
    """
    for key, allowed in _ONLY.items():
        if fields.get(key) is not None and fields[key] not in allowed:
            raise ConfigError(
                f"{path} has {key}={fields[key]!r}, which is not supported; "
                "merge these adapters with PEFT, or train new ones"
            )
    # A key that is not read here may change the output of the adapters, unless it is empty or false.
    known = {*_READ, *_ONLY, *_IGNORED}
    unknown = []
    for key, value in sorted(fields.items()):
        if value and key not in known:
            unknown.append(key)
    if unknown:
        examples = [f"{key}={str(fields[key])[:60]!r}" for key in unknown[:5]]
        raise ConfigError(
            f"{path} has {', '.join(examples)}, which is not supported and may change the output of the adapters; "
            "merge them with PEFT, or train new ones"
        )
    rank = _number(fields, "r", 8, path, _is_rank)
    alpha = _number(fields, "lora_alpha", 8, path, _is_positive)
    stacked = fields.get("target_parameters") or []
    if not isinstance(stacked, list) or not all(isinstance(name, str) for name in stacked):
        raise ConfigError(
            f"{path}: target_parameters={str(stacked)[:60]!r} is not a list of names; use the file that PEFT wrote"
        )
    return Spec(
        rank=int(rank),
        alpha=float(alpha),
        rank_stabilized=bool(fields.get("use_rslora")),
        modules=(),
        dropout=0.0,
        use_dora=bool(fields.get("use_dora")),
        parameters=tuple(stacked),
        saved=(),
        task_type=fields.get("task_type"),
    )


def _is_rank(value: float) -> bool:
    return isinstance(value, int) and 1 <= value <= 2**20


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _number(
    fields: Mapping[str, Any],
    key: str,
    default: float,
    path: Path,
    good: Callable[[Any], bool],
) -> Any:
    value = fields.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not good(value):
        raise ConfigError(
            f"{path}: {key}={value!r} is not a valid number; use the file that PEFT wrote"
        )
    return value


def _shown(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
