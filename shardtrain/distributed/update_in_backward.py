"""Update each parameter in backward, as soon as its gradient is complete, so that few gradients exist at
a time.

Options that change all gradients or skip an update are not supported with this, see
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
    """Hooks that step the optimizer for each parameter in backward and free its gradient.

    They record the norm.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], mesh: Mesh
    ) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        self._squares = SquaredNorm(mesh)
        for parameter in parameters:
            if parameter.requires_grad:
                # FSDP2 and compute_copies.py call these hooks when the gradient is reduced.
                parameter.register_post_accumulate_grad_hook(self._update)

    def _update(self, parameter: Tensor) -> None:
        partial_gradients.make_whole(parameter)
        assert parameter.grad is not None
        self._squares.add(parameter.grad)
        self._optimizer.step()  # only this parameter has a gradient now
        parameter.grad = None

    def norm(self) -> Tensor:
        """Return the norm of all gradients since the last call (a collective)."""
        squares = self._squares
        self._squares = SquaredNorm(self._mesh)
        return squares.norm()
