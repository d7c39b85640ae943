"""The experts of a layer on a CPU: one function from tokens to the weighted sum of their experts' outputs.

Tokens are gathered into rows sorted by expert, and their outputs are summed per token. Each direction
writes rows once. The backward pass multiplies by the routing weights in the narrowest tensor.

oneDNN, which computes 16-bit products, generates code for each distinct number of rows, and takes about
25 microseconds to look it up. Rows of an expert are therefore padded, so there are few sizes. Small
experts are sorted by size, experts of equal size are multiplied together, and the gate and up weights are
multiplied in one product.

Shape suffixes: S tokens, K experts per token, R = S K rows, P rows with padding, E experts, D model, F
feed-forward, G = 2 F gate and up together, I inputs, O outputs of a product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shardtrain.ops.row_order import Choice, inverse_of

SMALL_EXPERT_NUMEL = 1 << 17
"""Largest size of an expert (elements in its three weights) for which sorting experts saves more time than it takes."""
_MANY_ROWS = 64
"""Mean rows per expert below which PyTorch's ``grouped_mm`` is faster, for example in generation."""
_PADDING_PARTS = 8
"""Numbers of rows are padded to a multiple of about 1/8 of the mean number of rows per expert."""
_PADDING_PARTS_BY_SIZE = 16
"""If experts are sorted by their numbers of rows, these are padded to a multiple of about 1/16 of the mean."""
_CALL_ROWS = 64
"""Overhead of the products of a batch, in rows of a small expert that take the same time."""
_BATCH_SIZES = (1, 2, 4, 8, 16)
"""Supported numbers of experts in a batch."""
_SUM = 0
"""``mode="sum"`` in the operators of embedding_bag."""


def takes(x_SD: Tensor, top_k: int, num_experts: int) -> bool:
    """True if ``mix`` supports the tokens and is faster: many plain tensors on a CPU, without a compiler."""
    is_plain = (
        type(x_SD) is Tensor and x_SD.device.type == "cpu" and not torch.compiler.is_compiling()
    )
    is_known = hasattr(torch.ops.aten, "_embedding_bag_per_sample_weights_backward")
    return (
        is_plain
        and is_known
        and x_SD.size(0) > 0
        and has_many_rows(x_SD.size(0) * top_k, num_experts)
    )


def has_many_rows(num_rows: int, num_experts: int) -> bool:
    """True if the experts have enough rows for ``mix`` to be faster than ``grouped_mm``."""
    return num_rows >= _MANY_ROWS * num_experts


def expected_padding(num_rows: int, num_experts: int) -> int:
    """Estimate the total padding rows of 16-bit experts: on average, half of the step of ``rounded_up`` per expert."""
    step = 1 << max(1, num_rows // (_PADDING_PARTS * num_experts)).bit_length() - 1
    return num_experts * step // 2


def mix(x_SD: Tensor, choice: Choice, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor) -> Tensor:
    """Return the sum (S, D) over the experts of each token of weight times w2(silu(w1 x) * w3 x)."""
    is_16_bit = x_SD.element_size() < 4
    by_size = is_16_bit and 3 * w1_EFD[0].numel() <= SMALL_EXPERT_NUMEL
    places = Places(choice.expert_SK, w1_EFD.size(0), is_padded=is_16_bit, by_size=by_size)
    return _Mix.apply(x_SD, choice.weights_SK, w1_EFD, w2_EDF, w3_EFD, places)  # type: ignore[no-any-return]


class ExpertBatch(NamedTuple):
    """Consecutive experts with the same padded number of rows.

    Attributes:
        first: Position of the first expert.
        experts: Number of experts.
        start: Position of their first row.
        size: Rows per expert, with padding.
    """

    first: int
    experts: int
    start: int
    size: int


class Places:
    """Positions of rows sorted by expert.

    With ``is_padded``, padding follows the rows of each expert, so experts have few different sizes. With
    ``by_size``, experts are sorted by size, and the experts of a batch are padded to the largest of them.

    Attributes:
        batches: Batches of experts, in the order of their rows.
        order_E: Experts in the order of their rows. None if experts keep the order of their numbers.
        num_places: Number of rows with padding, P.
        place_R: Position of each row.
    """

    def __init__(self, expert_SK: Tensor, num_experts: int, is_padded: bool, by_size: bool) -> None:
        num_tokens, top_k = expert_SK.shape
        num_rows = num_tokens * top_k
        expert_R = expert_SK.flatten()
        count_E = expert_R.bincount(minlength=num_experts)

        # Order the experts, divide them into batches, and find the first row of each expert.
        counts = count_E.tolist()
        order = (
            sorted(range(num_experts), key=counts.__getitem__)
            if by_size
            else list(range(num_experts))
        )
        sizes = [counts[expert] for expert in order]
        parts = _PADDING_PARTS_BY_SIZE if by_size else _PADDING_PARTS
        mean_size = num_rows // num_experts
        step = max(1, mean_size // parts) if is_padded else 0
        self.batches = batches(sizes, step) if by_size else one_by_one(sizes, step)
        self.order_E = torch.tensor(order) if by_size else None
        starts = [0] * num_experts
        for batch in self.batches:
            for number in range(batch.experts):
                starts[order[batch.first + number]] = batch.start + number * batch.size
        self._num_experts = num_experts
        self._experts_of_batch = [batch.experts for batch in self.batches]
        self._rows_of_batch = [batch.experts * batch.size for batch in self.batches]
        self.num_places = sum(self._rows_of_batch)

        # Find the position of each row, and the token at each position. Padding has the number after the last
        # token. PyTorch sorts one-byte integers in a fifth of the time.
        if num_experts <= 256:
            expert_R = expert_R.to(torch.uint8)
        sorted_R = expert_R.argsort(stable=True)
        shift_E = torch.tensor(starts) - count_E.cumsum(0) + count_E
        place_of_sorted_R = torch.arange(num_rows) + shift_E.repeat_interleave(
            count_E, output_size=num_rows
        )
        self.place_R = torch.empty_like(sorted_R).index_copy_(0, sorted_R, place_of_sorted_R)
        row_P = torch.full((self.num_places,), num_rows).index_copy_(0, place_of_sorted_R, sorted_R)
        self._token_P = row_P.div_(top_k, rounding_mode="floor")
        self._first_row_S = torch.arange(0, num_rows, top_k)

    def rows_of(self, x_SD: Tensor) -> Tensor:
        """Gather tokens to the positions of their experts, (P, D), with zeros as padding."""
        if self.num_places > self.place_R.numel():
            x_SD = torch.cat((x_SD, x_SD.new_zeros(1, x_SD.size(1))))
        return x_SD.index_select(0, self._token_P)

    def sum_of(self, x_PD: Tensor, weights_SK: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's rows, (S, D): the transpose of ``rows_of``."""
        weights_R = None if weights_SK is None else weights_SK.flatten()
        return F.embedding_bag(
            self.place_R, x_PD, self._first_row_S, mode="sum", per_sample_weights=weights_R
        )

    def product(self, x_PI: Tensor, weight_EIO: Tensor, add_to_PO: Tensor | None = None) -> Tensor:
        """Multiply each row by the weight of its expert, (P, O).

        Add the result to ``add_to_PO`` in place if given.
        """
        out_PO = add_to_PO
        if out_PO is None:
            out_PO = x_PI.new_empty(self.num_places, weight_EIO.size(2))
        parts = zip(self._rows(x_PI), self._experts(weight_EIO), self._rows(out_PO), strict=True)
        for x, weight, out in parts:
            is_single = x.dim() == 2
            if add_to_PO is None:
                multiply = torch.mm if is_single else torch.bmm
                multiply(x, weight, out=out)
            else:
                add_product = out.addmm_ if is_single else out.baddbmm_
                add_product(x, weight)
        return out_PO

    def weight_gradient(self, gradient_PO: Tensor, x_PI: Tensor) -> Tensor:
        """Return g^T x of each expert's rows, (E, O, I). Zero for experts without rows."""
        out_EOI = x_PI.new_empty(self._num_experts, gradient_PO.size(1), x_PI.size(1))
        for gradient, x, out in zip(
            self._rows(gradient_PO), self._rows(x_PI), self._experts(out_EOI), strict=True
        ):
            multiply = torch.mm if x.dim() == 2 else torch.bmm
            multiply(gradient.mT, x, out=out)
        return out_EOI

    def _rows(self, x_PI: Tensor) -> list[Tensor]:
        """Return the rows of each batch: (size, I), or (experts, size, I) for several experts."""
        # Split all batches in one call. There are about 20 batches and five products.
        rows = []
        for batch, part in zip(self.batches, x_PI.split(self._rows_of_batch), strict=True):
            if batch.experts > 1:
                part = part.view(batch.experts, batch.size, part.size(1))
            rows.append(part)
        return rows

    def _experts(self, weight_EIO: Tensor) -> list[Tensor]:
        """Return the weights of each batch: (I, O), or (experts, I, O) for several experts."""
        parts = zip(self.batches, weight_EIO.split(self._experts_of_batch), strict=True)
        return [weight[0] if batch.experts == 1 else weight for batch, weight in parts]

    def in_order(self, *weights_EOI: Tensor) -> Tensor:
        """Return weights of all experts in the order of their rows.

        Several weights are concatenated along outputs.
        """
        assert self.order_E is not None
        first = weights_EOI[0]
        joined_EnOI = first.new_empty(first.size(0), len(weights_EOI), *first.shape[1:])
        for number, weight_EOI in enumerate(weights_EOI):
            torch.index_select(weight_EOI, 0, self.order_E, out=joined_EnOI[:, number])
        return joined_EnOI.flatten(1, 2)

    def out_of_order(self, weight_EOI: Tensor) -> Tensor:
        """Undo ``in_order`` for one weight. Do nothing if the experts are in their own order."""
        if self.order_E is None:
            return weight_EOI
        return weight_EOI.index_select(0, inverse_of(self.order_E))


def rounded_up(count: int, least: int, digits: int = 4) -> int:
    """Round up to one of few sizes, with ``digits`` significant binary digits.

    The result is a multiple of the largest power of two that does not exceed ``least``.

    >>> [rounded_up(count, 5) for count in (0, 3, 62, 250)]
    [0, 4, 64, 256]
    """
    dropped = max(least.bit_length() - 1, count.bit_length() - digits)
    return -(-count >> dropped) << dropped


def one_by_one(counts: list[int], least: int) -> list[ExpertBatch]:
    """Return a batch for each expert. Sizes are rounded up unless ``least`` is 0."""
    return _laid_out([(1, rounded_up(count, least) if least else count) for count in counts])


def batches(counts: list[int], least: int) -> list[ExpertBatch]:
    """Group experts, sorted by size, into batches with the least total cost.

    The cost of a batch is its padded number of rows plus the overhead of a call (``_CALL_ROWS``). The
    number of experts in a batch is a power of two, to limit the number of different shapes. The size of a
    batch is the size of its largest expert, rounded up unless ``least`` is 0.

    >>> [(batch.experts, batch.size) for batch in batches([3, 4, 4, 5, 800], 4)]
    [(4, 8), (1, 800)]
    """
    # Dynamic programming: for the first experts, compute the least cost in rows, and the last batch of
    # that solution.
    costs = [0]
    last: list[tuple[int, int]] = []
    for stop, count in enumerate(counts, start=1):
        size = rounded_up(count, least, digits=5) if least else count
        cost, experts = min((costs[stop - n] + n * size, n) for n in _BATCH_SIZES if n <= stop)
        costs.append(cost + _CALL_ROWS)
        last.append((experts, size))

    # Follow the solution from the last batch to the first.
    solution = []
    stop = len(counts)
    while stop:
        solution.append(last[stop - 1])
        stop -= solution[-1][0]
    return _laid_out(solution[::-1])


def _laid_out(sizes: list[tuple[int, int]]) -> list[ExpertBatch]:
    """Return consecutive batches from pairs of the number of experts and their size."""
    result = []
    first = start = 0
    for experts, size in sizes:
        result.append(ExpertBatch(first, experts, start, size))
        first += experts
        start += experts * size
    return result


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SD: Tensor,
        weights_SK: Tensor,
        w1_EFD: Tensor,
        w2_EDF: Tensor,
        w3_EFD: Tensor,
        places: Places,
    ) -> Tensor:
        x_PD = places.rows_of(x_SD)
        gate_and_up: tuple[Tensor, ...] = (w1_EFD, w3_EFD)
        if places.order_E is None:
            gate_PF, up_PF = (places.product(x_PD, w.mT) for w in gate_and_up)
        else:
            w2_EDF = places.in_order(w2_EDF)
            gate_and_up = (places.in_order(w1_EFD, w3_EFD),)
            gate_PF, up_PF = places.product(x_PD, gate_and_up[0].mT).chunk(2, dim=1)
            # silu of a strided tensor takes twice as long as a copy and silu of a contiguous tensor.
            gate_PF = gate_PF.contiguous()
        silu_PF = F.silu(gate_PF)
        hidden_PF = silu_PF * up_PF
        ctx.places = places
        ctx.save_for_backward(
            x_PD, gate_PF, up_PF, silu_PF, hidden_PF, weights_SK, w2_EDF, *gate_and_up
        )
        return places.sum_of(places.product(hidden_PF, w2_EDF.mT), weights_SK.to(x_SD.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        places: Places = ctx.places
        x_PD, gate_PF, up_PF, silu_PF, hidden_PF, weights_SK, w2_EDF, *gate_and_up = (
            ctx.saved_tensors
        )
        needs_x, needs_weights, needs_w1, needs_w2, needs_w3, _ = ctx.needs_input_grad

        # Gradients of w2 and of the routing weights, which are zero for padding.
        gradient_PD = places.rows_of(gradients[0])
        dhidden_PF = places.product(gradient_PD, w2_EDF)
        dweights_SK = (
            _row_products(dhidden_PF, hidden_PF, places, weights_SK) if needs_weights else None
        )
        weights_P = hidden_PF.new_zeros(places.num_places)
        weights_P.index_copy_(0, places.place_R, weights_SK.flatten().to(hidden_PF.dtype))
        dw1_EFD = dw2_EDF = dw3_EFD = None
        if needs_w2:
            dw2_EDF = places.out_of_order(
                places.weight_gradient(gradient_PD, hidden_PF * weights_P.unsqueeze(1))
            )
        # Rows of width D take most of the memory. Free them before the next rows are allocated.
        del gradient_PD
        dhidden_PF.mul_(weights_P.unsqueeze(1))

        # Gradients of gate and up, in one tensor if their weights were multiplied together.
        dup_PF, dboth_PG = torch.empty_like(silu_PF), None
        if places.order_E is not None:
            dboth_PG = dhidden_PF.new_empty(dhidden_PF.size(0), 2 * dhidden_PF.size(1))
            dup_PF = dboth_PG.chunk(2, dim=1)[1]
        torch.mul(dhidden_PF, silu_PF, out=dup_PF)
        dgate_PF = torch.ops.aten.silu_backward(dhidden_PF.mul_(up_PF), gate_PF)
        del dhidden_PF

        # Gradients of w1, w3 and the tokens.
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


def _row_products(
    dhidden_PF: Tensor, hidden_PF: Tensor, places: Places, weights_SK: Tensor
) -> Tensor:
    """Return the gradient of the routing weights, (S, K). It is summed in float32 and rounded once.

    g (w2 h) is computed as (g w2) h, with shorter rows.
    """
    # Dot product of each row of one tensor with the same row of the other. embedding_bag's gradient of
    # per-sample weights computes this if each bag has one entry.
    row_P = torch.arange(hidden_PF.size(0))
    sum_P = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        dhidden_PF, hidden_PF, row_P, row_P, row_P, _SUM
    )
    return sum_P.index_select(0, places.place_R).view_as(weights_SK).to(weights_SK.dtype)
