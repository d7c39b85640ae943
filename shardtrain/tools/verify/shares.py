"""Gradients of parts of a batch, on one process in plain PyTorch.

A rank whose reduction is missing has such a gradient, so these parts test hypotheses about a fault. The full
batch runs forward and backward once. The inputs of each module with parameters and the gradients of its
outputs then determine the gradient from any rows and positions. A part is exact up to rounding, and cheap to
compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.data.batch import Batch
from shardtrain.ops.targets import IGNORE


class Shares:
    """One forward and backward pass over all rows of a step."""

    def __init__(
        self, model: nn.Module, batch: Batch, factor: float = 1.0, balance: float = 1.0
    ) -> None:
        """Run the passes.

        ``factor`` multiplies all gradients, and ``balance`` multiplies the balance losses of experts.
        """
        self.model = model
        self.batch = batch
        self.factor = factor
        self.num_targets = batch.num_targets
        # Experts add the gradient of their balance loss in backward, with the weight that the
        # trainer sets in each step.
        for module in model.modules():
            if hasattr(module, "loss_weight"):
                module.loss_weight = torch.tensor(balance * factor / self.num_targets)
        # Calls of the modules that own a parameter, by the parameter's id: module, inputs, output.
        self._uses: dict[int, list[tuple[nn.Module, tuple[Any, ...], Tensor]]] = {}
        handles = []
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                handles.append(module.register_forward_hook(self._note))
        self.logits_BTV = model(batch.tokens_BT, batch.positions_BT)
        # Later calls of the modules compute parts, and must not be noted.
        for handle in handles:
            handle.remove()
        loss_sum = self.losses_BT(self.logits_BTV).sum()
        loss = loss_sum * factor / self.num_targets
        loss.backward()

    def _note(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        output.retain_grad()
        # Backpropagation of a part must end at the module, so detach its inputs.
        detached = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        for parameter in module.parameters(recurse=False):
            self._uses.setdefault(id(parameter), []).append((module, detached, output))

    def losses_BT(self, logits_BTV: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the loss of each token, with shape (B, T). It is zero for tokens without a target."""
        if targets_BT is None:
            targets_BT = self.batch.targets_BT
        flat_losses = F.cross_entropy(
            logits_BTV.flatten(0, 1).float(),
            targets_BT.flatten(),
            ignore_index=IGNORE,
            reduction="none",
        )
        return flat_losses.view_as(targets_BT)

    def gradient(
        self,
        name: str,
        rows: Sequence[int],
        positions: Sequence[int] | None = None,
    ) -> Tensor | None:
        """Return the part of a parameter's gradient from its use at some rows and positions
        (default: all positions).

        Return None if positions are given but the module mixes tokens.
        """
        parameter = self.model.get_parameter(name)
        uses = self._uses.get(id(parameter), [])
        batch_shape = self.batch.tokens_BT.shape
        is_per_token = bool(uses)
        for _, _, output in uses:
            if output.grad is None or output.shape[:2] != batch_shape:
                is_per_token = False
        if not is_per_token:
            if positions is not None:
                return None
            return self._gradient_of_rows(parameter, rows)
        # Backpropagate only the gradient of the chosen tokens through each use.
        total = torch.zeros_like(parameter)
        for module, inputs, output in uses:
            assert output.grad is not None
            chosen_T = torch.arange(output.size(1))
            if positions is not None:
                chosen_T = torch.as_tensor(list(positions))
            chosen_B = torch.as_tensor(list(rows))
            mask_BT = torch.zeros(output.shape[:2], dtype=torch.bool)
            mask_BT[chosen_B[:, None], chosen_T[None]] = True
            # Append dimensions of size 1 to broadcast the mask over the features.
            feature_dims = [1] * (output.ndim - 2)
            mask = mask_BT.view(*mask_BT.shape, *feature_dims)
            with torch.enable_grad():
                computed = module(*inputs)
                (part,) = torch.autograd.grad(
                    computed, [parameter], output.grad * mask, allow_unused=True
                )
            if part is not None:
                total += part
        return total

    def _gradient_of_rows(self, parameter: nn.Parameter, rows: Sequence[int]) -> Tensor:
        """Return the gradient of the loss of some rows from a separate pass, for modules that mix tokens.

        An expert, for example, receives the tokens of all rows in one tensor.
        """
        chosen = torch.as_tensor(list(rows))
        tokens_BT = self.batch.tokens_BT[chosen]
        positions_BT = self.batch.positions_BT[chosen]
        logits_BTV = self.model(tokens_BT, positions_BT)
        losses_BT = self.losses_BT(logits_BTV, self.batch.targets_BT[chosen])
        loss = losses_BT.sum() * self.factor / self.num_targets
        (gradient,) = torch.autograd.grad(loss, [parameter], allow_unused=True)
        if gradient is None:
            return torch.zeros_like(parameter)
        return gradient

    @torch.no_grad()
    def loss(self, positions_BT: Tensor | None = None) -> float:
        """Return the mean loss of the full batch, with other positions if given."""
        if positions_BT is None:
            positions_BT = self.batch.positions_BT
        logits_BTV = self.model(self.batch.tokens_BT, positions_BT)
        return float(self.losses_BT(logits_BTV).sum()) / self.num_targets

    @torch.no_grad()
    def loss_of_rows(self, rows: Sequence[int], target_rows: Sequence[int]) -> float:
        """Return the loss sum of the logits of some rows with the targets of other rows."""
        logits_BTV = self.logits_BTV.detach()[torch.as_tensor(list(rows))]
        targets_BT = self.batch.targets_BT[torch.as_tensor(list(target_rows))]
        return float(self.losses_BT(logits_BTV, targets_BT).sum())
