"""PyTorch's Adam and AdamW on local tensors, and their initial state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardtrain.config.schema import Optimizer
from shardtrain.ops.dtensor import local_tensor


class _OnLocalTensors(torch.optim.Adam):
    """Mixin that updates the local shard of each parameter, without DTensor dispatch.

    The update is elementwise, so it does not depend on placements. DTensor's dispatcher would derive
    placements for the complete list of parameters, which takes longer than the update of a small model. The
    state keeps the placements of the parameters.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # super() fills the lists of parameters, gradients, means, squares, maximum squares and step counts
        has_complex = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return bool(has_complex)


class _Adam(_OnLocalTensors, torch.optim.Adam):
    pass


class _AdamW(_OnLocalTensors, torch.optim.AdamW):
    pass


CLASSES: dict[str, type[torch.optim.Adam]] = {"AdamW": _AdamW, "Adam": _Adam}


def adam(groups: list[dict[str, Any]], config: Optimizer) -> torch.optim.Optimizer:
    """Build Adam (Kingma and Ba, 2015) or AdamW (Loshchilov and Hutter, 2019) for parameter groups."""
    return CLASSES[config.name](
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def adam_zero_state(parameter: Parameter, fused: bool) -> dict[str, Tensor]:
    """Return the state of a parameter before its first update: step count and two means, all zero."""
    # like torch.optim.Adam: the fused kernel reads the step count on the device, the other kernels on the
    # host
    device = parameter.device if fused else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }
