"""Weights and tokens for the small models of the probes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardtrain.ops.tied import to_empty

ROWS = 3
"""Rows of each batch in the probes."""


def fill(model: nn.Module) -> None:
    """Allocate the model on the CPU and draw random weights at unit gain, so every module affects the output.

    Set buffers to zero, their value at the start of training.
    """
    to_empty(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        for parameter in model.parameters():
            std = parameter.size(-1) ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.normal_(0.0, std, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)


def num_tokens(model: nn.Module, most: int) -> int:
    """Return a sequence length up to ``most`` that equals no dimension of a weight.

    The token dimension of an activation can then be recognized by its size. Half of the length equals no
    dimension either.
    """
    taken = {ROWS}
    for parameter in model.parameters():
        taken.update(parameter.shape)
    longest = most - most % 4
    for length in range(longest, 7, -4):
        if length not in taken and length // 2 not in taken:
            return length
    return most


def tokens_of(count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return tokens and positions, each with shape (ROWS, count).

    Row 0 repeats one token, which exceeds the capacity of an expert.
    """
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, vocabulary, (ROWS, count), generator=generator)
    tokens_BT[0] = tokens_BT[0, 0]
    positions_BT = torch.arange(count).expand(ROWS, count).contiguous()
    return tokens_BT, positions_BT
