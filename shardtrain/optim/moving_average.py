"""Exponential moving average (EMA) of the trained weights, in float32.

After each update, average = d * average + (1 - d) * weight with d = ``training.ema_decay``, as in
``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn(d)``. Each rank averages its own shards, so
an average needs no communication. Frozen parameters have no average: they equal it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from shardtrain.ops.dtensor import local_tensor


class MovingAverage:
    """Averages of a rank's trained parameters.

    Attributes:
        averages: Parameter name -> average, with the placements of the parameter.
    """

    def __init__(self, parameters: Mapping[str, Parameter], decay: float) -> None:
        """Start with the current weights. ``decay`` is d, above 0 and below 1."""
        self._decay = decay
        self._parameters: dict[str, Parameter] = {}
        self.averages: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            # Frozen parameters equal their average.
            if parameter.requires_grad:
                self._parameters[name] = parameter
                self.averages[name] = parameter.detach().to(torch.float32, copy=True)

    @torch.no_grad()
    def restart(self) -> None:
        """Start again with the current weights, for example after a checkpoint was loaded."""
        for name, parameter in self._parameters.items():
            local_tensor(self.averages[name]).copy_(local_tensor(parameter))

    @torch.no_grad()
    def update(self, applies: Tensor | None = None) -> None:
        """Add the weights after an update.

        Args:
            applies: A boolean scalar on the device. If it is False, the update was skipped, and the averages do
                not change. The host does not read it.
        """
        # lerp_ multiplies the average by 1 - share.
        share: float | Tensor = 1 - self._decay
        if applies is not None:
            share = torch.where(applies, share, 0.0)
        for name, parameter in self._parameters.items():
            weight = local_tensor(parameter).to(torch.float32)
            local_tensor(self.averages[name]).lerp_(weight, share)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Replace the weights by their averages inside the block.

        The block must not train. It needs memory for a copy of this rank's weights.
        """
        # ``restored`` keeps the weights, also if the block fails.
        with restored(self._parameters):
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    local_tensor(parameter).copy_(local_tensor(self.averages[name]))
            yield


@contextmanager
def restored(parameters: Mapping[str, Parameter]) -> Iterator[dict[str, Tensor]]:
    """Restore the weights after the block. Yield copies of them."""
    weights: dict[str, Tensor] = {}
    try:
        for name, parameter in parameters.items():
            weights[name] = parameter.detach().clone()
        yield weights
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                local_tensor(parameters[name]).copy_(local_tensor(weight))
