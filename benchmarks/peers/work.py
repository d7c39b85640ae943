"""The work shared by all programs: model sizes, optimizer settings, and learnable rows of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY = 2048
DIM = 256
LAYERS = 6
HEADS = 8
KEY_HEADS = 4
HEAD_DIM = 32
FFN = 768
TOKENS = 512
ROWS = 8
PARAMETERS = 5_770_496
THETA = 500_000.0
EPS = 1e-5
LEARNING_RATE = 8e-4
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
MAX_NORM = 1.0


def row(index: int, length: int = TOKENS) -> Tensor:
    """Return row ``index``: an arithmetic progression of ids. The index seeds its first id and its step."""
    generator = torch.Generator().manual_seed(index)
    first, step = (
        int(torch.randint(low, high, (), generator=generator))
        for low, high in ((0, VOCABULARY), (1, 17))
    )
    return (first + step * torch.arange(length)) % VOCABULARY


def rows(step: int, rank: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of one rank in one step, each of shape (count, TOKENS)."""
    start = step * ROWS + rank * count
    whole = torch.stack([row(index, TOKENS + 1) for index in range(start, start + count)])
    return whole[:, :-1], whole[:, 1:]
