"""Reward model: learn to score the chosen of two answers higher than the rejected one (Ouyang et al. 2022,
eq. 1).

The model's head has one output, evaluated at the last token of a prompt with an answer. The loss of a pair
is -log sigmoid(score of chosen - score of rejected - margin) (Bradley and Terry 1952), summed over pairs
and divided once by the pairs of the step. The margin is the number in the column ``margin``, 0 by default,
as in TRL (Touvron et al. 2023, section 3.2.2). Rows have the format of ``preference.py`` and are truncated
to seq_len.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.data.documents.columns import Unusable, find
from shardtrain.data.filler import filler_documents
from shardtrain.data.row_stream import RowBatch
from shardtrain.models.moe import has_experts
from shardtrain.tasks._answers import Pair, PairTask
from shardtrain.tasks.task import ShownText
from shardtrain.utils.units import real_number

METRICS = {"reward_accuracy": "max", "reward_margin": "max"}
DEGREES = ("tensor_parallel_degree",)


class RewardModel(PairTask):
    """The task ``reward_model``. Outputs are the scores (B, 2), the chosen answer first."""

    kind = "classification"
    num_labels = 1
    reads_last_token = True

    def collate(self, rows: list[Pair]) -> dict[str, Tensor]:
        """Return padded tokens (B, 2, T), lengths (B, 2), and margins (B,)."""
        texts = []
        for row in rows:
            texts += [row.chosen.all_tokens, row.rejected.all_tokens]
        longest = max(len(text) for text in texts)
        # Sequence parallelism splits rows evenly over the tensor-parallel ranks.
        T = -(-longest // self._length_multiple) * self._length_multiple
        tokens_RT = torch.zeros(len(texts), T, dtype=torch.int64)
        for number, text in enumerate(texts):
            tokens_RT[number, : len(text)] = torch.from_numpy(text.astype(np.int64))
        lengths_R = torch.tensor([len(text) for text in texts])
        return {
            "tokens_B2T": tokens_RT.unflatten(0, (-1, 2)),
            "lengths_B2": lengths_R.unflatten(0, (-1, 2)),
            "margins_B": torch.tensor([row.margin for row in rows], dtype=torch.float32),
        }

    def margin(self, row: Mapping[str, Any]) -> float:
        """Return the number in the column ``margin``, 0 if it is absent or null."""
        value = find(row, "margin")
        if value is None:
            return 0.0
        number = real_number(value)
        if number is None or not math.isfinite(number):
            raise Unusable(f"margin {str(value)[:40]!r} is not a finite number")
        return number

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Return the scores (B, 2) at the last token of each text."""
        tokens_RT = batch["tokens_B2T"].flatten(0, 1)
        lengths_R = batch["lengths_B2"].flatten()
        # a transformers network selects the last token itself
        if hasattr(model, "kind"):
            scores: Tensor = model(tokens_RT, lengths_B=lengths_R)
            return scores.unflatten(0, (-1, 2)).squeeze(-1)
        positions_RT = torch.arange(tokens_RT.size(1), device=tokens_RT.device).expand_as(tokens_RT)
        # experts must not count padding
        documents = {}
        if has_experts(model):
            documents["documents_BT"] = filler_documents(lengths_R, positions_RT)
        scores_RT1 = model(tokens_RT, positions_RT, **documents)
        # A native model returns a score per token. The score of a text is that of its last token.
        rows_R = torch.arange(len(lengths_R), device=tokens_RT.device)
        return scores_RT1[rows_R, lengths_R - 1].unflatten(0, (-1, 2)).squeeze(-1)

    def shown(self, row: Pair) -> list[ShownText]:
        """Return both texts, without a mask of learned tokens: a text has a single score."""
        return [ShownText(text.name, text.tokens, None) for text in super().shown(row)]

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return the weighted sum over pairs of the loss in the module docstring."""
        scores_B2 = outputs.float()
        differences_B = scores_B2[:, 0] - scores_B2[:, 1] - batch["margins_B"]
        return -weight * F.logsigmoid(differences_B).sum()


Task = RewardModel
