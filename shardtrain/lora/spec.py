"""Description of a model's adapters: rank, scale and adapted modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardtrain.layout import Draw
from shardtrain.lora import FACT, adapter_targets, stacks
from shardtrain.lora.linear import NAMES, LoraLinear, adapted, is_adapter, is_linear
from shardtrain.ops.dtensor import local_slices, local_tensor, to_full
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.config.schema.lora_options import Lora

CAUSAL = "CAUSAL_LM"
CLASSIFIES = "SEQ_CLS"
TASK_TYPES = {
    "causal": CAUSAL,
    "classification": CLASSIFIES,
    "sequence_to_sequence": "SEQ_2_SEQ_LM",
}
"""PEFT's task type for each kind of transformers model."""
# Maximum number of adapted modules in a description, which may come from elsewhere.
_MAX_MODULES = 100_000
_SCORES = ("score", "classifier")
"""Substrings in the names of classification heads. PEFT searches the children of a network for them."""


@dataclass(frozen=True)
class Spec:
    """Description of a model's adapters, without their tensors.

    Attributes:
        modules: Paths of the adapted linear modules.
        parameters: Paths of the adapted stacks of expert weights.
        saved: Paths of the fully trained modules: PEFT's ``modules_to_save``.
        task_type: PEFT's task type. None if PEFT has none for the model.
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    modules: tuple[str, ...]
    dropout: float = 0.0
    use_dora: bool = False
    parameters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    task_type: str | None = "CAUSAL_LM"

    @property
    def scale(self) -> float:
        """Factor of the product B A.

        >>> Spec(4, 8.0, False, ()).scale, Spec(4, 8.0, True, ()).scale
        (2.0, 4.0)
        """
        if self.rank_stabilized:
            return self.alpha / math.sqrt(self.rank)
        return self.alpha / self.rank

    def facts(self) -> dict[str, Any]:
        """Return the facts for a checkpoint, as JSON values."""
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "rank_stabilized": self.rank_stabilized,
            "dropout": self.dropout,
            "modules": list(self.modules),
            "use_dora": self.use_dora,
            "parameters": list(self.parameters),
            "saved": list(self.saved),
            "task_type": self.task_type,
        }

    def holds(self, name: str) -> bool:
        """True if a tensor of the model is trained, and therefore saved in checkpoints.

        >>> spec = Spec(4, 8.0, False, ("wq",), saved=("head",))
        >>> [spec.holds(name) for name in ("wq.lora_a", "head.weight", "wq.weight", "header.weight")]
        [True, True, False, False]
        """
        if is_adapter(name):
            return True
        return any(name.startswith(f"{path}.") for path in self.saved)

    def factors(self) -> list[str]:
        """Return the names of all adapter parameters."""
        factors = []
        for path in self.modules:
            for name in NAMES if self.use_dora else NAMES[:2]:
                factors.append(f"{path}.{name}")
        # Stacks have no magnitudes.
        for path in self.parameters:
            for name in NAMES[:2]:
                factors.append(f"{path}_{name}")
        return factors


def read_facts(facts: Mapping[str, Any], where: object) -> Spec | None:
    """Return the description of a checkpoint's adapters, or None if the checkpoint contains a full model.

    Raises:
        CheckpointError: the description is invalid.
    """
    description = facts.get(FACT)
    if description is None:
        return None
    if not _is_valid(description):
        raise CheckpointError(
            f"checkpoint {where}: the description of its adapters is invalid; use another checkpoint",
        )

    # The following keys are optional.
    dropout = description.get("dropout")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        dropout = 0.0
    task_type = description.get("task_type", CAUSAL)
    if task_type not in TASK_TYPES.values():
        task_type = None
    return Spec(
        rank=description["rank"],
        alpha=float(description["alpha"]),
        rank_stabilized=description["rank_stabilized"],
        modules=tuple(description["modules"]),
        dropout=float(dropout),
        use_dora=description.get("use_dora") is True,
        parameters=tuple(description.get("parameters", [])),
        saved=tuple(description.get("saved", [])),
        task_type=task_type,
    )


def _is_valid(description: Any) -> bool:
    """True if the values that ``read_facts`` uses have the right types and sizes.

    The checkpoint may be damaged or come from elsewhere.
    """
    if not isinstance(description, dict):
        return False
    # Check types first, then ranges, then the number of modules.
    types: dict[str, Any] = {
        "rank": int,
        "alpha": (int, float),
        "rank_stabilized": bool,
        "modules": list,
    }
    for key, types_of_key in types.items():
        if not isinstance(description.get(key), types_of_key):
            return False
    if not 1 <= description["rank"] <= 2**20:
        return False
    if not 0 < description["alpha"] < math.inf:
        return False
    num_modules = 0
    for key in ("modules", "parameters", "saved"):
        paths = description.get(key, [])
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            return False
        num_modules += len(paths)
    return 1 <= num_modules <= _MAX_MODULES


def adapt(
    model: nn.Module, module: ModuleType, shape: Any, options: Lora, new_head: bool = False
) -> tuple[Spec | None, dict[str, Draw]]:
    """Freeze a model on the meta device and add the adapters of ``[lora]``, in place.

    Args:
        new_head: True if the task has added a head. The head is then fully trained.

    Returns:
        The description of the adapters, and the initializer of each new parameter.
        (None, {}) without lora.enable.

    Raises:
        ConfigError: a target cannot be adapted, or the rank exceeds the size of a module.
    """
    # Without adapters, nothing is frozen.
    if not options.enable:
        return None, {}
    head = head_of(model, module) if new_head else ""
    saved = adapter_targets.find_saved(model, module, shape, options.modules_to_save, head)
    stacked = adapter_targets.find_stacks(model, options.target_parameters)
    # If the user named only stacks, adapt no linear modules by default.
    modules = []
    if options.target_modules or not stacked:
        modules = adapter_targets.find(model, module, shape, options.target_modules, saved)
    # A stack cannot be frozen and trained at the same time.
    for stack in stacked:
        if any(stack.path.startswith(f"{path}.") for path in saved):
            rule = f"names {stack.path}, which lora.modules_to_save trains fully"
            fix = "remove it from one of the two options"
            raise ConfigError(Problem(adapter_targets.PARAMETERS, None, rule, fix))
    # A new head makes every network a classifier.
    task_type: str | None = CLASSIFIES
    if not new_head:
        task_type = TASK_TYPES.get(getattr(model, "kind", "causal"))
    spec = Spec(
        rank=options.rank,
        alpha=options.alpha,
        rank_stabilized=options.rank_stabilized,
        modules=tuple(modules),
        dropout=options.dropout,
        use_dora=options.use_dora,
        parameters=tuple(stack.path for stack in stacked),
        saved=tuple(saved),
        task_type=task_type,
    )

    # A rank above the smaller side of a weight adds parameters without adding expressiveness.
    smaller_sizes = {}
    for path in modules:
        smaller_sizes[path] = min(model.get_submodule(path).weight.shape)  # type: ignore[arg-type,union-attr]
    for stack in stacked:
        smaller_sizes[stack.path] = min(stack.inputs, stack.outputs)
    for path, smaller in smaller_sizes.items():
        if spec.rank > smaller:
            rule = f"exceeds {smaller}, the maximum rank of the weight of {path}"
            fix = f"use at most {smaller}, or other target_modules"
            raise ConfigError(Problem("lora.rank", spec.rank, rule, fix))
    apply(model, spec)
    _tell(model, spec)
    return spec, draws(model, options.init)


def head_of(model: nn.Module, module: ModuleType) -> str:
    """Return the path of the classification head.

    Raises:
        ConfigError: a transformers class has no head with a known name.
    """
    network = getattr(model, "hf", None)
    # Native models name their head in the layout.
    if network is None:
        return str(module.LAYOUT.last[-1])
    for name, _ in network.named_children():
        if any(part in name for part in _SCORES):
            return f"hf.{name}"
    raise ConfigError(
        Problem(
            "lora.enable",
            True,
            rule=f"finds no head in {type(network).__name__}: none of its modules is named {' or '.join(_SCORES)}",
            fix="name the head in lora.modules_to_save, or train all weights",
        )
    )


def draws(model: nn.Module, start: str = "kaiming") -> dict[str, Draw]:
    """Return the initializer of each adapter parameter of a model.

    After loading the frozen weights, ``start_magnitudes`` replaces the initial DoRA magnitudes.
    """
    # Kaiming's initialization depends on the number of inputs.
    inputs: dict[str, int] = {}
    for path, linear in adapted(model):
        inputs[f"{path}.lora_a"] = linear.in_features
    for path, factor in stacks.adapted(model):
        inputs[f"{path}_lora_a"] = factor.shape[2]
    parameters = dict(model.named_parameters())
    initializers = {}
    for name, size in inputs.items():
        # Uniform within 1 / sqrt(inputs) is kaiming_uniform with a = sqrt(5), the
        # initialization of the paper's code.
        if start == "kaiming":
            initializers[name] = Draw("uniform", std=(3 * size) ** -0.5)
        else:
            rank = parameters[name].shape[-2]
            initializers[name] = Draw("normal", std=1 / rank)
        # B starts at zero, so the adapted model starts as the base model.
        name_of_b = f"{name[:-1]}b"
        initializers[name_of_b] = Draw("zeros", std=0.0)
    # ``start_magnitudes`` sets these once the frozen weights are loaded.
    for name in parameters:
        if name.endswith("lora_magnitude"):
            initializers[name] = Draw("ones")
    return initializers


@torch.no_grad()
def start_magnitudes(model: nn.Module) -> None:
    """Set DoRA's magnitudes to the row norms of the frozen weights, which must be loaded. Collective."""
    for _, linear in adapted(model):
        magnitude = linear.lora_magnitude
        if magnitude is None:
            continue
        # A quantized weight has no parameter. It is dequantized as (O, I).
        if linear.weight is None:
            full_OI = linear.weight_OI(torch.float32)
        else:
            full_OI = to_full(linear.weight.detach())
            if linear.transposed:
                full_OI = full_OI.t()
        length_O = torch.linalg.vector_norm(full_OI.float(), dim=1)
        local_tensor(magnitude).copy_(length_O[local_slices(magnitude)])


def apply(model: nn.Module, spec: Spec) -> None:
    """Freeze all parameters except those of ``spec.saved``, and add the adapters, in place.

    Raises:
        CheckpointError: the model lacks a module of ``spec``.
    """
    # Freeze all parameters first. New parameters are trained by default.
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    modules = dict(model.named_modules())
    for path in spec.modules:
        linear = modules.get(path)
        if linear is None or not is_linear(linear):
            raise CheckpointError(
                f"the adapters are for {path}, which is not a linear module of this model; use their base model"
            )
        owner, _, leaf = path.rpartition(".")
        lora = LoraLinear(linear, spec.rank, spec.scale, spec.dropout, spec.use_dora)
        setattr(model.get_submodule(owner), leaf, lora)
    if spec.parameters:
        all_stacks = stacks.find(model)
        adapted_stacks = []
        for path in spec.parameters:
            if path not in all_stacks:
                raise CheckpointError(
                    f"the adapters are for {path}, which is not a stack of experts in this model; use their base model"
                )
            adapted_stacks.append(all_stacks[path])
        stacks.apply(model, adapted_stacks, spec.rank, spec.scale)
    # Names of one run may not fit another model, so each is checked.
    for path in spec.saved:
        if path not in modules:
            raise CheckpointError(
                f"the adapters include {path}, which is not a module of this model; use their base model"
            )
        modules[path].requires_grad_(True)


def _tell(model: nn.Module, spec: Spec) -> None:
    """Log which modules have adapters, and how many parameters are trained."""
    total = 0
    trained = 0
    for parameter in model.parameters():
        total += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()
    adapted_paths = [*spec.modules, *spec.parameters]
    # A model has many layers, so list each kind of module once.
    last_components = dict.fromkeys(path.rpartition(".")[2] for path in adapted_paths)
    shown = ", ".join(last_components)
    fully_trained = ""
    if spec.saved:
        fully_trained = f", {', '.join(spec.saved)} fully trained"
    logger.info(
        f"lora: adapters of rank {spec.rank} for {len(adapted_paths)} modules ({shown}){fully_trained}: "
        f"{trained:,} of {total:,} parameters ({100 * trained / total:.2f} %) are trained"
    )
