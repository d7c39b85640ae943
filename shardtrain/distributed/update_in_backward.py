"""Updating each parameter in backward, as soon as its gradient is whole, so that gradients are never there all at once.

Nothing that looks at all gradients may then change them, or leave an update out: see config/rules/option_pairs.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardtrain.distributed import partial_gradients
from shardtrain.distributed.grad_clip import SquaredNorm
from shardtrain.distributed.mesh import Mesh


class UpdateInBackward:
    """An optimizer that steps when backward has reduced a gradient, which is freed at once; its norm is kept."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        self._squares = SquaredNorm(mesh)
        for parameter in parameters:
            if parameter.requires_grad:
                # FSDP2 and compute_copies.py call these hooks of the parameters when their gradients are there
                parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Tensor) -> None:
        partial_gradients.make_whole(parameter)
        assert parameter.grad is not None
        self._squares.add(parameter.grad)
        self._optimizer.step()  # of the one parameter that has a gradient now
        parameter.grad = None

    def norm(self) -> Tensor:
        """The norm of all gradients since it was asked for last (a collective)."""
        squares = self._squares
        self._squares = SquaredNorm(self._mesh)
        return squares.norm()
