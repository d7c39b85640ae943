"""Linear module with frozen weights and a trained low-rank update (Hu et al. 2021).

Shape suffixes: I inputs, O outputs, R rank. The frozen weights keep their names, so a checkpoint
of the model without adapters can be loaded. GPT-2's ``Conv1D`` in transformers is a linear module
with a weight of shape (I, O).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

NAMES = ("lora_a", "lora_b", "lora_magnitude")
"""Suffixes of the adapter parameters of a module: (R, I), (O, R) and, with DoRA, (O,)."""


def is_transposed(module: nn.Module) -> bool:
    """True if a module is linear with a weight of shape (I, O), such as ``Conv1D``.

    Does not import transformers.
    """
    # The class of a frozen module is no longer Conv1D.
    if isinstance(module, FrozenLinear):
        return module.transposed
    return (
        type(module).__name__ == "Conv1D"
        and type(module).__module__ == "transformers.pytorch_utils"
    )


def is_linear(module: nn.Module) -> bool:
    """True if a module can have an adapter.

    Subclasses of nn.Linear cannot, because they may compute something else.
    """
    return type(module) is nn.Linear or (
        is_transposed(module) and not isinstance(module, FrozenLinear)
    )


class FrozenLinear(nn.Linear):
    """W x + b with frozen W and b.

    Attributes:
        transposed: True if the weight is (I, O).
        low_bits: Quantized W, which replaces ``weight`` if it is set. See ``quantize.py``.
    """

    weight: Any
    bias: Any

    def __init__(self, base: nn.Module) -> None:
        # Skip nn.Linear's constructor, which would allocate new weights.
        nn.Module.__init__(self)
        self.transposed = is_transposed(base)
        self.weight = base.weight
        self.bias = base.bias
        self.out_features, self.in_features = self.weight.shape
        if self.transposed:
            self.in_features, self.out_features = self.weight.shape
        self.low_bits: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        if self.low_bits is None:
            weight_OI = self.weight.t() if self.transposed else self.weight
            return F.linear(x, weight_OI, self.bias)
        # The product with a quantized weight does not include the bias.
        product = self.low_bits(x)
        if self.bias is None:
            return product
        return product + self.bias

    def product(self, x: Tensor) -> Tensor:
        """Compute W x with this rank's local tensors."""
        if self.low_bits is not None:
            return self.low_bits(x)
        weight = _local(self.weight)
        if self.transposed:
            weight = weight.t()
        return F.linear(x, weight)

    def weight_OI(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's part of W. A quantized W is dequantized."""
        if self.low_bits is not None:
            return self.low_bits.restored(dtype)  # type: ignore[attr-defined,no-any-return]
        weight = _local(self.weight).detach()
        if self.transposed:
            weight = weight.t()
        return weight.to(dtype)


class LoraLinear(FrozenLinear):
    """W x + b + scale * B A dropout(x) with trained A (``lora_a``) and B (``lora_b``).

    With ``use_dora`` (Liu et al. 2024, arXiv 2402.09353), each row of W + scale * B A is
    normalized and multiplied by its trained magnitude (``lora_magnitude``). Backward treats the
    norm as a constant (section 4.3).
    """

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        use_dora: bool = False,
    ) -> None:
        super().__init__(base)
        self.scale = scale
        self.dropout = dropout
        self.lora_a = nn.Parameter(self.weight.new_empty(rank, self.in_features))
        self.lora_b = nn.Parameter(self.weight.new_empty(self.out_features, rank))
        magnitude = None
        if use_dora:
            magnitude = nn.Parameter(self.weight.new_empty(self.out_features))
        self.lora_magnitude: nn.Parameter | None
        self.register_parameter("lora_magnitude", magnitude)
        # The module's weight and bias stay frozen.
        for name, parameter in self.named_parameters(recurse=False):
            parameter.requires_grad_(name in NAMES)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        # With tensor parallelism, parameters are DTensors.
        if isinstance(self.lora_a, DTensor):
            return self._split(x, self.lora_a, self.lora_b, self.lora_magnitude)  # type: ignore[arg-type]
        if self.lora_magnitude is None:
            frozen = super().forward(x)
            return frozen + self._added(x, self.lora_a, self.lora_b)
        out = self._lengthened(x, self.lora_a, self.lora_b, self.lora_magnitude)
        if self.bias is None:
            return out
        return out + self.bias

    def _added(self, x: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
        """Return what the adapter adds to the output: scale * B A dropout(x)."""
        x = F.dropout(x, self.dropout, self.training)
        low_rank = F.linear(x, a_RI)
        return F.linear(low_rank, b_OR) * self.scale

    def _lengthened(
        self,
        x: Tensor,
        a_RI: Tensor,
        b_OR: Tensor,
        magnitude_O: Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Return DoRA's output without the bias.

        With ``group``, its ranks shard the inputs, and the call is collective.
        """
        # Backward treats the norm of a row as a constant. With sharded inputs, sum the squares over
        # the ranks of the group.
        with torch.no_grad():
            merged_OI = merged(self.weight_OI(torch.float32), a_RI, b_OR, self.scale)
            squares_O = merged_OI.square().sum(1)
            del merged_OI  # as large as the weight
            if group is not None:
                dist.all_reduce(squares_O, group=group)
            length_O = squares_O.sqrt()
        # Multiply the output by one factor per row, instead of storing the normalized weight.
        factor_O = (magnitude_O.float() / length_O).to(x.dtype)
        if self.dropout and self.training:
            # As in PEFT, W x uses the input without dropout, and all added terms use the input after dropout.
            dropped = F.dropout(x, self.dropout)
            lengthened = self.product(dropped) * (factor_O - 1)
            low_rank = F.linear(dropped, a_RI)
            adapted = F.linear(low_rank, b_OR) * (factor_O * self.scale)
            return self.product(x) + lengthened + adapted
        low_rank = F.linear(x, a_RI)
        return (self.product(x) + F.linear(low_rank, b_OR) * self.scale) * factor_O

    def _split(
        self, x: Tensor, a_RI: DTensor, b_OR: DTensor, magnitude_O: DTensor | None
    ) -> Tensor:
        """Return this rank's part of the output, placed like the output of the frozen module.

        If the outputs are sharded, the input and A are replicated, B is sharded by rows, and the output is
        sharded. If the inputs are sharded, A is sharded by columns, B is replicated, and the output is a
        partial sum. Gradients of replicated tensors are partial sums over ranks. Forward needs no
        communication, except for DoRA's norms with sharded inputs.
        """
        assert isinstance(x, DTensor)
        mesh = a_RI.device_mesh
        by_outputs = isinstance(b_OR.placements[0], Shard)
        of_full_inputs = (Partial(),) if by_outputs else None
        of_full_outputs = None if by_outputs else (Partial(),)
        x_local = x.to_local(grad_placements=of_full_inputs)
        a_local = a_RI.to_local(grad_placements=of_full_inputs)
        b_local = b_OR.to_local(grad_placements=of_full_outputs)

        def placed(local: Tensor) -> DTensor:
            placement = Shard(local.ndim - 1) if by_outputs else Partial()
            return DTensor.from_local(local, mesh, (placement,), run_check=False)

        if magnitude_O is None:
            return super().forward(x) + placed(self._added(x_local, a_local, b_local))
        lengths = magnitude_O.to_local(grad_placements=of_full_outputs)
        group = None if by_outputs else mesh.get_group()
        out = self._lengthened(x_local, a_local, b_local, lengths, group)
        # If the output is a partial sum, only one rank may add the bias.
        adds_bias = by_outputs or mesh.get_local_rank() == 0
        if self.bias is not None and adds_bias:
            out = out + _local(self.bias)
        return placed(out)

    def extra_repr(self) -> str:
        """Return nn.Linear's representation followed by the rank."""
        return f"{super().extra_repr()}, rank={self.lora_a.shape[0]}"


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def adapted(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Yield the path and module of each adapted linear module, in model order."""
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield path, module


def is_adapter(name: str) -> bool:
    """True if a parameter belongs to an adapter.

    >>> is_adapter("layers.0.attn.wq.lora_a"), is_adapter("layers.0.attn.wq.weight")
    (True, False)
    >>> is_adapter("layers.0.moe.experts.down_proj_lora_b")
    True
    """
    return name.rpartition(".")[2].endswith(NAMES)


@torch.no_grad()
def merged(
    weight_OI: Tensor,
    a_RI: Tensor,
    b_OR: Tensor,
    scale: float,
    magnitude_O: Tensor | None = None,
) -> Tensor:
    """Return W + scale * B A in float32: the matrix that the module applies without dropout.

    With ``magnitude_O`` (DoRA), each row is rescaled to this norm.
    """
    merged_OI = torch.addmm(weight_OI.float(), b_OR.float(), a_RI.float(), alpha=scale)
    if magnitude_O is None:
        return merged_OI
    norm_O = torch.linalg.vector_norm(merged_OI, dim=1)
    return merged_OI * (magnitude_O.float() / norm_O).unsqueeze(1)
