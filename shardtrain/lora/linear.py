"""A linear module with frozen weights and a trained product of two thin matrices beside them (Hu et al. 2021).

Shape suffixes: I inputs, O outputs, R rank. The names of the frozen weights stay as they were, so that a checkpoint of
the model without adapters loads by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

NAMES = ("lora_a", "lora_b")
"""Parameters that an adapter adds to a module: (R, I) and (O, R)."""


class FrozenLinear(nn.Linear):
    """W x + b, neither of which is trained; ``low_bits`` holds W in their place, see ``lowbit.py``."""

    def __init__(self, base: nn.Linear) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make weights of its own
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.low_bits: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        if self.low_bits is None:
            return super().forward(x)
        product = self.low_bits(x)
        return product if self.bias is None else product + self.bias


class LoraLinear(FrozenLinear):
    """W x + b + scale * B A dropout(x), of which A (``lora_a``) and B (``lora_b``) are trained."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, dropout: float = 0.0) -> None:
        super().__init__(base)
        self.scale, self.dropout = scale, dropout
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, self.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(self.out_features, rank))
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(False)
        self.lora_a.requires_grad_(True)
        self.lora_b.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., I) to (..., O)."""
        if isinstance(self.lora_a, DTensor):
            return super().forward(x) + self._split(x, self.lora_a, self.lora_b)  # type: ignore[arg-type]
        return super().forward(x) + self._added(x, self.lora_a, self.lora_b)

    def _added(self, x: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        return F.linear(F.linear(x, a_RI), b_OR) * self.scale

    def _split(self, x: Tensor, a_RI: DTensor, b_OR: DTensor) -> DTensor:
        """This rank's part of what is added, placed as the module's own output is; nothing is sent in forward.

        Outputs split: the input is whole, A is whole and B has some rows. Inputs split: A has some columns, B is whole,
        and each rank's result is a share of the sum that the module's own output is too. Where a factor is whole on
        every rank, a rank's gradient of it is a share of the sum.
        """
        assert isinstance(x, DTensor)
        share, own = (Partial(),), None
        by_outputs = isinstance(b_OR.placements[0], Shard)
        x_local = x.to_local(grad_placements=share if by_outputs else own)
        a_local = a_RI.to_local(grad_placements=share if by_outputs else own)
        b_local = b_OR.to_local(grad_placements=own if by_outputs else share)
        added = self._added(x_local, a_local, b_local)
        placed = Shard(added.ndim - 1) if by_outputs else Partial()
        return DTensor.from_local(added, a_RI.device_mesh, (placed,), run_check=False)

    def extra_repr(self) -> str:
        """As nn.Linear's, with the rank."""
        return f"{super().extra_repr()}, rank={self.lora_a.shape[0]}"


def adapted(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The adapted modules of a model with their paths, in its order."""
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield path, module


def is_adapter(name: str) -> bool:
    """Whether a parameter is one that an adapter has added.

    >>> is_adapter("layers.0.attn.wq.lora_a"), is_adapter("layers.0.attn.wq.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in NAMES


@torch.no_grad()
def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """W + scale * B A in float32: what the module computes without dropout, as one matrix."""
    return torch.addmm(weight_OI.float(), b_OR.float(), a_RI.float(), alpha=scale)
