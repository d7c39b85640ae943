"""Sequence classification: a text, or a pair of texts, has one of a few labels.

A row is bos, the text, eos; where it is longer than seq_len its end is cut and eos kept. The model's head has a row per
label, and is read at the last token of the text, which a causal model and an encoder both know all of it by (as BART
does: Lewis et al. 2020, section 3.1). A batch is as wide as its longest row.
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
    """The task ``classification``; ``read_rows`` alone is to be overridden for rows from elsewhere."""

    kind = "classification"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.labels = list(config.task.labels) or [str(i) for i in range(config.task.num_labels)]
        self.num_labels = len(self.labels)
        self._numbers = {name: i for i, name in enumerate(self.labels)}
        self._width = config.parallelism.tensor_parallel_degree  # which deals equal parts of a row

    @cached_property
    def _is_causal(self) -> bool:
        return bool(getattr(models.find(self.config.model.name), "CAUSAL", True))

    def is_labelled(self, split: str) -> bool:
        """Whether the rows of a split have a label: those of a test set by the first of them that can be read."""
        return split != "test" or self._is_test_set_labelled

    @cached_property
    def _is_test_set_labelled(self) -> bool:
        rows = (row for _, row in every_row(_files.open_files(self.config, "test")) if not isinstance(row, BadRow))
        first = next(rows, None)
        return first is None or columns.find(first, self.config.task.label_field) is not None

    def collate(self, rows: list[Example]) -> dict[str, Tensor]:
        """Tokens and positions (B, T), lengths and labels (B,); T is that of the longest row."""
        longest = max(len(row.tokens) for row in rows)
        width = -(-longest // self._width) * self._width
        tokens_BT = torch.zeros(len(rows), width, dtype=torch.int64)
        for number, row in enumerate(rows):
            tokens_BT[number, : len(row.tokens)] = torch.from_numpy(row.tokens.astype(np.int64))
        return {
            "tokens_BT": tokens_BT,
            "lengths_B": torch.tensor([len(row.tokens) for row in rows]),
            "labels_B": torch.tensor([row.label for row in rows]),
        }

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Rows with a label."""
        return int((batch["labels_B"] != IGNORE).sum())

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Scores of the labels (B, labels), at the last token of each row."""
        tokens_BT = batch["tokens_BT"]
        lengths_B = batch["lengths_B"]
        if hasattr(model, "kind"):  # a network of transformers, which knows itself where to read the scores
            return model(tokens_BT, lengths_B=lengths_B)  # type: ignore[no-any-return]
        positions_BT = torch.arange(tokens_BT.size(1), device=tokens_BT.device).expand_as(tokens_BT)
        # What a causal model sees at the last token comes before the padding, so it need not be told of it; experts
        # must not count it, though, and an encoder must not attend to it.
        needs_documents = not self._is_causal or has_experts(model)
        documents = {"documents_BT": filler_documents(lengths_B, positions_BT)} if needs_documents else {}
        scores_BTL = model(tokens_BT, positions_BT, **documents)
        return scores_BTL[torch.arange(len(lengths_B), device=tokens_BT.device), lengths_B - 1]

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Cross-entropy of the labels."""
        return cross_entropy_sum(outputs, batch["labels_B"], weight)

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """The best label of each row, of equal ones the first, and the right one."""
        return {"prediction": outputs.float().argmax(-1), "label": batch["labels_B"]}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Share of rows that are right, and the mean over labels of F1, of labels that occur or are predicted."""
        known = rows["label"] != IGNORE
        predicted = rows["prediction"][known]
        label = rows["label"][known]
        scores = []
        for number in range(self.num_labels):
            of_label = label == number
            of_prediction = predicted == number
            total = int(of_label.sum() + of_prediction.sum())
            if total:
                scores.append(2 * int((of_label & of_prediction).sum()) / total)
        accuracy = int((predicted == label).sum()) / max(1, len(label))
        return {"accuracy": accuracy, "macro_f1": sum(scores) / max(1, len(scores))}

    def results(self, values: Mapping[str, float]) -> dict[str, float]:
        """The accuracy alone, under the name that pytorch_universal_trainer gives it."""
        return {"Accuracy": values["accuracy"]}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """The label of the prediction as the rows spell it."""
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
        # Not isinstance: True is an int too, and not the name of a label.
        name = str(value) if type(value) in (int, str) else None
        if name not in self._numbers:
            known = ", ".join(self.labels[:8]) + (", ..." if self.num_labels > 8 else "")
            return BadRow(f"label {str(value)[:40]!r} in column {task.label_field!r} is not one of {known}")
        return texts, self._numbers[name]


Task = Classification
