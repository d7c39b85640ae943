"""Linear layers whose weights lie in the order in which oneDNN's kernels read them: for generation on a CPU.

A product with few rows takes as long as its weight is read. PyTorch keeps a weight by rows, which these kernels read at
half of the memory's speed or less; in their own order they reach four fifths of it (benchmarks/LOG.md, Zen 4).
A weight is put into that order once, which takes as long as some ten products, and is gone in its old one: only the
product can use it. Gradients are not computed.
Shape suffixes: R rows, I inputs, O outputs, x any dimensions before the last.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.ops import chosen_kernels
from shardtrain.ops.cpu.onednn_linear import OneDnnLinear

_FEWEST_ROWS = 4
"""Fewer are filled up with zeros: the kernel reads a weight at 21 GB/s for four rows to six, at 15 for one or two."""
_SMALLEST_NUMEL = {torch.bfloat16: 1 << 18, torch.float32: 1 << 20}
"""Of a weight: calling oneDNN takes some 15 microseconds, in which the other kernels have read smaller ones."""
_PAYS_AFTER_PASSES = 32
"""Passes of the model that gain what packing takes: 17 in bfloat16 (1B), fewer in float32 with several rows."""


class PackedLinear(nn.Linear):
    """A linear layer of a packed weight, without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        x_RI = x.reshape(-1, x.size(-1))
        rows = x_RI.size(0)
        if rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if rows < _FEWEST_ROWS:
            x_RI = F.pad(x_RI, (0, 0, 0, _FEWEST_ROWS - rows))
        return product(x_RI, self.weight, self.bias)[:rows].view(*x.shape[:-1], -1)


def pack(weight_OI: Tensor) -> Tensor:
    """The weight in oneDNN's order: a tensor whose numbers only ``product`` and ``to_dense`` can read."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach())  # type: ignore[no-any-return]


def product(x_RI: Tensor, packed_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` (R, O), without gradients."""
    return torch.ops.mkldnn._linear_pointwise(x_RI, packed_OI, bias_O, "none", [], "")  # type: ignore[no-any-return]


def is_available(dtype: torch.dtype) -> bool:
    """True if this build of PyTorch has the operators and the processor supports them in ``dtype``.

    oneDNN packs bfloat16 only on processors with AVX-512 or AVX-NE-CONVERT.
    """
    operators = ["_linear_pointwise", "_reorder_linear_weight"]
    if dtype == torch.bfloat16:
        operators.append("_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def use_where_it_pays(model: nn.Module, passes: int, rows: int) -> bool:
    """``use``, where so many passes over so many rows each gain more than packing takes; says whether it did.

    One row in float32 is read as fast by oneDNN where it lies. Only models of this package are packed: another may use
    the weight of a linear layer itself.
    """
    dtype = next(model.parameters()).dtype
    is_own = type(model).__module__.startswith("shardtrain.models.")
    pays = passes >= _PAYS_AFTER_PASSES and (dtype == torch.bfloat16 or rows > 1)
    return is_own and pays and use(model)


def use(model: nn.Module) -> bool:
    """Pack the weights of plain linear layers on a CPU that are large enough, in place; says whether there were some.

    Only in types in which this machine was measured to gain by it. Each weight is freed before the next one is packed,
    unless other modules share it, such as an embedding.
    """
    names = {torch.bfloat16: "packed_linear", torch.float32: "packed_linear_float32"}
    types = {dtype for dtype, name in names.items() if chosen_kernels.chosen().uses(name)}
    found = False
    for module in model.modules():
        # A subclass may compute something else, and a DTensor or another subclass has its own product
        if type(module) not in (nn.Linear, OneDnnLinear) or type(module.weight) is not nn.Parameter:
            continue
        weight = module.weight
        if weight.device.type == "cpu" and weight.dtype in types and weight.numel() >= _SMALLEST_NUMEL[weight.dtype]:
            module.weight = nn.Parameter(pack(weight), requires_grad=False)
            module.__class__ = PackedLinear
            found = True
    return found
