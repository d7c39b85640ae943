"""Which parameters decay: the parameters of a model sorted into optimizer groups by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Parameter

from shardtrain.utils.errors import ConfigError, Problem


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]],
    no_weight_decay: Sequence[str],
    weight_decay: float,
    all_names: Iterable[str] | None = None,
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: every parameter once, those that match a pattern without weight decay.

    Patterns are shell globs in which ``*`` crosses dots. Plain parameters and those of each device mesh get groups of
    their own, because one kernel cannot update plain and distributed tensors together. ``all_names`` are the
    parameters of the whole model where ``named_parameters`` is one pipeline stage, so that a pattern may fit another
    stage alone.

    Raises:
        ConfigError: when a pattern matches no parameter.
    """
    named = list(named_parameters)
    names = [name for name, _ in named] if all_names is None else list(all_names)
    unused = [pattern for pattern in no_weight_decay if not any(fnmatchcase(name, pattern) for name in names)]
    if unused:
        fix = f"use a pattern of names like {', '.join(names[:3])}"
        problems = [Problem("optimizer.no_weight_decay", p, "matches no parameter", fix) for p in unused]
        raise ConfigError(problems)
    groups: dict[tuple[float, Any], list[Parameter]] = {}
    for name, parameter in named:
        decay = 0.0 if any(fnmatchcase(name, pattern) for pattern in no_weight_decay) else weight_decay
        mesh = getattr(parameter, "device_mesh", None)
        groups.setdefault((decay, mesh), []).append(parameter)
    return [{"params": parameters, "weight_decay": decay} for (decay, _), parameters in groups.items()]
