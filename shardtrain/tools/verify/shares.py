"""Gradients of shares of a batch, on one process and in plain PyTorch: what a rank has if a reduction is missing.

The forward and backward pass of the whole batch is done once; what each module that owns a parameter received and what
flowed back into it gives the gradient of any rows and positions, so a share is exact to rounding and cheap.
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
    """One forward and backward pass over all rows of a step; all gradients are multiplied by ``factor``.

    ``balance`` multiplies the balance losses of experts, of models that have them.
    """

    def __init__(self, model: nn.Module, batch: Batch, factor: float = 1.0, balance: float = 1.0) -> None:
        self.model = model
        self.batch = batch
        self.factor = factor
        self.num_targets = batch.num_targets
        # Experts add the gradient of their balance loss in backward, at the weight that the trainer sets each step.
        for module in model.modules():
            if hasattr(module, "loss_weight"):
                module.loss_weight = torch.tensor(balance * factor / self.num_targets)
        self._uses: dict[int, list[tuple[nn.Module, tuple[Any, ...], Tensor]]] = {}
        handles = [
            module.register_forward_hook(self._note)
            for module in model.modules()
            if any(True for _ in module.parameters(recurse=False))
        ]
        self.logits_BTV = model(batch.tokens_BT, batch.positions_BT)
        for handle in handles:
            handle.remove()
        (self.losses_BT(self.logits_BTV).sum() * factor / self.num_targets).backward()

    def _note(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        output.retain_grad()
        detached = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        for parameter in module.parameters(recurse=False):
            self._uses.setdefault(id(parameter), []).append((module, detached, output))

    def losses_BT(self, logits_BTV: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Loss of each token, (B, T); zero where there is no target."""
        targets_BT = self.batch.targets_BT if targets_BT is None else targets_BT
        flat = F.cross_entropy(
            logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORE, reduction="none"
        )
        return flat.view_as(targets_BT)

    def gradient(self, name: str, rows: Sequence[int], positions: Sequence[int] | None = None) -> Tensor | None:
        """The part of a parameter's gradient that comes from its use at some rows and positions (all unless given).

        None where the module that owns it is not applied token by token.
        """
        parameter = self.model.get_parameter(name)
        total = torch.zeros_like(parameter)
        uses = self._uses.get(id(parameter))
        if not uses:
            return self._gradient_of_rows(parameter, rows) if positions is None else None
        for module, inputs, output in uses:
            if output.grad is None or output.shape[:2] != self.batch.tokens_BT.shape:
                return self._gradient_of_rows(parameter, rows) if positions is None else None
            mask_BT = torch.zeros(output.shape[:2], dtype=torch.bool)
            chosen = torch.as_tensor(list(range(output.size(1)) if positions is None else positions))
            mask_BT[torch.as_tensor(list(rows))[:, None], chosen[None]] = True
            kept = output.grad * mask_BT.view(*mask_BT.shape, *[1] * (output.ndim - 2))
            with torch.enable_grad():
                (part,) = torch.autograd.grad(module(*inputs), [parameter], kept, allow_unused=True)
            total += part if part is not None else 0
        return total

    def _gradient_of_rows(self, parameter: nn.Parameter, rows: Sequence[int]) -> Tensor:
        """The gradient of the loss of some rows: a pass of their own, for modules such as experts that mix tokens."""
        chosen = torch.as_tensor(list(rows))
        logits_BTV = self.model(self.batch.tokens_BT[chosen], self.batch.positions_BT[chosen])
        loss = self.losses_BT(logits_BTV, self.batch.targets_BT[chosen]).sum() * self.factor / self.num_targets
        (part,) = torch.autograd.grad(loss, [parameter], allow_unused=True)
        return part if part is not None else torch.zeros_like(parameter)

    @torch.no_grad()
    def loss(self, positions_BT: Tensor | None = None) -> float:
        """Mean loss of the whole batch, with other positions if given."""
        positions_BT = self.batch.positions_BT if positions_BT is None else positions_BT
        logits_BTV = self.model(self.batch.tokens_BT, positions_BT)
        return float(self.losses_BT(logits_BTV).sum()) / self.num_targets

    @torch.no_grad()
    def loss_of_rows(self, rows: Sequence[int], target_rows: Sequence[int]) -> float:
        """Loss sum of some rows' logits against other rows' targets."""
        logits_bTV = self.logits_BTV.detach()[torch.as_tensor(list(rows))]
        return float(self.losses_BT(logits_bTV, self.batch.targets_BT[torch.as_tensor(list(target_rows))]).sum())
