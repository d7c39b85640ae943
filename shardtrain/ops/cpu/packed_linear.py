"""Linear layers with weights packed in the memory layout of oneDNN's kernels, for generation on a CPU.

Reading the weight determines the time of a product with few rows. Kernels read a row-major weight at half
of the memory bandwidth or less, and a packed weight at four fifths (benchmarks/LOG.md, Zen 4). Packing
takes about as long as ten products, and replaces the row-major weight. Only ``product`` can read a packed
weight. Gradients are not supported. Shape suffixes: R rows, I inputs, O outputs, x any dimensions before
the last.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.ops import chosen_kernels
from shardtrain.ops.cpu.onednn_linear import OneDnnLinear

_FEWEST_ROWS = 4
"""Minimum number of rows.

Zeros pad fewer rows: the kernel reads 21 GB/s with 4 to 6 rows, and 15 GB/s with 1 or 2.
"""
_SMALLEST_NUMEL = {torch.bfloat16: 1 << 18, torch.float32: 1 << 20}
"""Minimum elements of a weight.

For smaller weights, the call of oneDNN (15 microseconds) takes longer than it saves.
"""
_PAYS_AFTER_PASSES = 32
"""Number of forward passes after which packing has saved time.

Measured: 17 in bfloat16 (1B), fewer in float32.
"""


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight, without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        x_RI = x.reshape(-1, x.size(-1))
        rows = x_RI.size(0)
        if rows == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if rows < _FEWEST_ROWS:
            x_RI = F.pad(x_RI, (0, 0, 0, _FEWEST_ROWS - rows))
        out_RO = product(x_RI, self.weight, self.bias)[:rows]
        return out_RO.view(*x.shape[:-1], -1)


def pack(weight_OI: Tensor) -> Tensor:
    """Return a weight in oneDNN's layout. Only ``product`` and ``to_dense`` can read it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach())  # type: ignore[no-any-return]


def product(x_RI: Tensor, packed_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, (R, O), without gradients."""
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
    """Pack the weights of a model if that saves time for a number of forward passes.
    True if weights were packed.

    Packing does not help a single row in float32. Only models of this package are packed, because other
    models may read the weights of their linear layers.
    """
    dtype = next(model.parameters()).dtype
    is_own = type(model).__module__.startswith("shardtrain.models.")
    pays = passes >= _PAYS_AFTER_PASSES and (dtype == torch.bfloat16 or rows > 1)
    return is_own and pays and use(model)


def use(model: nn.Module) -> bool:
    """Pack the weights of large plain linear layers on a CPU, in place. True if weights were packed.

    Only dtypes with a measured speedup on this machine are packed. Each weight is freed before the next
    weight is packed, unless another module such as an embedding shares it.
    """
    names = {torch.bfloat16: "packed_linear", torch.float32: "packed_linear_float32"}
    dtypes = {dtype for dtype, name in names.items() if chosen_kernels.chosen().uses(name)}
    has_packed = False
    for module in model.modules():
        # Subclasses of nn.Linear or Tensor, such as DTensor, may compute something else.
        if type(module) not in (nn.Linear, OneDnnLinear) or type(module.weight) is not nn.Parameter:
            continue
        weight = module.weight
        if weight.device.type != "cpu" or weight.dtype not in dtypes:
            continue
        if weight.numel() >= _SMALLEST_NUMEL[weight.dtype]:
            module.weight = nn.Parameter(pack(weight), requires_grad=False)
            module.__class__ = PackedLinear
            has_packed = True
    return has_packed
