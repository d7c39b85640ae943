"""Tokens and targets further ahead, for multi-token prediction.

Shape suffixes: B batch, T tokens of full rows, K depths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardtrain.ops.targets import IGNORE

ABSENT_TOKEN = 0
"""Token id where the token ahead is in another document or row. Such places have no target."""


def tokens_ahead(tokens_BT: Tensor, documents_BT: Tensor | None, num_depths: int) -> Tensor:
    """Return the tokens 1 to K positions after each token of full rows, (B, T, K)."""
    return _ahead(tokens_BT, documents_BT, num_depths, ABSENT_TOKEN)


def targets_ahead(targets_BT: Tensor, documents_BT: Tensor | None, num_depths: int) -> Tensor:
    """Return the targets of depths 1 to K for each token of full rows, (B, T, K).

    The target of depth k is that of the token k positions later. It is IGNORE if that token has no target,
    or is in another document or row.
    """
    return _ahead(targets_BT, documents_BT, num_depths, IGNORE)


def _ahead(values_BT: Tensor, documents_BT: Tensor | None, num_depths: int, absent: int) -> Tensor:
    depths = []
    for depth in range(1, num_depths + 1):
        shifted_BT = torch.full_like(values_BT, absent)
        shifted_BT[:, :-depth] = values_BT[:, depth:]
        if documents_BT is not None:
            is_same_BT = documents_BT[:, :-depth] == documents_BT[:, depth:]
            shifted_BT[:, :-depth].masked_fill_(~is_same_BT, absent)
        depths.append(shifted_BT)
    return torch.stack(depths, dim=-1)
