"""Sort the rows of a matrix and bring them back, with backward passes that gather too.

PyTorch's own backward of ``x[order]`` adds rows one by one, which is slow on a CPU and not deterministic on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def inverse_of(order_R: Tensor) -> Tensor:
    """The permutation that undoes another: ``inverse_of(order)[order]`` is 0, 1, 2, ...

    >>> inverse_of(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    inverse_R = torch.empty_like(order_R)
    return inverse_R.scatter_(0, order_R, torch.arange(order_R.numel(), device=order_R.device))


def permute(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Rows ``x_RD[order_R]`` of a permutation and its inverse; the backward pass gathers by the inverse."""
    return _Take.apply(x_RD, order_R, inverse_R, 1)  # type: ignore[no-any-return]


def repeat_and_permute(x_SD: Tensor, copies: int, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Each row ``copies`` times in a row, then permuted: (S, D) to (S * copies, D), without an array in between."""
    return _Take.apply(x_SD, order_R, inverse_R, copies)  # type: ignore[no-any-return]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, order_R: Tensor, inverse_R: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.copies = copies
        return x_SD.index_select(0, order_R if copies == 1 else order_R.div(copies, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_R,) = ctx.saved_tensors
        gradient_RD = gradients[0].index_select(0, inverse_R)
        if ctx.copies > 1:
            gradient_RD = gradient_RD.unflatten(0, (-1, ctx.copies)).sum(dim=1)
        return gradient_RD, None, None, None
