"""Permute the rows of a matrix, with backward passes that gather instead of scattering.

PyTorch's backward of ``x[order]`` adds single rows, which is slow on a CPU and not deterministic on a GPU.
Shape suffixes: S tokens, K experts per token, R = S K rows, D model, E experts, P rows including padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Choice(NamedTuple):
    """The experts (S, K) that compute each token, and the weights (S, K) of their outputs."""

    expert_SK: Tensor
    weights_SK: Tensor


def inverse_of(order_R: Tensor) -> Tensor:
    """Return the inverse of a permutation: ``inverse_of(order)[order]`` is 0, 1, 2, ...

    >>> inverse_of(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    inverse_R = torch.empty_like(order_R)
    return inverse_R.scatter_(0, order_R, torch.arange(order_R.numel(), device=order_R.device))


def permute(x_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Return ``x_RD[order_R]``. The backward pass gathers by the inverse permutation."""
    return _Take.apply(x_RD, order_R, inverse_R, 1)  # type: ignore[no-any-return]


def repeat_and_permute(x_SD: Tensor, copies: int, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Repeat each row ``copies`` times and permute: (S, D) to (S * copies, D).

    Allocates no intermediate tensor.
    """
    return _Take.apply(x_SD, order_R, inverse_R, copies)  # type: ignore[no-any-return]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, order_R: Tensor, inverse_R: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.copies = copies
        return x_SD.index_select(
            0, order_R if copies == 1 else order_R.div(copies, rounding_mode="floor")
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_R,) = ctx.saved_tensors
        if ctx.copies > 1 and type(gradients[0]) is Tensor and gradients[0].device.type == "cpu":
            # Gather and sum in one pass, in a fifth of the time of two operations.
            first_S = torch.arange(0, inverse_R.numel(), ctx.copies)
            gradient_SD = F.embedding_bag(inverse_R, gradients[0], first_S, mode="sum")
            return gradient_SD, None, None, None
        # After gathering by the inverse, the copies of a row are adjacent and can be summed.
        gradient_RD = gradients[0].index_select(0, inverse_R)
        if ctx.copies > 1:
            gradient_RD = gradient_RD.unflatten(0, (-1, ctx.copies)).sum(dim=1)
        return gradient_RD, None, None, None


class Groups:
    """Padding of rows sorted by group, so groups have few different sizes.

    For 16-bit products on a CPU, oneDNN generates code for each distinct number of rows. The number of
    rows per expert differs in every step, and generating code took three times as long as the products.

    Attributes:
        multiple: Sizes are rounded up to this power of two, which is at most an eighth of the mean size.
        count_E: Padded sizes.
    """

    def __init__(self, count_E: Tensor, num_rows: int) -> None:
        # Add padding after each group, and compute the position of each row among the padded rows.
        mean_rows_by_8 = num_rows // max(8 * count_E.numel(), 1)
        self.multiple = 1 << max(0, mean_rows_by_8.bit_length() - 1)
        padding_E = -count_E % self.multiple
        self.count_E = count_E + padding_E
        padding_before_E = padding_E.cumsum(0) - padding_E
        rows_R = torch.arange(num_rows)
        self._position_R = rows_R + torch.repeat_interleave(
            padding_before_E, count_E, output_size=num_rows
        )

        # Compute the inverse. Padding contains copies of row 0.
        num_padded = num_rows + int(padding_E.sum())
        self._row_P = torch.zeros(num_padded, dtype=torch.int64).index_copy_(
            0, self._position_R, rows_R
        )
        is_padding_P = torch.ones(num_padded, dtype=torch.bool).index_fill_(
            0, self._position_R, False
        )
        self._padding = is_padding_P.nonzero().flatten()

    def spread(self, x_RD: Tensor) -> Tensor:
        """Return the rows (R, D) with padding, (P, D). The padding has arbitrary values and no gradient."""
        return _Spread.apply(x_RD, self._row_P, self._position_R)  # type: ignore[no-any-return]

    def collect(self, x_PD: Tensor) -> Tensor:
        """Return the rows (R, D) without the padding."""
        return _Collect.apply(x_PD, self._row_P, self._position_R, self._padding)  # type: ignore[no-any-return]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, row_P: Tensor, position_R: Tensor) -> Tensor:
        ctx.save_for_backward(position_R)
        return x_RD.index_select(0, row_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (position_R,) = ctx.saved_tensors
        return gradients[0].index_select(0, position_R), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_PD: Tensor, row_P: Tensor, position_R: Tensor, padding: Tensor
    ) -> Tensor:
        ctx.save_for_backward(row_P, padding)
        return x_PD.index_select(0, position_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        row_P, padding = ctx.saved_tensors
        # Padding contains copies of row 0, but must not receive its gradient.
        return gradients[0].index_select(0, row_P).index_fill_(0, padding, 0.0), None, None, None
