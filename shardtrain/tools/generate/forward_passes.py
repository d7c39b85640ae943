"""Forward passes that return only the logits after each row's last token.

Tensor parallelism splits the sequence between layers, so a pass has a multiple of ``width`` tokens. Padding
follows the last token: causal attention cannot see it, and the cache overwrites it in the next pass. Shape
suffixes: B rows, T tokens of this pass, D model dimension, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardtrain.layout import Layout
from shardtrain.tools.generate.cache import Cache, installed
from shardtrain.tools.generate.image_prompts import ImageInputs

Rows = Sequence[Sequence[int]]


class Passes(ABC):
    """Incremental passes over growing rows. Use as a context manager, which restores the model on exit."""

    def __init__(self, model: nn.Module, layout: Layout, width: int = 1) -> None:
        self._model = model
        self._layout = layout
        self._width = width
        self._device = next(model.parameters()).device
        self._last_B: Tensor | int = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        # Compute the head only for last tokens. For all tokens it may cost more than the rest of the model.
        head = self._model.get_submodule(self._layout.last[-1])
        self._stack.callback(head.register_forward_pre_hook(self._select, prepend=True).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @abstractmethod
    def logits(self, rows: Rows, max_new_tokens: int) -> Tensor:
        """Append tokens to each row and return the logits (B, V) after its last token.

        The first call passes the prompts, later calls one token per row. ``max_new_tokens`` is the maximum
        number of later calls.
        """

    @abstractmethod
    def keep(self, places: Sequence[int]) -> None:
        """Keep only the rows at these indices of the batch."""

    def _run(self, rows: Rows, starts: Sequence[int]) -> Tensor:
        """Run one pass over rows of different lengths. ``starts`` are the positions of their first tokens."""
        lengths = [len(row) for row in rows]
        longest = max(lengths)
        # Tensor-parallel ranks split the sequence evenly.
        T = math.ceil(longest / self._width) * self._width
        padded_rows = [[*row, *[0] * (T - len(row))] for row in rows]
        tokens_BT = torch.tensor(padded_rows, device=self._device)
        starts_B1 = torch.tensor(starts, device=self._device)[:, None]
        positions_BT = starts_B1 + torch.arange(T, device=self._device)
        if min(lengths) == longest:
            self._last_B = longest - 1
        else:
            self._last_B = torch.tensor(lengths, device=self._device) - 1
        logits_BTV: Tensor = self._model(tokens_BT, positions_BT, **self._image_arguments(T))
        # A head tied to the embedding is not a separate module, so the hook did not run and all tokens
        # have logits.
        if logits_BTV.size(1) > 1:
            logits_BTV = self._at_last(logits_BTV)
        return logits_BTV[:, 0]

    def _image_arguments(self, T: int) -> dict[str, Any]:
        """Return further arguments of the model for a pass over T tokens."""
        return {}

    def _select(self, head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Reduce the head's input to each row's last token, (B, 1, D)."""
        x_BTD = inputs[0]
        weight = getattr(head, "weight", None)
        # With sequence parallelism this rank has its part of the sequence, as a plain tensor or a DTensor.
        # Gather the full sequence, because any rank may have a row's last token.
        if isinstance(weight, DTensor) and not isinstance(x_BTD, DTensor):
            mesh = weight.device_mesh
            if mesh.ndim > 1:
                mesh = mesh["tp"]
            x_BTD = DTensor.from_local(x_BTD, mesh, (Shard(1),), run_check=False)
        if not isinstance(x_BTD, DTensor):
            return (self._at_last(x_BTD), *inputs[1:])
        mesh = x_BTD.device_mesh
        replicated = (Replicate(),)
        last_B1D = self._at_last(x_BTD.redistribute(placements=replicated).to_local())
        return (DTensor.from_local(last_B1D, mesh, replicated, run_check=False),)

    def _at_last(self, x_BTD: Tensor) -> Tensor:
        # Copy. For a view with other strides PyTorch runs a batched product, which copies the head's weight
        # for each row. contiguous() would keep the strides of a single row.
        if isinstance(self._last_B, int):
            last_B1D = x_BTD[:, self._last_B : self._last_B + 1]
            return last_B1D.clone(memory_format=torch.contiguous_format)
        row_B = torch.arange(len(x_BTD), device=x_BTD.device)
        last_BD = x_BTD[row_B, self._last_B]
        return last_BD[:, None]


class Cached(Passes):
    """Passes with a key-value cache: each token is read once."""

    def __enter__(self) -> Self:
        self._cache: Cache = self._stack.enter_context(installed(self._model, self._layout))
        self._next: list[int] = []
        return super().__enter__()

    def logits(self, rows: Rows, max_new_tokens: int) -> Tensor:
        # The first call has the prompts. ``_next`` are the positions of the tokens of the next call.
        if not self._next:
            self._next = [len(row) for row in rows]
            limit = max(self._next) + max_new_tokens + self._width
            self._cache.begin(self._next, limit, self._device)
            logits_BV = self._run(rows, [0] * len(rows))
            self._cache.prompts_read()
            return logits_BV
        logits_BV = self._run(rows, self._next)
        self._cache.advance()
        self._next = [place + 1 for place in self._next]
        return logits_BV

    def keep(self, places: Sequence[int]) -> None:
        self._cache.keep(places)
        self._next = [self._next[place] for place in places]


class FullForward(Passes):
    """Passes without a cache: each pass reads the full rows with the model's own attention.

    ``images`` are further inputs of a network that reads images, for a single row.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, width: int = 1, images: ImageInputs | None = None
    ) -> None:
        super().__init__(model, layout, width)
        self._images = images

    def __enter__(self) -> Self:
        self._rows: list[list[int]] = []
        return super().__enter__()

    def logits(self, rows: Rows, max_new_tokens: int) -> Tensor:
        # The first call has the prompts, and later calls have one more token per row.
        if not self._rows:
            self._rows = [list(row) for row in rows]
        else:
            for row, new in zip(self._rows, rows, strict=True):
                row.extend(new)
        return self._run(self._rows, [0] * len(rows))

    def _image_arguments(self, T: int) -> dict[str, Any]:
        if self._images is None:
            return {}
        dtype = next(self._model.parameters()).dtype
        return {"images": self._images.of_length(T, dtype, self._device)}

    def keep(self, places: Sequence[int]) -> None:
        self._rows = [self._rows[place] for place in places]
