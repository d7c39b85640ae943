"""The work that every program does: sizes, rates, and rows of tokens that a model can learn."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY, DIM, LAYERS, HEADS, KEY_HEADS, HEAD_DIM, FFN = 2048, 256, 6, 8, 4, 32, 768
TOKENS, ROWS = 512, 8
PARAMETERS = 5_770_496
THETA, EPS = 500_000.0, 1e-5
LEARNING_RATE, WEIGHT_DECAY, BETAS, MAX_NORM = 8e-4, 0.1, (0.9, 0.95), 1.0


def row(index: int, length: int = TOKENS) -> Tensor:
    """Row ``index`` of the data: an arithmetic progression of ids, its first id and its step drawn from the index."""
    generator = torch.Generator().manual_seed(index)
    first, step = (
        int(torch.randint(low, high, (), generator=generator))
        for low, high in ((0, VOCABULARY), (1, 17))
    )
    return (first + step * torch.arange(length)) % VOCABULARY


def rows(step: int, rank: int, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (count, TOKENS), of one rank in one step."""
    start = step * ROWS + rank * count
    whole = torch.stack([row(index, TOKENS + 1) for index in range(start, start + count)])
    return whole[:, :-1], whole[:, 1:]
