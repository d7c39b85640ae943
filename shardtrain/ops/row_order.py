"""Sort the rows of a matrix and bring them back, with backward passes that gather too.

PyTorch's own backward of ``x[order]`` adds rows one by one, which is slow on a CPU and not deterministic on a GPU.
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
        if ctx.copies > 1 and type(gradients[0]) is Tensor and gradients[0].device.type == "cpu":
            # Read once and summed at once, which takes a fifth of the time of a gather and a sum
            first_S = torch.arange(0, inverse_R.numel(), ctx.copies)
            return F.embedding_bag(inverse_R, gradients[0], first_S, mode="sum"), None, None, None
        # A gather by the inverse: each row's gradient comes from one place, and copies of a row then lie side by side
        gradient_RD = gradients[0].index_select(0, inverse_R)
        if ctx.copies > 1:
            gradient_RD = gradient_RD.unflatten(0, (-1, ctx.copies)).sum(dim=1)
        return gradient_RD, None, None, None


class Groups:
    """Rows that are sorted by group, with room after each group, so that groups have few different sizes.

    oneDNN, which multiplies 16-bit numbers on a CPU, generates code for each number of rows that it meets: for experts,
    whose rows differ in number each time, that took three times as long as the products themselves. ``multiple`` is the
    power of two below an eighth of the rows of a group, on average; sizes are rounded up to it.
    """

    def __init__(self, count_E: Tensor, num_rows: int) -> None:
        # Room after each group, so that its end is a multiple, and where each row and each free place then lies
        self.multiple = 1 << max(0, (num_rows // max(8 * count_E.numel(), 1)).bit_length() - 1)
        room_E = -count_E % self.multiple
        self.count_E = count_E + room_E
        before_E = room_E.cumsum(0) - room_E
        rows_R = torch.arange(num_rows)
        self._place_R = rows_R + torch.repeat_interleave(before_E, count_E, output_size=num_rows)
        num_places = num_rows + int(room_E.sum())
        self._row_P = torch.zeros(num_places, dtype=torch.int64).index_copy_(0, self._place_R, rows_R)
        is_room_P = torch.ones(num_places, dtype=torch.bool).index_fill_(0, self._place_R, False)
        self._room = is_room_P.nonzero().flatten()

    def spread(self, x_RD: Tensor) -> Tensor:
        """Rows (R, D) with room between them, (P, D); what is there has neither meaning nor gradient."""
        return _Spread.apply(x_RD, self._row_P, self._place_R)  # type: ignore[no-any-return]

    def collect(self, x_PD: Tensor) -> Tensor:
        """The rows alone again."""
        return _Collect.apply(x_PD, self._row_P, self._place_R, self._room)  # type: ignore[no-any-return]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, row_P: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(place_R)
        return x_RD.index_select(0, row_P)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place_R,) = ctx.saved_tensors
        return gradients[0].index_select(0, place_R), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, row_P: Tensor, place_R: Tensor, room: Tensor) -> Tensor:
        ctx.save_for_backward(row_P, room)
        return x_PD.index_select(0, place_R)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        row_P, room = ctx.saved_tensors
        # The free places were computed from copies of row 0, whose gradient they must not have
        return gradients[0].index_select(0, row_P).index_fill_(0, room, 0.0), None, None, None
