"""Perturb a float32 run by as much as rounding to a shorter dtype does,
to measure the changes by rounding.

The method is from TTrace (Jiang et al. 2025, arXiv 2506.09280): multiply weights, outputs of modules and
their gradients by 1 + u r, with u the unit roundoff of their dtype and r random in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardtrain.ops.dtensor import local_tensor

if TYPE_CHECKING:
    from shardtrain.distributed import Runner

ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "e4m3": 2.0**-4,
    "e5m2": 2.0**-3,
}
"""Unit roundoff: the largest relative error of rounding to nearest."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a floating-point dtype."""
    return ROUNDOFF[str(dtype).removeprefix("torch.")]


def perturbed(tensor: Tensor, roundoff: float, generator: torch.Generator) -> Tensor:
    """Multiply each element by 1 + ``roundoff`` r, with r uniform in [-1, 1]."""
    r = torch.rand(tensor.shape, generator=generator, dtype=torch.float32).mul_(2.0).sub_(1.0)
    return tensor * (1.0 + roundoff * r).to(tensor.dtype)


def rounded(tensor: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round each element to ``dtype`` on a randomly shifted grid, so results of several calls differ."""
    shift = 1.0 + torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
    # ``copy_`` rounds, and is not a cast that is disabled in a reference.
    short = torch.empty_like(tensor, dtype=dtype).copy_(tensor * shift)
    return torch.empty_like(tensor).copy_(short) / shift


@dataclass
class RoundingNoise:
    """Rounding errors to add to a run of one process.

    Attributes:
        weights: Unit roundoff of the weights in forward and backward.
        outputs: Unit roundoff of each module's outputs and of their gradients, by module path.
        products: Paths of linear layers that round their operands to 8 bits.
        stored: dtype in which weights are stored. Rounding to it after each update is a part of the
            algorithm, so the reference does it, too.
        seed: Seed of the random errors.
    """

    weights: float
    outputs: Mapping[str, float]
    products: frozenset[str]
    stored: torch.dtype
    seed: int = 0
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    @torch.no_grad()
    def attach(self, runner: Runner) -> None:
        """Perturb the weights now, and activations and gradients in all steps."""
        for name, parameter in runner.parameters().items():
            if not self.weights:
                break
            # A product in 8 bits also rounds its weight to 8 bits.
            in_8_bits = name.rpartition(".")[0] in self.products
            roundoff = max(self.weights, ROUNDOFF["e4m3"] if in_8_bits else 0.0)
            local = local_tensor(parameter)
            local.copy_(perturbed(local, roundoff, self._generator))
        self.store(runner)
        for part in runner.parts:
            for path, module in part.named_modules():
                if path in self.products:
                    module.register_forward_pre_hook(self._perturb_operand)
                roundoff = self.outputs.get(path, 0.0)
                if path in self.products:
                    roundoff = max(roundoff, ROUNDOFF["e5m2"])
                    module.register_forward_hook(partial(self._perturb_gradient, roundoff))
                elif roundoff:
                    module.register_forward_hook(partial(self._perturb_output, roundoff))

    @torch.no_grad()
    def store(self, runner: Runner) -> None:
        """Round all weights to the dtype in which they are stored."""
        if self.stored == torch.float32:
            return
        for parameter in runner.parameters().values():
            local = local_tensor(parameter)
            # ``copy_`` rounds, and is not a cast that is disabled while the reference runs.
            local.copy_(torch.empty_like(local, dtype=self.stored).copy_(local))

    def _perturb_output(self, roundoff: float, _: nn.Module, inputs: Any, output: Any) -> Any:
        return tree_map_only(Tensor, partial(self._noisy, roundoff, roundoff), output)

    def _perturb_gradient(self, roundoff: float, _: nn.Module, inputs: Any, output: Any) -> Any:
        """Perturb the output of a product in 8 bits as in 16, and its gradient, which is also an operand, as in 8."""
        return tree_map_only(Tensor, partial(self._noisy, self.weights, roundoff), output)

    def _perturb_operand(self, _: nn.Module, inputs: Any) -> Any:
        return tree_map_only(Tensor, partial(self._noisy, ROUNDOFF["e4m3"], 0.0), inputs)

    def _noisy(self, roundoff: float, of_gradient: float, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noisy = perturbed(tensor, roundoff, self._generator)
        if noisy.requires_grad and of_gradient:
            noisy.register_hook(lambda gradient: perturbed(gradient, of_gradient, self._generator))
        return noisy
