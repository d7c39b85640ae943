"""Synthetic batches as a function of (seed, step).

Targets are distributed unevenly, so a wrong divisor changes the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardtrain.data.batch import Batch
from shardtrain.ops.seeding import seed_of
from shardtrain.ops.targets import IGNORE

_KEPT = (0.95, 0.2, 0.6, 0.35, 0.8, 0.1, 0.5, 0.7)
"""Fraction of tokens with a target, by row. Rows of chats with masked prompts differ by similar amounts."""


def whole_batch(seed: int, step: int, sequences: int, tokens: int, vocabulary: int) -> Batch:
    """Return all rows of a step, with shape (sequences, tokens).

    Later tokens are less likely to have a target, but each row has at least one target. Tokens without a
    target have ``IGNORE`` instead.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, step))
    ids = torch.randint(0, vocabulary, (sequences, tokens + 1), generator=generator)
    shares = [_KEPT[row % len(_KEPT)] for row in range(sequences)]
    kept_by_row = torch.tensor(shares)[:, None]
    kept_by_position = torch.linspace(1.0, 0.4, tokens)[None]
    has_target = torch.rand(sequences, tokens, generator=generator) < kept_by_row * kept_by_position
    # Each part of a step is divided by its number of targets, so each row needs at least one.
    rows = torch.arange(sequences)
    has_target[rows, rows % tokens] = True
    targets = torch.where(has_target, ids[:, 1:], IGNORE)
    positions = torch.arange(tokens).expand(sequences, tokens).contiguous()
    inputs = ids[:, :-1].contiguous()
    return Batch(inputs, targets, positions, rows)


class SyntheticStream:
    """Endless micro-batches of one data rank. Replaces ``data.DataLoader``."""

    has_unknown_end = False
    num_readers = 0
    step_hash = 0

    def __init__(
        self,
        seed: int,
        tokens: int,
        vocabulary: int,
        global_batch: int,
        local_batch: int,
        rank: int,
        ranks: int,
    ) -> None:
        self.global_batch = global_batch
        rows = global_batch // ranks
        self.accumulation = rows // local_batch
        self._num_yielded = 0
        self._shape = (seed, tokens, vocabulary)
        self._local = local_batch
        self._first = rank * rows
        self._rows = rows
        self._batches = self._generate()

    @property
    def samples_consumed(self) -> int:
        """Number of rows in all completed steps, over all ranks."""
        return self._num_yielded // self.accumulation * self.global_batch

    def __next__(self) -> Batch:
        """Return the next micro-batch of this rank, which has ``local_batch`` rows."""
        self._num_yielded += 1
        return next(self._batches)

    def _generate(self) -> Iterator[Batch]:
        seed, tokens, vocabulary = self._shape
        step = 0
        while True:
            batch = whole_batch(seed, step, self.global_batch, tokens, vocabulary)
            for start in range(self._first, self._first + self._rows, self._local):
                rows = slice(start, start + self._local)
                yield Batch(
                    batch.tokens_BT[rows],
                    batch.targets_BT[rows],
                    batch.positions_BT[rows],
                    batch.sample_ids_B[rows],
                )
            step += 1
