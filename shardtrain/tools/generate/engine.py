"""From prompts to new tokens: one pass over the prompts, then one pass per token, until every row has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardtrain.layout import Layout
from shardtrain.ops.sampling import Draws, Sampling, choose, penalise_
from shardtrain.tools.generate.forward_passes import Cached, FullForward, Passes

Watch = Callable[[int, list[int]], bool]
"""Told of a row and its new tokens after each; gives whether the row has ended."""


class Generator:
    """A model that continues rows of tokens.

    ``vocab_size`` is the number of ids that may be chosen: those that the tokenizer knows, where the model has rows for
    more. Without ``use_cache`` every token costs a pass over all before it: for attention that no cache can keep, such
    as that of a class of ``transformers``, and as the reference that the cache is held to. ``width`` is the number of
    tensor-parallel ranks.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, vocab_size: int | None = None, use_cache: bool = True, width: int = 1
    ) -> None:
        self._model = model
        self._layout = layout
        self._vocab_size = vocab_size
        self._width = width
        self._use_cache = use_cache and not hasattr(model, "hf")  # whose attention is inside the library's blocks

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
        """New tokens of each prompt; one of ``stop_ids``, with which a row ends, is the last of them.

        ``numbers`` are the numbers of the rows, which with the seed decide what is drawn; 0, 1, 2... unless given.

        Raises:
            ValueError: when a prompt has no token.
            NumericalError: when the logits are not finite.
        """
        if not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt has no token")
        sampling = sampling or Sampling()
        draws = Draws(seed, range(len(prompts)) if numbers is None else numbers)
        new: list[list[int]] = [[] for _ in prompts]
        live = list(range(len(prompts))) if max_new_tokens > 0 else []
        reader: type[Passes] = Cached if self._use_cache else FullForward
        with reader(self._model, self._layout, self._width) as passes:
            # the prompts first, then the token that each row was given last
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

                # Rows that have ended leave the batch; places are those within it, rows those of the caller.
                going = [place for place, row in enumerate(live) if row not in ended]
                if going and len(going) < len(live):
                    passes.keep(going)
                live = [live[place] for place in going]
                feed = [new[row][-1:] for row in live]
        return new
