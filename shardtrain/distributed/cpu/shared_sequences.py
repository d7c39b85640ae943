"""Sequence parallelism between ranks of one machine, through shared memory and with plain tensors.

Shape suffixes: B batch, t tokens of this rank, T all tokens, D input and O output features, R rows (batch
and tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardtrain.distributed.cpu.shared_memory import SequenceExchange
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.tensor_parallel.sequences import Sequences, plain
from shardtrain.ops.cpu import onednn_linear
from shardtrain.ops.cpu.onednn_linear import OneDnnLinear
from shardtrain.ops.linear_layers import is_plain_linear


def between(mesh: Mesh) -> Sequences:
    """Return the collectives of the tensor-parallel ranks (a collective).

    They use shared memory if the ranks have some, and PyTorch's process group otherwise.
    """
    exchange = SequenceExchange.between(mesh.group("tp"))
    if exchange is None:
        return Sequences()
    # In a pipeline, ranks may compute the gradients of weights in different orders, so a collective per
    # weight would deadlock. FSDP sums the gradients later.
    return SharedSequences(exchange, sums_weights=mesh.size("pp") == 1)


class SharedSequences(Sequences):
    """All-gather and reduce-scatter along the sequence through shared memory."""

    is_shared = True

    def __init__(self, exchange: SequenceExchange, sums_weights: bool) -> None:
        self._exchange = exchange
        self._sums_weights = sums_weights

    def sum_weights(self) -> Callable[[Tensor], Tensor] | None:
        return self._exchange.all_reduce if self._sums_weights else None

    def keep_plain(self, module: nn.Module) -> bool:
        return is_plain_linear(module)

    def gather(self, x_BtD: Tensor, device_mesh: DeviceMesh) -> DTensor:
        if isinstance(x_BtD, DTensor) or x_BtD.ndim != 3:
            return super().gather(x_BtD, device_mesh)
        # All split layers that read this sequence use one plain tensor, and add their gradients of it to
        # one sum.
        gradient = GradientSum()
        plain_BTD, x_BTD = _GatherSequence.apply(x_BtD, self._exchange, device_mesh, gradient)
        x_BTD.for_local_products = (plain_BTD, gradient if self._sums_weights else None)
        return x_BTD  # type: ignore[no-any-return]

    def reduce_scatter(self, sums_BTD: Tensor, device_mesh: DeviceMesh) -> Tensor:
        is_even = sums_BTD.ndim == 3 and sums_BTD.size(1) % device_mesh.size() == 0
        if not is_even:
            return super().reduce_scatter(sums_BTD, device_mesh)
        local_BTD = sums_BTD
        if isinstance(sums_BTD, DTensor):
            if sums_BTD.placements != (Partial(),):
                return super().reduce_scatter(sums_BTD, device_mesh)
            local_BTD = sums_BTD.to_local(grad_placements=(Replicate(),))
        return _ReduceScatterSequence.apply(local_BTD, self._exchange)  # type: ignore[no-any-return]


class GradientSum:
    """The gradient of a gathered sequence. Each split linear layer that has read the sequence adds its part."""

    def __init__(self) -> None:
        self._total_BTD: Tensor | None = None

    def add_product(self, gradient_BTO: Tensor, weight_OD: Tensor, by_onednn: bool) -> None:
        """Add ``gradient @ weight`` to the sum. Without oneDNN, ``addmm_`` accumulates in place."""
        gradient_RO = gradient_BTO.flatten(0, -2)
        batch_and_tokens = gradient_BTO.shape[:-1]
        if by_onednn:
            product_RD = onednn_linear.product(gradient_RO, weight_OD.t())
            self.add(product_RD.unflatten(0, batch_and_tokens))
        elif self._total_BTD is None:
            product_RD = gradient_RO @ weight_OD
            self._total_BTD = product_RD.unflatten(0, batch_and_tokens)
        else:
            total_RD = self._total_BTD.view(-1, weight_OD.size(1))
            total_RD.addmm_(gradient_RO, weight_OD)

    def add(self, gradient_BTD: Tensor) -> None:
        """Add a tensor. The caller must not use it afterwards."""
        if self._total_BTD is None:
            self._total_BTD = gradient_BTD
        else:
            self._total_BTD += gradient_BTD

    def product(
        self, linear: nn.Linear, x_BTD: Tensor, weight: DTensor, bias_O: Tensor | None
    ) -> Tensor:
        """Return a split linear layer's output. In backward, the gradient of ``x_BTD`` is added to this sum."""
        by_onednn = type(linear) is OneDnnLinear and onednn_linear.can_multiply(
            x_BTD, weight._local_tensor
        )
        return _ProductOfGathered.apply(x_BTD, weight, bias_O, self, by_onednn)  # type: ignore[no-any-return]

    def take(self) -> Tensor | None:
        """Return the sum and reset it. None if no layer has added to it."""
        total_BTD, self._total_BTD = self._total_BTD, None
        return total_BTD


class _GatherSequence(torch.autograd.Function):
    """All-gather a sequence, and return it as a plain tensor and as a DTensor.

    Layers that read the sequence return its gradient to autograd, or add it to ``gradient`` and return
    None. Either way, autograd runs the backward of all these layers before this one.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BtD: Tensor, shared: SequenceExchange, mesh: DeviceMesh, gradient: GradientSum
    ) -> tuple[Tensor, DTensor]:
        ctx.shared = shared
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)  # missing gradients would be zeros of the full size
        x_BTD = shared.gather(x_BtD)
        return x_BTD, DTensor.from_local(x_BTD, mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None, None]:
        plain_BTD, dtensor_BTD = gradients
        # These are summed over ranks: the gradients from split layers, the gradient of the plain output,
        # and the gradient of the DTensor if it is a partial sum.
        partial_BTD = ctx.gradient.take()
        is_partial = dtensor_BTD is not None and dtensor_BTD.placements == (Partial(),)
        for addend_BTD in (plain_BTD, dtensor_BTD if is_partial else None):
            if addend_BTD is not None:
                partial_BTD = (
                    plain(addend_BTD) if partial_BTD is None else partial_BTD + plain(addend_BTD)
                )
        gradient_BtD = None
        if partial_BTD is not None:
            gradient_BtD = ctx.shared.reduce_scatter(partial_BTD)
        # A DTensor that is not a partial sum is complete, so it needs no reduction.
        if dtensor_BTD is not None and not is_partial:
            part_BtD = dtensor_BTD.redistribute(placements=(Shard(1),)).to_local()
            gradient_BtD = part_BtD if gradient_BtD is None else gradient_BtD + part_BtD
        return gradient_BtD, None, None, None


class _ProductOfGathered(torch.autograd.Function):
    """Compute the output of a split linear layer. If ``by_onednn``, use oneDNN, like ``OneDnnLinear``.

    Backward adds the gradient of the input to ``gradient``, and returns None in its place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        weight: DTensor,
        bias_O: Tensor | None,
        gradient: GradientSum,
        by_onednn: bool,
    ) -> Tensor:
        local_OD = weight._local_tensor
        ctx.save_for_backward(x_BTD, local_OD)
        ctx.spec = weight._spec
        ctx.gradient = gradient
        ctx.by_onednn = by_onednn
        if by_onednn:
            return onednn_linear.product(x_BTD, local_OD, bias_O)
        return nn.functional.linear(x_BTD, local_OD, bias_O)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[None, DTensor | None, Tensor | None, None, None]:
        (gradient_BTO,) = gradients
        x_BTD, local_OD = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_x:
            ctx.gradient.add_product(gradient_BTO, local_OD, ctx.by_onednn)
        gradient_RO = gradient_BTO.flatten(0, -2)
        dweight = None
        if needs_weight:
            x_RD = x_BTD.flatten(0, -2)
            multiply = onednn_linear.weight_gradient if ctx.by_onednn else _weight_gradient
            dweight_OD = multiply(gradient_RO, x_RD)
            # The gradient has the same placement as the weight. Construct it as FSDP does.
            dweight = DTensor(dweight_OD, ctx.spec, requires_grad=False)
        dbias_O = gradient_RO.sum(0) if needs_bias else None
        return None, dweight, dbias_O, None, None


def _weight_gradient(gradient_RO: Tensor, x_RD: Tensor) -> Tensor:
    return gradient_RO.t() @ x_RD


class _ReduceScatterSequence(torch.autograd.Function):
    """Reduce-scatter partial sums along the sequence. Backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, sums_BTD: Tensor, shared: SequenceExchange) -> Tensor:
        ctx.shared = shared
        return shared.reduce_scatter(sums_BTD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.shared.gather(gradients[0]), None
