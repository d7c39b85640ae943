"""Sort a model's parameters into optimizer groups by name: those with and those without weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Parameter

from shardtrain.utils.log import logger


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]],
    no_weight_decay: Sequence[str],
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Return groups for a torch optimizer. Parameters that match a pattern get no weight decay.

    Patterns are shell globs in which ``*`` also matches dots. Plain parameters and the parameters of each
    device mesh get separate groups, because one kernel cannot update plain and distributed tensors
    together. Each group lists the names of its parameters as ``param_names``, like groups that PyTorch
    builds from named parameters.
    """
    groups: dict[tuple[float, Any], dict[str, Parameter]] = {}
    for name, parameter in named_parameters:
        is_excluded = any(fnmatchcase(name, pattern) for pattern in no_weight_decay)
        decay = 0.0 if is_excluded else weight_decay
        mesh = getattr(parameter, "device_mesh", None)
        groups.setdefault((decay, mesh), {})[name] = parameter
    result: list[dict[str, Any]] = []
    for (decay, _), members in groups.items():
        parameters = list(members.values())
        result.append({"params": parameters, "param_names": list(members), "weight_decay": decay})
    return result


def report_unused_patterns(no_weight_decay: Sequence[str], names: Sequence[str]) -> None:
    """Log each pattern that matches no parameter of the entire model.

    This is not an error: one list of patterns serves models with and without biases.
    """
    for pattern in no_weight_decay:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        examples = ", ".join(names[:3])
        logger.warning(
            f'optimizer.no_weight_decay="{pattern}" matches no parameter (names are like {examples})'
        )
