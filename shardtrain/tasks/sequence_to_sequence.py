"""Sequence to sequence: generate a text from a text with encoder and decoder (Sutskever et al. 2014; BART,
T5).

The source is column data.prompt_field, the target column data.completion_field. Each is BOS, the text, EOS,
as far as the tokenizer has these tokens, and truncated to seq_len before EOS. The decoder sees the true
target up to each token (teacher forcing). The loss is over the tokens of targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardtrain.config.schema import Config
from shardtrain.data.documents import columns
from shardtrain.data.row_stream import RowBatch
from shardtrain.data.sources import BadRow
from shardtrain.layout import Layout
from shardtrain.ops.cross_entropy import cross_entropy_sum
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks.task import accuracy
from shardtrain.tasks.text_task import Example, ExampleTask
from shardtrain.utils.errors import ConfigError, Problem

METRICS = {"accuracy": "max"}
DEGREES = ()


class SequenceToSequence(ExampleTask):
    """The task ``sequence_to_sequence``.

    An Example has the tokens of source and target; its label is the source length.
    """

    kind = "sequence_to_sequence"
    num_labels = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.labels = []

    def adapt(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Return the model unchanged. Raises ConfigError for a model without encoder and decoder."""
        # Networks of transformers have a kind. Native models are decoders.
        if not hasattr(model, "kind"):
            raise ConfigError(
                Problem(
                    "model.name",
                    self.config.model.name,
                    rule="has no encoder in addition to its decoder",
                    fix='use "transformers"',
                )
            )
        return super().adapt(model, layout)

    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Return padded sources (B, T) with their lengths (B,), and padded targets (B, S)."""
        # The label of an example is the length of its source.
        sources = [row.tokens[: row.label] for row in rows]
        targets = [row.tokens[row.label :] for row in rows]
        return {
            "tokens_BT": _padded(sources, 0),
            "lengths_B": torch.tensor([len(tokens) for tokens in sources]),
            "targets_BS": _padded(targets, IGNORE),
        }

    def lengths(self, row: Example) -> list[int]:
        """Return the token counts of source and target."""
        return [row.label, len(row.tokens) - row.label]

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of target tokens."""
        return int((batch["targets_BS"] != IGNORE).sum())

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Return the logits (B, S, V)."""
        # The network shifts the targets itself: position s predicts token s.
        return model(
            batch["tokens_BT"], lengths_B=batch["lengths_B"], decoded_BS=batch["targets_BS"]
        )  # type: ignore[no-any-return]

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return the weighted sum of the cross-entropy of the target tokens."""
        return cross_entropy_sum(outputs, batch["targets_BS"], weight)

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """Return two numbers per row: the target tokens that are predicted correctly with teacher forcing,
        and all target tokens."""
        targets_BS = batch["targets_BS"]
        is_target_BS = targets_BS != IGNORE
        right_BS = (outputs.argmax(-1) == targets_BS) & is_target_BS
        return {"right": right_BS.sum(1), "tokens": is_target_BS.sum(1)}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the share of target tokens that are predicted correctly."""
        return {"accuracy": accuracy(rows["right"], rows["tokens"])}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """Return the numbers of correct and of all tokens of a target, separated by a tab."""
        return f"{int(row['right'])}\t{int(row['tokens'])}"

    def _read(self, labelled: bool, row: Mapping[str, Any]) -> tuple[list[str], int] | BadRow:
        data = self.config.data
        return [
            # The target is the second text, not a label, so every split must have it.
            columns.text(row, data.prompt_field),
            columns.text(row, data.completion_field),
        ], IGNORE

    def _example(self, texts: list[Any], label: int, seq_len: int) -> Example | BadRow:
        source_ids, target_ids = texts
        source = super()._example([source_ids], label, seq_len)
        # Each text has its own BOS and EOS, and its own limit of seq_len.
        target = super()._example([target_ids], label, seq_len)
        if isinstance(source, BadRow):
            return source
        if isinstance(target, BadRow):
            return target
        return Example(np.concatenate((source.tokens, target.tokens)), len(source.tokens))


def _padded(rows: list[Any], padding: int) -> Tensor:
    longest = max(len(row) for row in rows)
    padded = torch.full((len(rows), longest), padding, dtype=torch.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.from_numpy(row.astype(np.int64))
    return padded


Task = SequenceToSequence
