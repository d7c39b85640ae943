"""Sequence classification: predict the label of a text, or of a pair of texts.

A row is BOS, the text, EOS; a text longer than seq_len is truncated before EOS. The model's head has one
output per label and is evaluated at the last token, where causal models and encoders have both seen the
full text (like BART: Lewis et al. 2020, section 3.1). Batches are padded to their longest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardtrain import models
from shardtrain.config.schema import Config
from shardtrain.data.documents import columns
from shardtrain.data.filler import filler_documents
from shardtrain.data.row_stream import RowBatch
from shardtrain.data.sources import BadRow, every_row
from shardtrain.models.moe import has_experts
from shardtrain.ops.cross_entropy import cross_entropy_sum
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks import _files
from shardtrain.tasks.text_task import Example, ExampleTask

METRICS = {"accuracy": "max", "macro_f1": "max"}
DEGREES = ("tensor_parallel_degree",)


class Classification(ExampleTask):
    """The task ``classification``. Override only ``read_rows`` to use rows from another source."""

    kind = "classification"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.labels = list(config.task.labels)
        if not self.labels:
            self.labels = [str(number) for number in range(config.task.num_labels)]
        self.num_labels = len(self.labels)
        self._numbers = {name: i for i, name in enumerate(self.labels)}
        # sequence parallelism splits rows evenly over the tensor-parallel ranks
        self._length_multiple = config.parallelism.tensor_parallel_degree

    @cached_property
    def _is_causal(self) -> bool:
        return bool(getattr(models.find(self.config.model.name), "CAUSAL", True))

    def is_labelled(self, split: str) -> bool:
        """True if the rows of a split have labels. For a test set, the first readable row decides."""
        return split != "test" or self._is_test_set_labelled

    @cached_property
    def _is_test_set_labelled(self) -> bool:
        for _, row in every_row(_files.open_files(self.config, "test")):
            if not isinstance(row, BadRow):
                return columns.find(row, self.config.task.label_field) is not None
        return True

    def collate(self, rows: list[Example]) -> dict[str, Tensor]:
        """Return padded tokens (B, T), lengths and labels (B,)."""
        longest = max(len(row.tokens) for row in rows)
        T = -(-longest // self._length_multiple) * self._length_multiple
        tokens_BT = torch.zeros(len(rows), T, dtype=torch.int64)
        for number, row in enumerate(rows):
            tokens = row.tokens.astype(np.int64)
            tokens_BT[number, : len(tokens)] = torch.from_numpy(tokens)
        return {
            "tokens_BT": tokens_BT,
            "lengths_B": torch.tensor([len(row.tokens) for row in rows]),
            "labels_B": torch.tensor([row.label for row in rows]),
        }

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of rows with a label."""
        return int((batch["labels_B"] != IGNORE).sum())

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Return the scores of the labels (B, labels) at the last token of each row."""
        tokens_BT = batch["tokens_BT"]
        lengths_B = batch["lengths_B"]
        # a transformers network selects the last token itself
        if hasattr(model, "kind"):
            return model(tokens_BT, lengths_B=lengths_B)  # type: ignore[no-any-return]
        positions_BT = torch.arange(tokens_BT.size(1), device=tokens_BT.device).expand_as(tokens_BT)
        # Mark padding if it matters: an encoder must not attend to it, and experts must not count it. A
        # causal model does not see the padding, which follows the last token.
        documents = {}
        if not self._is_causal or has_experts(model):
            documents["documents_BT"] = filler_documents(lengths_B, positions_BT)
        scores_BTL = model(tokens_BT, positions_BT, **documents)
        return scores_BTL[torch.arange(len(lengths_B), device=tokens_BT.device), lengths_B - 1]

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return the weighted sum of the cross-entropy of the labels."""
        return cross_entropy_sum(outputs, batch["labels_B"], weight)

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """Return the predicted label of each row (the first of equal scores), and the true label."""
        return {"prediction": outputs.float().argmax(-1), "label": batch["labels_B"]}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the accuracy, and the mean F1 over all labels that occur or are predicted."""
        known = rows["label"] != IGNORE
        predicted = rows["prediction"][known]
        label = rows["label"][known]
        scores = []
        for number in range(self.num_labels):
            has_label = label == number
            is_predicted = predicted == number
            total = int(has_label.sum() + is_predicted.sum())
            if total:
                num_right = int((has_label & is_predicted).sum())
                scores.append(2 * num_right / total)
        accuracy = int((predicted == label).sum()) / max(1, len(label))
        return {"accuracy": accuracy, "macro_f1": sum(scores) / max(1, len(scores))}

    def results(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return only the accuracy, under the name that pytorch_universal_trainer uses."""
        return {"Accuracy": values["accuracy"]}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """Return the name of the predicted label."""
        return self.labels[int(row["prediction"])]

    def _read(self, labelled: bool, row: Mapping[str, Any]) -> tuple[list[str], int] | BadRow:
        """Return the texts of a row and the number of its label."""
        task = self.config.task
        fields = [self.config.data.text_field]
        if task.pair_field:
            fields.append(task.pair_field)
        texts = [columns.text(row, field) for field in fields]
        if not labelled:
            return texts, IGNORE
        value = columns.label(row, task.label_field)
        # not isinstance: True is also an int, but not the name of a label
        name = str(value) if type(value) in (int, str) else None
        if name not in self._numbers:
            labels = ", ".join(self.labels[:8])
            if self.num_labels > 8:
                labels += ", ..."
            return BadRow(
                f"label {str(value)[:40]!r} in column {task.label_field!r} is not one of {labels}"
            )
        return texts, self._numbers[name]


Task = Classification
