"""Adam and AdamW, as PyTorch has them, and the state that they start from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardtrain.config.schema import Optimizer
from shardtrain.ops.dtensor import local_tensor


class _OnLocalTensors(torch.optim.Adam):
    """Updates the part that this rank holds of each parameter, without asking how it is distributed.

    The update is elementwise, so no placement matters to it; DTensor's dispatcher would derive one for the whole list
    of parameters, which takes longer than the update of a small model. The state stays distributed as the parameters.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        # parameters, gradients, the two means, the largest of the second, and the counts, in lists that are filled here
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
    """Adam (Kingma and Ba, 2015) or AdamW (Loshchilov and Hutter, 2019) of parameter groups."""
    return CLASSES[config.name](
        groups,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def adam_zero_state(parameter: Parameter, fused: bool) -> dict[str, Tensor]:
    """The state of a parameter before its first update: two means like the parameter and a count, all zero."""
    # the fused kernel reads the count of steps on the device, the others on the host (as torch.optim.Adam does)
    device = parameter.device if fused else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }
