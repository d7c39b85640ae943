"""How the next token is chosen: the likeliest, or one drawn from the likeliest.

A row draws from a stream of its own, keyed by the seed and the row's number, and one number per token. So what a row
becomes depends neither on the rows beside it nor on the device. Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardtrain.utils.errors import NumericalError

_FEW = 1024
"""Of the likeliest tokens, which nearly always have top_p together: sorting all 128,256 takes 10 ms a row on a CPU."""


@dataclass(frozen=True)
class Sampling:
    """What is applied to the logits, in the order of the fields; the defaults choose the likeliest token."""

    repetition_penalty: float = 1.0
    """Logits of tokens that the row has already are divided by it, or multiplied where below 0 (Keskar et al. 2019)."""
    temperature: float = 0.0
    """Logits are divided by it; 0 chooses the likeliest token."""
    top_k: int = 0
    """Draw from so many of the likeliest; 0 from all."""
    top_p: float = 1.0
    """Draw from the likeliest that together have this probability (Holtzman et al. 2020)."""


class Draws:
    """One stream of uniform numbers per row."""

    def __init__(self, seed: int, numbers: Sequence[int]) -> None:
        self._streams = [np.random.default_rng((seed, number)) for number in numbers]

    def next(self, rows: Sequence[int]) -> list[float]:
        """The next number of each of these rows, 0 <= u < 1."""
        return [self._streams[row].random() for row in rows]


def choose(logits_BV: Tensor, sampling: Sampling, uniforms: Sequence[float]) -> list[int]:
    """The next token of each row.

    Raises:
        NumericalError: when a row's logits are not finite where it matters.
    """
    if sampling.temperature == 0:
        best_B = logits_BV.max(-1)
        _require_finite(best_B.values)
        return best_B.indices.tolist()  # type: ignore[no-any-return]
    scores_BV = logits_BV.float() / sampling.temperature
    ids_BV = None
    if sampling.top_k:
        scores_BV, ids_BV = scores_BV.topk(min(sampling.top_k, scores_BV.size(-1)), dim=-1)
    shares_BV = scores_BV.softmax(-1)
    if sampling.top_p < 1 and ids_BV is None:
        few_BV, ids_BV = shares_BV.topk(min(_FEW, shares_BV.size(-1)), dim=-1)
        if not bool((few_BV.double().sum(-1) >= sampling.top_p).all()):
            # All are sorted, for each row by itself: two ways may order equal shares differently, and what stands
            # beside a row must not decide which is taken
            if len(logits_BV) > 1:
                rows = zip(logits_BV.split(1), uniforms, strict=True)
                return [choose(logits_1V, sampling, [uniform])[0] for logits_1V, uniform in rows]
            few_BV, ids_BV = shares_BV.sort(dim=-1, descending=True)
        shares_BV = few_BV

    # In float64, so that the running sum of a large vocabulary keeps the last tokens' shares apart
    shares_BV = shares_BV.double()
    if sampling.top_p < 1:
        # A token stays if those before it have less than top_p together: the first one always does
        before_BV = shares_BV.cumsum(-1) - shares_BV
        shares_BV = shares_BV.masked_fill(before_BV >= sampling.top_p, 0.0)

    # Inverse transform sampling: the first token whose running sum is above the row's number times the sum of all
    upto_BV = shares_BV.cumsum(-1)
    total_B1 = upto_BV[:, -1:]
    _require_finite(total_B1)
    drawn_B1 = torch.tensor(uniforms, dtype=torch.float64, device=total_B1.device)[:, None] * total_B1
    place_B1 = torch.searchsorted(upto_BV, drawn_B1, right=True)
    # Rounding may put a number at the very end past the last token that can be drawn
    place_B1 = torch.minimum(place_B1, (upto_BV < total_B1).sum(-1, keepdim=True))
    chosen_B1 = place_B1 if ids_BV is None else ids_BV.gather(-1, place_B1)
    return chosen_B1[:, 0].tolist()  # type: ignore[no-any-return]


def penalise_(logits_BV: Tensor, ids_of_rows: Sequence[Sequence[int]], penalty: float) -> None:
    """Make tokens that a row has already less likely, in place."""
    for logits_V, ids in zip(logits_BV, ids_of_rows, strict=True):
        index = torch.tensor(sorted({i for i in ids if i < len(logits_V)}), device=logits_V.device)
        found = logits_V[index]
        logits_V[index] = torch.where(found > 0, found / penalty, found * penalty)


def _require_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise NumericalError(
            "the model's logits are not finite: its weights are broken, or too large for --dtype; try --dtype float32"
        )
