"""A text from a text, by an encoder and a decoder (Sutskever et al. 2014; BART, T5): translation,
summaries.

The source is column data.prompt_field, the target data.completion_field; each is bos, the text, eos, as far
as the tokenizer has them, and cut to seq_len with its eos kept. The decoder is shown the right target up to
each token (teacher forcing). The loss is over tokens of targets.
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
from shardtrain.tasks.text_task import Example, ExampleTask
from shardtrain.utils.errors import ConfigError, Problem

METRICS = {"accuracy": "max"}
DEGREES = ()


class SequenceToSequence(ExampleTask):
    """The task.

    An Example holds source and target one after the other; its label is where the target begins.
    """

    kind = "sequence_to_sequence"
    num_labels = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.labels = []

    def adapt(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The model as it is; raises ConfigError for one without a decoder of its own."""
        if not hasattr(model, "kind"):
            rule = "has no encoder beside its decoder"
            raise ConfigError(Problem("model.name", self.config.model.name, rule, 'use "transformers"'))
        return super().adapt(model, layout)

    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Sources (B, T) with their lengths (B,), and targets (B, S)."""
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
        """Tokens of targets."""
        return int((batch["targets_BS"] != IGNORE).sum())

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Logits (B, S, V)."""
        return model(batch["tokens_BT"], lengths_B=batch["lengths_B"], decoded_BS=batch["targets_BS"])  # type: ignore[no-any-return]

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Cross-entropy of the targets' tokens."""
        return cross_entropy_sum(outputs, batch["targets_BS"], weight)

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """How many of a target's tokens are right, each after the right ones before it, and how many there
        are."""
        targets_BS = batch["targets_BS"]
        right_BS = (outputs.argmax(-1) == targets_BS) & (targets_BS != IGNORE)
        return {"right": right_BS.sum(1), "tokens": (targets_BS != IGNORE).sum(1)}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Share of the targets' tokens that are predicted."""
        return {"accuracy": int(rows["right"].sum()) / max(1, int(rows["tokens"].sum()))}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """Right tokens and all tokens of a target."""
        return f"{int(row['right'])}\t{int(row['tokens'])}"

    def _read(self, labelled: bool, row: Mapping[str, Any]) -> tuple[list[str], int] | BadRow:
        data = self.config.data
        return [columns.text(row, data.prompt_field), columns.text(row, data.completion_field)], IGNORE

    def _example(self, texts: list[Any], label: int, seq_len: int) -> Example | BadRow:
        source, target = (super(SequenceToSequence, self)._example([ids], label, seq_len) for ids in texts)
        for found in (source, target):
            if isinstance(found, BadRow):
                return found
        assert isinstance(source, Example) and isinstance(target, Example)
        return Example(np.concatenate((source.tokens, target.tokens)), len(source.tokens))


def _padded(rows: list[Any], filler: int) -> Tensor:
    padded = torch.full((len(rows), max(len(row) for row in rows)), filler, dtype=torch.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.from_numpy(row.astype(np.int64))
    return padded


Task = SequenceToSequence
