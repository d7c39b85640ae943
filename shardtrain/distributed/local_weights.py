"""Let a pure module compute with plain tensors where its parameters are DTensors; no name changes."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement


def use_local_weights(module: nn.Module, gradients: tuple[Placement, ...] | None = None) -> None:
    """Make ``module.forward`` see this rank's part of each of its own parameters, in place.

    ``gradients`` says how the ranks' gradients make up the whole one (``Partial()``: by their sum); by default they are
    placed as the parameter is.
    """
    whole_forward = module.forward

    def forward(*inputs: Any, **keywords: Any) -> Any:
        # An attribute of the instance hides the registered parameter of the same name, which stays where it is.
        shadowed = [name for name, parameter in module._parameters.items() if isinstance(parameter, DTensor)]
        for name in shadowed:
            module.__dict__[name] = module._parameters[name].to_local(grad_placements=gradients)  # type: ignore[union-attr]
        try:
            return whole_forward(*inputs, **keywords)
        finally:
            for name in shadowed:
                del module.__dict__[name]

    module.forward = forward  # type: ignore[method-assign]
