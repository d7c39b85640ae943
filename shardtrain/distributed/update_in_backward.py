"""Update each parameter during backward, as soon as its gradient is complete.

This saves memory, because only few gradients exist at the same time.
It does not support options that need all gradients together or that may skip an update, see
config/rules/option_pairs.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardtrain.distributed import partial_gradients
from shardtrain.distributed.grad_clip import SquaredNorm
from shardtrain.distributed.mesh import Mesh


class UpdateInBackward:
    """Hooks that, for each parameter, add its gradient to the norm, step the optimizer, and free the gradient."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], mesh: Mesh
    ) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        self._squares = SquaredNorm(mesh)
        for parameter in parameters:
            if parameter.requires_grad:
                # FSDP2 and compute_copies.py call these hooks only after the gradient is reduced or cast.
                parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Tensor) -> None:
        partial_gradients.sum_over_ranks(parameter)
        assert parameter.grad is not None
        self._squares.add(parameter.grad)
        # This updates only one parameter, because no other has a gradient now.
        self._optimizer.step()
        parameter.grad = None

    def norm(self) -> Tensor:
        """Return the norm of all gradients since the last call (a collective)."""
        squares = self._squares
        self._squares = SquaredNorm(self._mesh)
        return squares.norm()
