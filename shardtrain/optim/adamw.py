"""Adam and AdamW, as PyTorch has them, and the state that they start from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardtrain.config.schema import Optimizer

CLASSES: dict[str, type[torch.optim.Adam]] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


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
