"""Generation loop: one pass over the prompts, then one pass per token until every row has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardtrain.layout import Layout
from shardtrain.ops.sampling import Draws, Sampling, choose, penalise_
from shardtrain.tools.generate.forward_passes import Cached, FullForward, Passes

Watch = Callable[[int, list[int]], bool]
"""Callback after each new token, with the row and its new tokens. Returns True if the row has ended."""


class Generator:
    """Generates continuations of rows of tokens.

    Args:
        vocab_size: Number of token IDs of the tokenizer, if the model has more. Other IDs are never chosen.
        use_cache: Keep keys and values. Otherwise each new token costs a pass over the row. This supports any
            attention, such as ``transformers`` classes, and tests compare the cache with it.
        width: Number of tensor-parallel ranks.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, vocab_size: int | None = None, use_cache: bool = True, width: int = 1
    ) -> None:
        self._model = model
        self._layout = layout
        self._vocab_size = vocab_size
        self._width = width
        self._use_cache = use_cache and not hasattr(model, "hf")  # transformers computes attention itself

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
        stop_ids: frozenset[int] = frozenset(),
        watch: Watch | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, including the ID of ``stop_ids`` that ended the row.

        Args:
            numbers: Row numbers, which determine the random draws together with the seed. 0, 1, 2, ... by default.

        Raises:
            ValueError: a prompt has no token.
            NumericalError: the logits are not finite.
        """
        if not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt has no token")
        sampling = sampling or Sampling()
        draws = Draws(seed, range(len(prompts)) if numbers is None else numbers)
        new: list[list[int]] = [[] for _ in prompts]
        live = list(range(len(prompts))) if max_new_tokens > 0 else []
        reader: type[Passes] = Cached if self._use_cache else FullForward
        with reader(self._model, self._layout, self._width) as passes:
            # The first pass reads the prompts. Later passes read the newest token of each row.
            feed: Sequence[Sequence[int]] = prompts
            while live:
                logits_BV = passes.logits(feed, max_new_tokens)[:, : self._vocab_size]
                if sampling.repetition_penalty != 1:
                    penalise_(logits_BV, [[*prompts[row], *new[row]] for row in live], sampling.repetition_penalty)
                uniforms = draws.next(live) if sampling.temperature else []
                for row, token in zip(live, choose(logits_BV, sampling, uniforms), strict=True):
                    new[row].append(token)
                ended = {row for row in live if new[row][-1] in stop_ids or len(new[row]) >= max_new_tokens}
                ended |= {row for row in live if watch is not None and watch(row, new[row])}

                # Remove ended rows from the batch. "place" is an index into the batch, "row" one into the prompts.
                going = [place for place, row in enumerate(live) if row not in ended]
                if going and len(going) < len(live):
                    passes.keep(going)
                live = [live[place] for place in going]
                feed = [new[row][-1:] for row in live]
        return new
