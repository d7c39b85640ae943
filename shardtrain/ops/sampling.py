"""Selection of the next token: the most likely one (greedy), or a random draw with temperature, top-k and top-p.

Each row has its own random stream, seeded by the seed and the row's number, and draws one number per
token. The text of a row therefore does not depend on the other rows of its batch or on the device. Shape
suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardtrain.ops.accelerator import sum_dtype
from shardtrain.utils.errors import NumericalError

_FEW = 1024
"""Number of most likely tokens that nearly always sum to top_p.

Sorting 128,256 tokens takes 10 ms per row on a CPU.
"""


@dataclass(frozen=True)
class Sampling:
    """Transformations of the logits, applied in the order of the fields. The default is greedy.

    Attributes:
        repetition_penalty: Divides the logits of tokens that the row already contains. Negative logits are
            multiplied by it instead (Keskar et al. 2019).
        temperature: Divides the logits. 0 selects the most likely token.
        top_k: Draw from this number of most likely tokens. 0 for all tokens.
        top_p: Draw from the smallest set of most likely tokens with at least this probability (Holtzman
            et al. 2020).
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class Draws:
    """A stream of uniform random numbers per row."""

    def __init__(self, seed: int, numbers: Sequence[int]) -> None:
        self._streams = [np.random.default_rng((seed, number)) for number in numbers]

    def next(self, rows: Sequence[int]) -> list[float]:
        """Return the next number in [0, 1) for each of these rows."""
        return [self._streams[row].random() for row in rows]


def choose(logits_BV: Tensor, sampling: Sampling, uniforms: Sequence[float]) -> list[int]:
    """Return the next token of each row. ``uniforms`` has one number in [0, 1) per row.

    Raises:
        NumericalError: logits that affect the result are not finite.
    """
    if sampling.temperature == 0:
        best_B = logits_BV.max(-1)
        _require_finite(best_B.values)
        return best_B.indices.tolist()  # type: ignore[no-any-return]
    logits_BV = logits_BV.float()
    if sum_dtype(logits_BV.device) != torch.float64:
        # The cumulative sums below need float64.
        logits_BV = logits_BV.cpu()
    scores_BV = logits_BV / sampling.temperature
    ids_BV = None
    if sampling.top_k:
        scores_BV, ids_BV = scores_BV.topk(min(sampling.top_k, scores_BV.size(-1)), dim=-1)
    shares_BV = scores_BV.softmax(-1)
    if sampling.top_p < 1 and ids_BV is None:
        few_BV, ids_BV = shares_BV.topk(min(_FEW, shares_BV.size(-1)), dim=-1)
        if not bool((few_BV.double().sum(-1) >= sampling.top_p).all()):
            # Sort all tokens, separately for each row. topk and sort may order equal probabilities
            # differently, and the other rows must not determine which of the two a row uses.
            if len(logits_BV) > 1:
                rows = zip(logits_BV.split(1), uniforms, strict=True)
                return [choose(logits_1V, sampling, [uniform])[0] for logits_1V, uniform in rows]
            few_BV, ids_BV = shares_BV.sort(dim=-1, descending=True)
        shares_BV = few_BV

    # Use float64, because the cumulative sum of a large vocabulary must resolve the least likely tokens.
    shares_BV = shares_BV.double()
    if sampling.top_p < 1:
        # Keep a token if the tokens before it sum to less than top_p. The first token is always kept.
        before_BV = shares_BV.cumsum(-1) - shares_BV
        shares_BV = shares_BV.masked_fill(before_BV >= sampling.top_p, 0.0)

    # Inverse transform sampling: select the first token whose cumulative sum exceeds the row's number
    # times the total.
    upto_BV = shares_BV.cumsum(-1)
    total_B1 = upto_BV[:, -1:]
    _require_finite(total_B1)
    drawn_B1 = (
        torch.tensor(uniforms, dtype=torch.float64, device=total_B1.device)[:, None] * total_B1
    )
    place_B1 = torch.searchsorted(upto_BV, drawn_B1, right=True)
    # By rounding, a number close to 1 may fall behind the last token with a positive probability.
    place_B1 = torch.minimum(place_B1, (upto_BV < total_B1).sum(-1, keepdim=True))
    chosen_B1 = place_B1 if ids_BV is None else ids_BV.gather(-1, place_B1)
    return chosen_B1[:, 0].tolist()  # type: ignore[no-any-return]


def penalise_(logits_BV: Tensor, ids_of_rows: Sequence[Sequence[int]], penalty: float) -> None:
    """Apply a repetition penalty to the tokens that each row already contains, in place."""
    for logits_V, ids in zip(logits_BV, ids_of_rows, strict=True):
        known_ids = {token for token in ids if token < len(logits_V)}
        index = torch.tensor(sorted(known_ids), device=logits_V.device)
        logits = logits_V[index]
        logits_V[index] = torch.where(logits > 0, logits / penalty, logits * penalty)


def _require_finite(values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise NumericalError(
            "the model's logits are not finite: its weights are damaged or exceed the range of --dtype; "
            "try --dtype float32"
        )
