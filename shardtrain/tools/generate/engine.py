"""Generation loop: one pass over the prompts, then one pass per token until every row has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardtrain.layout import Layout
from shardtrain.ops.sampling import Draws, Sampling, choose, penalise_
from shardtrain.tools.generate.forward_passes import Cached, FullForward, Passes
from shardtrain.tools.generate.image_prompts import ImageInputs

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
        self,
        model: nn.Module,
        layout: Layout,
        vocab_size: int | None = None,
        use_cache: bool = True,
        width: int = 1,
    ) -> None:
        self._model = model
        self._layout = layout
        self._vocab_size = vocab_size
        self._width = width
        # Classes of transformers compute attention themselves.
        self._use_cache = use_cache and not hasattr(model, "hf")

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
        images: ImageInputs | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, including the ID of ``stop_ids`` that ended the row.

        Args:
            numbers: Row numbers, which determine the random draws together with the seed. 0, 1, 2, ... by
                default.
            images: Inputs of a network that reads images, for a single prompt.

        Raises:
            ValueError: a prompt has no token.
            NumericalError: the logits are not finite.
        """
        if not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt has no token")
        sampling = sampling or Sampling()
        penalty = sampling.repetition_penalty
        draws = Draws(seed, range(len(prompts)) if numbers is None else numbers)
        new: list[list[int]] = [[] for _ in prompts]
        if max_new_tokens <= 0:
            return new

        # Rows in the batch. "place" is an index into it, "row" one into the prompts.
        live = list(range(len(prompts)))
        passes_of_model: Passes
        if self._use_cache:
            passes_of_model = Cached(self._model, self._layout, self._width)
        else:
            passes_of_model = FullForward(self._model, self._layout, self._width, images)
        with passes_of_model as passes:
            # The first pass reads the prompts. Later passes read the newest token of each row.
            feed: Sequence[Sequence[int]] = prompts
            while live:
                logits_BV = passes.logits(feed, max_new_tokens)[:, : self._vocab_size]
                if penalty != 1:
                    earlier_tokens = [[*prompts[row], *new[row]] for row in live]
                    penalise_(logits_BV, earlier_tokens, penalty)
                uniforms = draws.next(live) if sampling.temperature else []
                going = []
                for place, token in enumerate(choose(logits_BV, sampling, uniforms)):
                    row = live[place]
                    new[row].append(token)
                    # Call back for every token, because the callback also prints.
                    has_ended = watch is not None and watch(row, new[row])
                    if not has_ended and token not in stop_ids and len(new[row]) < max_new_tokens:
                        going.append(place)

                # Remove ended rows from the batch.
                if going and len(going) < len(live):
                    passes.keep(going)
                live = [live[place] for place in going]
                feed = [new[row][-1:] for row in live]
        return new
