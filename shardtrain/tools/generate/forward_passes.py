"""Passes of a model over rows of tokens, of which only the logits after each row's last token are wanted.

Under tensor parallelism the model splits the sequence between its layers, so a pass has a multiple of ``width`` tokens:
what follows the last real one is filled up; causal attention cannot see it, and the cache writes over it next time.
Shape suffixes: B rows, T tokens of this pass, D model, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardtrain.layout import Layout
from shardtrain.tools.generate.cache import Cache, installed

Rows = Sequence[Sequence[int]]


class Passes(ABC):
    """Reads rows bit by bit; a context manager that leaves the model as it was."""

    def __init__(self, model: nn.Module, layout: Layout, width: int = 1) -> None:
        self._model = model
        self._layout = layout
        self._width = width
        self._device = next(model.parameters()).device
        self._last_B: Tensor | int = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # the head is computed for the last tokens alone: with all it may cost more than the rest of the model
        head = self._model.get_submodule(self._layout.last[-1])
        self._stack.callback(head.register_forward_pre_hook(self._select, prepend=True).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @abstractmethod
    def logits(self, rows: Rows, max_new_tokens: int) -> Tensor:
        """Logits (B, V) after what was read so far and these tokens of each row: first the prompts, then one each.

        ``max_new_tokens`` bounds how many passes may follow the prompts.
        """

    @abstractmethod
    def keep(self, places: Sequence[int]) -> None:
        """Continue with some of the rows."""

    def _run(self, rows: Rows, starts: Sequence[int]) -> Tensor:
        """One pass: rows of several lengths, the first token of each at position ``starts``."""
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        T = -(-longest // self._width) * self._width  # a multiple of the ranks that share the sequence
        tokens_BT = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=self._device)
        positions_BT = torch.tensor(starts, device=self._device)[:, None] + torch.arange(T, device=self._device)
        same = min(lengths) == longest
        self._last_B = longest - 1 if same else torch.tensor(lengths, device=self._device) - 1
        logits_BTV: Tensor = self._model(tokens_BT, positions_BT)
        # a head that is also the embedding is not a module of its own: then all tokens have logits
        return (logits_BTV if logits_BTV.size(1) == 1 else self._at_last(logits_BTV))[:, 0]

    def _select(self, head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of what goes into the head, each row's last token: (B, 1, D)."""
        x_BTD = inputs[0]
        weight = getattr(head, "weight", None)
        # With sequence parallelism this rank has its part of the sequence, as a plain tensor or a DTensor. The whole of
        # it is gathered, since a row's last token may lie with any rank.
        if isinstance(weight, DTensor) and not isinstance(x_BTD, DTensor):
            mesh = weight.device_mesh
            x_BTD = DTensor.from_local(x_BTD, mesh["tp"] if mesh.ndim > 1 else mesh, (Shard(1),), run_check=False)
        if isinstance(x_BTD, DTensor):
            x_BTD = x_BTD.redistribute(placements=(Replicate(),))
            whole = x_BTD.to_local()
            return (DTensor.from_local(self._at_last(whole), x_BTD.device_mesh, (Replicate(),), run_check=False),)
        return (self._at_last(x_BTD), *inputs[1:])

    def _at_last(self, x_BTD: Tensor) -> Tensor:
        # A tensor of its own: of a view with other strides PyTorch makes a batched product, for which it copies the
        # whole weight of the head for each row. contiguous() would keep the strides of a single row
        if isinstance(self._last_B, int):
            last_B1D = x_BTD[:, self._last_B : self._last_B + 1]
            return last_B1D.clone(memory_format=torch.contiguous_format)
        return x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), self._last_B][:, None]


class Cached(Passes):
    """Reads each token once, and remembers its keys and values."""

    def __enter__(self) -> Self:
        self._cache: Cache = self._stack.enter_context(installed(self._model, self._layout))
        self._next: list[int] = []
        return super().__enter__()

    def logits(self, rows: Rows, max_new_tokens: int) -> Tensor:
        if not self._next:
            self._next = [len(row) for row in rows]
            self._cache.begin(self._next, max(self._next) + max_new_tokens + self._width, self._device)
            found_BV = self._run(rows, [0] * len(rows))
            self._cache.prompts_read()
            return found_BV
        found_BV = self._run(rows, self._next)
        self._cache.advance()
        self._next = [place + 1 for place in self._next]
        return found_BV

    def keep(self, places: Sequence[int]) -> None:
        self._cache.keep(places)
        self._next = [self._next[place] for place in places]


class FullForward(Passes):
    """Reads everything again in every pass, through the model's own attention."""

    def __enter__(self) -> Self:
        self._rows: list[list[int]] = []
        return super().__enter__()

    def logits(self, rows: Rows, max_new_tokens: int) -> Tensor:
        self._rows = [[*old, *more] for old, more in zip(self._rows or [[] for _ in rows], rows, strict=True)]
        return self._run(self._rows, [0] * len(rows))

    def keep(self, places: Sequence[int]) -> None:
        self._rows = [self._rows[place] for place in places]
