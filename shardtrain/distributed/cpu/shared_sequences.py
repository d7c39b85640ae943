"""Sequences of tensor-parallel ranks of one machine, exchanged by shared memory as plain tensors."""

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
    """Return the exchange of the tensor-parallel ranks: PyTorch's collectives if they share no memory."""
    exchange = SequenceExchange.between(mesh.group("tp"))
    if exchange is None:
        return Sequences()
    # a pipeline may go backward to weights in an order of its own on each rank, and then all must wait for FSDP
    return SharedSequences(exchange, sums_weights=mesh.size("pp") == 1)


class SharedSequences(Sequences):
    """All-gather and reduce-scatter along the sequence by shared memory."""

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
        # all split layers that take it share the plain tensor and the sum of their gradients
        gradient = GradientSum()
        plain_BTD, x_BTD = _GatherSequence.apply(x_BtD, self._exchange, device_mesh, gradient)
        x_BTD.for_local_products = (plain_BTD, gradient if self._sums_weights else None)
        return x_BTD  # type: ignore[no-any-return]

    def reduce_scatter(self, sums_BTD: Tensor, device_mesh: DeviceMesh) -> Tensor:
        is_even = sums_BTD.ndim == 3 and sums_BTD.size(1) % device_mesh.size() == 0
        is_split = isinstance(sums_BTD, DTensor)
        if not is_even or (is_split and sums_BTD.placements != (Partial(),)):  # type: ignore[attr-defined]
            return super().reduce_scatter(sums_BTD, device_mesh)
        local_BTD = sums_BTD.to_local(grad_placements=(Replicate(),)) if is_split else sums_BTD  # type: ignore[attr-defined]
        return _ReduceScatterSequence.apply(local_BTD, self._exchange)  # type: ignore[no-any-return]


class GradientSum:
    """The gradient of a gathered sequence, to which the split layers that multiply it add their own in backward."""

    def __init__(self) -> None:
        self._total_BTD: Tensor | None = None

    def add_product(self, gradient_BTO: Tensor, weight_OD: Tensor, by_onednn: bool) -> None:
        """Add ``gradient @ weight``, in the product itself where its kernel can."""
        gradient_RO = gradient_BTO.flatten(0, -2)
        if by_onednn:
            self.add(onednn_linear.product(gradient_RO, weight_OD.t()).unflatten(0, gradient_BTO.shape[:-1]))
        elif self._total_BTD is None:
            self._total_BTD = (gradient_RO @ weight_OD).unflatten(0, gradient_BTO.shape[:-1])
        else:
            self._total_BTD.view(-1, weight_OD.size(1)).addmm_(gradient_RO, weight_OD)

    def add(self, gradient_BTD: Tensor) -> None:
        """Add a tensor, which nobody else may use."""
        if self._total_BTD is None:
            self._total_BTD = gradient_BTD
        else:
            self._total_BTD += gradient_BTD

    def product(self, linear: nn.Linear, x_BTD: Tensor, weight: DTensor, bias_O: Tensor | None) -> Tensor:
        """Return a split linear layer's output. Its backward pass adds the gradient of ``x_BTD`` to this sum."""
        by_onednn = type(linear) is OneDnnLinear and onednn_linear.can_multiply(x_BTD, weight._local_tensor)
        return _ProductOfGathered.apply(x_BTD, weight, bias_O, self, by_onednn)  # type: ignore[no-any-return]

    def take(self) -> Tensor | None:
        """The sum, and begin again with nothing; None if no layer has added to it."""
        total_BTD, self._total_BTD = self._total_BTD, None
        return total_BTD


class _GatherSequence(torch.autograd.Function):
    """The gathered sequence as a plain tensor and as a DTensor.

    Autograd goes back to it when all layers that use it have gone back, whether they give a gradient of their input to
    autograd or add it to ``gradient``.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BtD: Tensor, shared: SequenceExchange, mesh: DeviceMesh, gradient: GradientSum
    ) -> tuple[Tensor, DTensor]:
        ctx.shared = shared
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)  # zeros of all tokens
        x_BTD = shared.gather(x_BtD)
        return x_BTD, DTensor.from_local(x_BTD, mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None, None]:
        total_BTD = ctx.gradient.take()
        plain_BTD, split_BTD = gradients
        whole_BTD = None
        if split_BTD is not None and split_BTD.placements != (Partial(),):
            whole_BTD = split_BTD
        for addend_BTD in (plain_BTD, None if whole_BTD is not None else split_BTD):
            if addend_BTD is not None:
                total_BTD = plain(addend_BTD) if total_BTD is None else total_BTD + plain(addend_BTD)
        gradient_BtD = None if total_BTD is None else ctx.shared.reduce_scatter(total_BTD)
        if whole_BTD is not None:
            part_BtD = whole_BTD.redistribute(placements=(Shard(1),)).to_local()
            gradient_BtD = part_BtD if gradient_BtD is None else gradient_BtD + part_BtD
        return gradient_BtD, None, None, None


class _ProductOfGathered(torch.autograd.Function):
    """A split linear layer's product; it adds the gradient of its input to ``gradient``, and gives autograd none.

    ``by_onednn``: whether oneDNN multiplies, as in ``OneDnnLinear``.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight: DTensor, bias_O: Tensor | None, gradient: GradientSum, by_onednn: bool
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, DTensor | None, Tensor | None, None, None]:
        (gradient_BTO,) = gradients
        x_BTD, local_OD = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_x:
            ctx.gradient.add_product(gradient_BTO, local_OD, ctx.by_onednn)
        gradient_RO = gradient_BTO.flatten(0, -2)
        dweight = None
        if needs_weight:
            x_RD = x_BTD.flatten(0, -2)
            by_kernel = onednn_linear.weight_gradient if ctx.by_onednn else _weight_gradient
            # as FSDP makes its DTensors: the gradient is placed as the weight is
            dweight = DTensor(by_kernel(gradient_RO, x_RD), ctx.spec, requires_grad=False)
        return None, dweight, gradient_RO.sum(0) if needs_bias else None, None, None


def _weight_gradient(gradient_RO: Tensor, x_RI: Tensor) -> Tensor:
    return gradient_RO.t() @ x_RI


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums_BTD: Tensor, shared: SequenceExchange) -> Tensor:
        ctx.shared = shared
        return shared.reduce_scatter(sums_BTD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.shared.gather(gradients[0]), None
