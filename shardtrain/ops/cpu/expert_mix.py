"""The experts of a layer on a CPU: from tokens to the weighted sum over the experts of each, as one function.

Rows are gathered straight to where their expert multiplies them, and summed from there, so that they are written once
each way; backward multiplies by the weights of the choice where rows are short. In between are products of few rows.
oneDNN, which multiplies 16-bit numbers, generates code for each number of rows that it meets, and takes some 25
microseconds to find it again. So experts have room behind their rows, which makes their sizes few, and small experts
are sorted by size, those of one size multiplied together, and the weights of gate and up in one product.
Shape suffixes: S tokens, K experts per token, R = S K rows, P places for rows, some of them room, E experts, D model,
F feed-forward, G = 2 F gate and up together, I inputs, O outputs of a product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardtrain.ops.row_order import Choice, inverse_of

SMALL_EXPERT_NUMEL = 1 << 17
"""Numbers in the three weights of an expert up to which sorting experts saves more than copying their weights takes."""
_MANY_ROWS = 64
"""Rows of an expert, on average, below which PyTorch's ``grouped_mm`` is done sooner, as when tokens are generated."""
_ROOM_PARTS = 8
"""Sizes of experts are rounded up to steps of about the mean size over this."""
_ROOM_PARTS_BY_SIZE = 16
"""The same where experts are sorted by size."""
_CALL = 64
"""Rows of a small expert that take as long as it takes to call the products of a batch."""
_TOGETHER = (1, 2, 4, 8, 16)
"""Numbers of experts that are multiplied together."""
_SUM = 0
"""``mode="sum"`` of an embedding_bag's operators."""


def takes(x_SD: Tensor, top_k: int, num_experts: int) -> bool:
    """Whether tokens are computed here: many, on a CPU, of no subclass of Tensor, and not being compiled."""
    is_plain = type(x_SD) is Tensor and x_SD.device.type == "cpu" and not torch.compiler.is_compiling()
    is_known = hasattr(torch.ops.aten, "_embedding_bag_per_sample_weights_backward")
    return is_plain and is_known and x_SD.size(0) > 0 and has_many_rows(x_SD.size(0) * top_k, num_experts)


def has_many_rows(num_rows: int, num_experts: int) -> bool:
    """Return True if the experts have so many rows that this function is faster than ``grouped_mm``."""
    return num_rows >= _MANY_ROWS * num_experts


def expected_room(num_rows: int, num_experts: int) -> int:
    """Return about how many rows of room 16-bit experts get together: each has half of the step of ``rounded_up``."""
    step = 1 << max(1, num_rows // (_ROOM_PARTS * num_experts)).bit_length() - 1
    return num_experts * step // 2


def mix(x_SD: Tensor, choice: Choice, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor) -> Tensor:
    """The sum (S, D) over the experts of each token of weight times w2(silu(w1 x) * w3 x)."""
    is_16_bit = x_SD.element_size() < 4
    by_size = is_16_bit and 3 * w1_EFD[0].numel() <= SMALL_EXPERT_NUMEL
    places = Places(choice.expert_SK, w1_EFD.size(0), roomy=is_16_bit, by_size=by_size)
    return _Mix.apply(x_SD, choice.weights_SK, w1_EFD, w2_EDF, w3_EFD, places)  # type: ignore[no-any-return]


class ExpertBatch(NamedTuple):
    """Experts that follow one another and have equally many rows: ``experts`` of them from ``first`` on."""

    first: int
    experts: int
    start: int
    """The place of their first row."""
    size: int
    """Rows of each."""


class Places:
    """Where the rows of each expert lie: one expert's behind another's, with room behind each if ``roomy``.

    Sizes are then rounded up, which makes them few. With ``by_size`` the experts are in the order of their sizes, which
    ``order_E`` says, and several have as much room as the largest of them, to be multiplied together.
    """

    def __init__(self, expert_SK: Tensor, num_experts: int, roomy: bool, by_size: bool) -> None:
        num_tokens, top_k = expert_SK.shape
        num_rows = num_tokens * top_k
        expert_R = expert_SK.flatten()
        count_E = expert_R.bincount(minlength=num_experts)

        # The experts in their order, and where each begins
        counts = count_E.tolist()
        order = sorted(range(num_experts), key=counts.__getitem__) if by_size else list(range(num_experts))
        in_order = [counts[expert] for expert in order]
        mean = num_rows // num_experts
        if by_size:
            self.batches = batches(in_order, max(1, mean // _ROOM_PARTS_BY_SIZE) if roomy else 0)
        else:
            self.batches = one_by_one(in_order, max(1, mean // _ROOM_PARTS) if roomy else 0)
        self.order_E = torch.tensor(order) if by_size else None
        starts = [0] * num_experts
        for batch in self.batches:
            for number in range(batch.experts):
                starts[order[batch.first + number]] = batch.start + number * batch.size
        self._num_experts = num_experts
        self._experts_of_batch = [batch.experts for batch in self.batches]
        self._rows_of_batch = [batch.experts * batch.size for batch in self.batches]
        self.num_places = sum(self._rows_of_batch)

        # The place of each row, and the token of each place: in the room, one behind the last. PyTorch sorts numbers of
        # one byte in a fifth of the time
        sorted_R = (expert_R.to(torch.uint8) if num_experts <= 256 else expert_R).argsort(stable=True)
        shift_E = torch.tensor(starts) - count_E.cumsum(0) + count_E
        place_of_sorted_R = torch.arange(num_rows) + shift_E.repeat_interleave(count_E, output_size=num_rows)
        self.place_R = torch.empty_like(sorted_R).index_copy_(0, sorted_R, place_of_sorted_R)
        row_P = torch.full((self.num_places,), num_rows).index_copy_(0, place_of_sorted_R, sorted_R)
        self._token_P = row_P.div_(top_k, rounding_mode="floor")
        self._first_row_S = torch.arange(0, num_rows, top_k)

    def rows_of(self, x_SD: Tensor) -> Tensor:
        """Each token's row at the places of its experts (P, D), and zeros in the room."""
        if self.num_places > self.place_R.numel():
            x_SD = torch.cat((x_SD, x_SD.new_zeros(1, x_SD.size(1))))
        return x_SD.index_select(0, self._token_P)

    def sum_of(self, x_PD: Tensor, weights_SK: Tensor | None = None) -> Tensor:
        """The sum over the rows of each token (S, D), each times its weight; the opposite of ``rows_of``."""
        weights_R = None if weights_SK is None else weights_SK.flatten()
        return F.embedding_bag(self.place_R, x_PD, self._first_row_S, mode="sum", per_sample_weights=weights_R)

    def product(self, x_PI: Tensor, weight_EIO: Tensor, add_to_PO: Tensor | None = None) -> Tensor:
        """Each row times the weight of its expert (P, O), added to ``add_to_PO`` in place where that is given."""
        out_PO = x_PI.new_empty(self.num_places, weight_EIO.size(2)) if add_to_PO is None else add_to_PO
        parts = zip(self._rows(x_PI), self._experts(weight_EIO), self._rows(out_PO), strict=True)
        for x, weight, out in parts:
            if add_to_PO is None:
                (torch.mm if x.dim() == 2 else torch.bmm)(x, weight, out=out)
            else:
                (out.addmm_ if x.dim() == 2 else out.baddbmm_)(x, weight)
        return out_PO

    def weight_gradient(self, gradient_PO: Tensor, x_PI: Tensor) -> Tensor:
        """g^T x of each expert's rows (E, O, I); zero for an expert without rows."""
        out_EOI = x_PI.new_empty(self._num_experts, gradient_PO.size(1), x_PI.size(1))
        for gradient, x, out in zip(self._rows(gradient_PO), self._rows(x_PI), self._experts(out_EOI), strict=True):
            (torch.mm if x.dim() == 2 else torch.bmm)(gradient.mT, x, out=out)
        return out_EOI

    def _rows(self, x_PI: Tensor) -> list[Tensor]:
        """The rows of each batch, (size, I) or (experts, size, I)."""
        # Split in one call, since there are some twenty batches and five products
        parts = zip(self.batches, x_PI.split(self._rows_of_batch), strict=True)
        return [one if batch.experts == 1 else one.view(batch.experts, batch.size, one.size(1)) for batch, one in parts]

    def _experts(self, weight_EIO: Tensor) -> list[Tensor]:
        """The weights of each batch, (I, O) or (experts, I, O)."""
        parts = zip(self.batches, weight_EIO.split(self._experts_of_batch), strict=True)
        return [weight[0] if batch.experts == 1 else weight for batch, weight in parts]

    def in_order(self, *weights_EOI: Tensor) -> Tensor:
        """Weights of all experts in the order of their places, the outputs of several below one another."""
        assert self.order_E is not None
        first = weights_EOI[0]
        joined_EnOI = first.new_empty(first.size(0), len(weights_EOI), *first.shape[1:])
        for number, weight_EOI in enumerate(weights_EOI):
            torch.index_select(weight_EOI, 0, self.order_E, out=joined_EnOI[:, number])
        return joined_EnOI.flatten(1, 2)

    def out_of_order(self, weight_EOI: Tensor) -> Tensor:
        """The opposite of ``in_order`` for one weight; as it is where the order is the experts' own."""
        if self.order_E is None:
            return weight_EOI
        return weight_EOI.index_select(0, inverse_of(self.order_E))


def rounded_up(count: int, least: int, digits: int = 4) -> int:
    """A size that is not less, one of few: a multiple of the power of two at ``least``, with so many binary digits.

    >>> [rounded_up(count, 5) for count in (0, 3, 62, 250)]
    [0, 4, 64, 256]
    """
    dropped = max(least.bit_length() - 1, count.bit_length() - digits)
    return -(-count >> dropped) << dropped


def one_by_one(counts: list[int], least: int) -> list[ExpertBatch]:
    """A batch for each expert, its size rounded up unless ``least`` is 0."""
    return _laid_out([(1, rounded_up(count, least) if least else count) for count in counts])


def batches(counts: list[int], least: int) -> list[ExpertBatch]:
    """Experts in the order of their sizes, together where rows of room take less time than one more call.

    Powers of two of them are, so that there are few kinds of products; each has the size of the largest, rounded up
    unless ``least`` is 0.

    >>> [(batch.experts, batch.size) for batch in batches([3, 4, 4, 5, 800], 4)]
    [(4, 8), (1, 800)]
    """
    # What the first experts cost at least, in rows, and the last batch of that way: from what fewer of them cost
    costs = [0]
    last: list[tuple[int, int]] = []
    for stop, count in enumerate(counts, start=1):
        size = rounded_up(count, least, digits=5) if least else count
        cost, experts = min((costs[stop - n] + n * size, n) for n in _TOGETHER if n <= stop)
        costs.append(cost + _CALL)
        last.append((experts, size))

    # From the last batch of all to the first
    found = []
    stop = len(counts)
    while stop:
        found.append(last[stop - 1])
        stop -= found[-1][0]
    return _laid_out(found[::-1])


def _laid_out(found: list[tuple[int, int]]) -> list[ExpertBatch]:
    """Batches of so many experts with so many rows, one behind the other."""
    placed = []
    first = start = 0
    for experts, size in found:
        placed.append(ExpertBatch(first, experts, start, size))
        first += experts
        start += experts * size
    return placed


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SD: Tensor, weights_SK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor, places: Places
    ) -> Tensor:
        x_PD = places.rows_of(x_SD)
        gate_and_up: tuple[Tensor, ...] = (w1_EFD, w3_EFD)
        if places.order_E is None:
            gate_PF, up_PF = (places.product(x_PD, w.mT) for w in gate_and_up)
        else:
            w2_EDF = places.in_order(w2_EDF)
            gate_and_up = (places.in_order(w1_EFD, w3_EFD),)
            gate_PF, up_PF = places.product(x_PD, gate_and_up[0].mT).chunk(2, dim=1)
            # silu of parts of rows takes twice as long as this copy and silu of whole ones
            gate_PF = gate_PF.contiguous()
        silu_PF = F.silu(gate_PF)
        hidden_PF = silu_PF * up_PF
        ctx.places = places
        ctx.save_for_backward(x_PD, gate_PF, up_PF, silu_PF, hidden_PF, weights_SK, w2_EDF, *gate_and_up)
        return places.sum_of(places.product(hidden_PF, w2_EDF.mT), weights_SK.to(x_SD.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        places: Places = ctx.places
        x_PD, gate_PF, up_PF, silu_PF, hidden_PF, weights_SK, w2_EDF, *gate_and_up = ctx.saved_tensors
        needs_x, needs_weights, needs_w1, needs_w2, needs_w3, _ = ctx.needs_input_grad

        # Through w2 and the weights of the choice, which were multiplied after it: zero in the room
        gradient_PD = places.rows_of(gradients[0])
        dhidden_PF = places.product(gradient_PD, w2_EDF)
        dweights_SK = _row_products(dhidden_PF, hidden_PF, places, weights_SK) if needs_weights else None
        weights_P = hidden_PF.new_zeros(places.num_places)
        weights_P.index_copy_(0, places.place_R, weights_SK.flatten().to(hidden_PF.dtype))
        dw1_EFD = dw2_EDF = dw3_EFD = None
        if needs_w2:
            dw2_EDF = places.out_of_order(places.weight_gradient(gradient_PD, hidden_PF * weights_P.unsqueeze(1)))
        del gradient_PD  # rows of the model's width are most of what is held: one kind of them at a time
        dhidden_PF.mul_(weights_P.unsqueeze(1))

        # Through the gate; where w1 and w3 are one, so are the gradients of their outputs
        dup_PF, dboth_PG = torch.empty_like(silu_PF), None
        if places.order_E is not None:
            dboth_PG = dhidden_PF.new_empty(dhidden_PF.size(0), 2 * dhidden_PF.size(1))
            dup_PF = dboth_PG.chunk(2, dim=1)[1]
        torch.mul(dhidden_PF, silu_PF, out=dup_PF)
        dgate_PF = torch.ops.aten.silu_backward(dhidden_PF.mul_(up_PF), gate_PF)
        del dhidden_PF

        # Through w1 and w3
        dx_SD = None
        if dboth_PG is not None:
            dboth_PG.chunk(2, dim=1)[0].copy_(dgate_PF)
            if needs_x:
                dx_SD = places.sum_of(places.product(dboth_PG, gate_and_up[0]))
            if needs_w1 or needs_w3:
                both_EFD = places.weight_gradient(dboth_PG, x_PD).chunk(2, dim=1)
                dw1_EFD, dw3_EFD = (places.out_of_order(one_EFD) for one_EFD in both_EFD)
        else:
            w1_EFD, w3_EFD = gate_and_up
            if needs_x:
                dx_PD = places.product(dgate_PF, w1_EFD)
                dx_SD = places.sum_of(places.product(dup_PF, w3_EFD, add_to_PO=dx_PD))
                del dx_PD
            dw1_EFD = places.weight_gradient(dgate_PF, x_PD) if needs_w1 else None
            dw3_EFD = places.weight_gradient(dup_PF, x_PD) if needs_w3 else None
        return dx_SD, dweights_SK, dw1_EFD, dw2_EDF, dw3_EFD, None


def _row_products(dhidden_PF: Tensor, hidden_PF: Tensor, places: Places, weights_SK: Tensor) -> Tensor:
    """The gradient of the weights (S, K): g (w2 h) is (g w2) h, and shorter. Summed in float32 and rounded once."""
    # PyTorch's own, of the weights of an embedding_bag: here each row of one table is a bag of one row of the other
    row_P = torch.arange(hidden_PF.size(0))
    sum_P = torch.ops.aten._embedding_bag_per_sample_weights_backward(dhidden_PF, hidden_PF, row_P, row_P, row_P, _SUM)
    return sum_P.index_select(0, places.place_R).view_as(weights_SK).to(weights_SK.dtype)
