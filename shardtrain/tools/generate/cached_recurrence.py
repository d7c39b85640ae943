"""Recurrence core that keeps the state of each row. A pass for a new token then processes only this token.

Shape suffixes: B rows, T tokens of this pass, X features, w tokens that the core looks back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.ops.gated_delta_net import last_tokens


class CachedRecurrence(nn.Module):
    """Core that ``LAYOUT.recurrence`` names, with a state per row.

    Attributes:
        lengths: Returns the prompt length of each row during the prompt pass, and nothing afterwards.
    """

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.core = core
        self.lengths: Any = list
        self._state: Tensor | None = None
        self._before_BwX: Tensor | None = None

    def forward(
        self,
        inputs: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the outputs of new tokens, (B, T, ...).

        Only a row's own tokens change its state, not padding.
        """
        if self.lengths():
            return self._read_prompts(inputs, weights)
        # Later passes have one token per row. Under tensor parallelism padding follows it.
        assert self._before_BwX is not None, "prompts come first"
        tokens = inputs[0].size(1)
        first = tuple(x[:, :1] for x in inputs)
        out, self._state = self.core.chunk(first, weights, self._before_BwX, None).run(self._state)
        self._before_BwX = torch.cat((self._before_BwX, first[0]), dim=1)[:, 1:]
        return _pad_tokens(out, tokens)

    def clear(self) -> None:
        """Forget all rows."""
        self._state = self._before_BwX = None

    def keep(self, index: Tensor) -> None:
        """Keep only the states of these rows."""
        if self._state is not None and self._before_BwX is not None:
            self._state = self._state[index]
            self._before_BwX = self._before_BwX[index]

    def _read_prompts(self, inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
        """Run right-padded prompts. Rows of equal length run together."""
        tokens = inputs[0].size(1)
        look_back = self.core.look_back(weights)
        rows_by_length: dict[int, list[int]] = {}
        for row, length in enumerate(self.lengths()):
            rows_by_length.setdefault(length, []).append(row)

        outputs, states, befores = [], [], []
        order: list[int] = []
        for length, rows in rows_by_length.items():
            prompt_inputs = tuple(x[rows, :length] for x in inputs)
            before = last_tokens(prompt_inputs[0][:, :0], look_back)
            out, state = self.core.chunk(prompt_inputs, weights, before, None).run()
            outputs.append(_pad_tokens(out, tokens))
            states.append(state)
            befores.append(last_tokens(prompt_inputs[0], look_back))
            order += rows
        # back to the order of the batch
        place = torch.tensor(order, device=inputs[0].device).argsort()
        self._state = torch.cat(states)[place]
        self._before_BwX = torch.cat(befores)[place]
        return torch.cat(outputs)[place]


def _pad_tokens(out: Tensor, tokens: int) -> Tensor:
    """Append zeros for the padding after the tokens of (B, T, N, V)."""
    return F.pad(out, (0, 0, 0, 0, 0, tokens - out.size(1)))
