"""What the adapters of a model are: their rank, their scale and the modules that have them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from shardtrain.errors import CheckpointError, ConfigError, Problem
from shardtrain.layout import Draw
from shardtrain.log import logger
from shardtrain.lora import targets
from shardtrain.lora.linear import LoraLinear, adapted

if TYPE_CHECKING:
    from shardtrain.config.lora_schema import Lora

FACT = "lora"
"""Name of what a checkpoint says of its adapters, among its facts."""
_MAX_MODULES = 100_000


@dataclass(frozen=True)
class Spec:
    """The adapters of a model, without their numbers."""

    rank: int
    alpha: float
    rank_stabilized: bool
    modules: tuple[str, ...]
    """Paths in the model."""
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """What B A is multiplied by.

        >>> Spec(4, 8.0, False, ()).scale, Spec(4, 8.0, True, ()).scale
        (2.0, 4.0)
        """
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON."""
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "rank_stabilized": self.rank_stabilized,
            "dropout": self.dropout,
            "modules": list(self.modules),
        }


def read_facts(facts: Mapping[str, Any], where: object) -> Spec | None:
    """What a checkpoint says of its adapters; None where it holds a whole model. Raises CheckpointError."""
    found = facts.get(FACT)
    if found is None:
        return None
    kinds: dict[str, Any] = {"rank": int, "alpha": (int, float), "rank_stabilized": bool, "modules": list}
    good = isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in kinds.items())
    if (
        not good
        or not 1 <= found["rank"] <= 2**20
        or not 0 < found["alpha"] < math.inf
        or not 1 <= len(found["modules"]) <= _MAX_MODULES
        or not all(isinstance(name, str) for name in found["modules"])
    ):
        raise CheckpointError(f"checkpoint {where}: what it says of its adapters is no rank, alpha and modules")
    dropout = found.get("dropout")
    dropout = float(dropout) if isinstance(dropout, int | float) and 0 <= dropout < 1 else 0.0
    modules = tuple(found["modules"])
    return Spec(found["rank"], float(found["alpha"]), found["rank_stabilized"], modules, dropout)


def adapt(model: nn.Module, module: ModuleType, shape: Any, options: Lora) -> dict[str, Draw]:
    """Freeze a model that is on the meta device and add the adapters that ``[lora]`` asks for, in place.

    Gives how each new parameter starts; nothing where lora.enable is off.

    Raises:
        ConfigError: for a target that is none, or a rank above the size of a module.
    """
    if not options.enable:
        return {}
    modules = targets.find(model, module, shape, options.target_modules)
    spec = Spec(options.rank, options.alpha, options.rank_stabilized, tuple(modules), options.dropout)
    for path in modules:
        smaller = min(model.get_submodule(path).weight.shape)  # type: ignore[arg-type,union-attr]
        if spec.rank > smaller:
            rule = f"is above the {smaller} of {path}: its weight itself has no higher rank"
            raise ConfigError(Problem("lora.rank", spec.rank, rule, f"use at most {smaller}, or other target_modules"))
    apply(model, spec)
    _tell(model, spec)
    return draws(model, options.init)


def draws(model: nn.Module, start: str = "kaiming") -> dict[str, Draw]:
    """How each factor of an adapted model starts; nothing where none is adapted."""
    found = {}
    for path, linear in adapted(model):
        # uniform within 1 / sqrt(inputs) is kaiming_uniform with a = sqrt(5), the start that the paper's code has
        kaiming = Draw("uniform", std=(3 * linear.in_features) ** -0.5)
        found[f"{path}.lora_a"] = kaiming if start == "kaiming" else Draw("normal", std=1 / linear.lora_a.shape[0])
        found[f"{path}.lora_b"] = Draw("zeros", std=0.0)
    return found


def apply(model: nn.Module, spec: Spec) -> None:
    """Freeze every parameter and put an adapter beside each module of the spec, in place.

    Raises:
        CheckpointError: when the model has no such linear module.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    known = dict(model.named_modules())
    for path in spec.modules:
        linear = known.get(path)
        if type(linear) is not nn.Linear:
            raise CheckpointError(f"the adapters are for {path}, which is no linear module of this model")
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, LoraLinear(linear, spec.rank, spec.scale, spec.dropout))


def spec_of(names: Iterable[str], options: Lora) -> Spec:
    """The spec of a model that ``adapt`` has changed, from the names of its parameters."""
    modules = tuple(name.rpartition(".")[0] for name in names if name.endswith(".lora_a"))
    return Spec(options.rank, options.alpha, options.rank_stabilized, modules, options.dropout)


def _tell(model: nn.Module, spec: Spec) -> None:
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shown = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in spec.modules))
    logger.info(
        f"lora: rank {spec.rank} beside {len(spec.modules)} modules ({shown}): {trained:,} of {total:,} parameters "
        f"({100 * trained / total:.2f} %) are trained"
    )
