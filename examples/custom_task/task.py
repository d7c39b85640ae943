"""Your task: rows, batches, loss, predictions, metrics. Lines to change are marked with ----->.

This example classifies points on two interleaved spirals, with the model in model.py. All methods except the first four
are optional. The code does not depend on ranks: the trainer distributes the rows of each step, and divides sums by the
number of targets of the entire step.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.data.row_stream import RowBatch
from shardtrain.tasks import RowTask

# -----> Metrics returned by metrics(), and which direction is better, for checkpoint.keep_best and validation.patience.
METRICS = {"accuracy": "max"}

Row = tuple[float, float, int]


class Task(RowTask):
    # -----> Rows of "train", "validation" or "test": anything with len() and [number]. For large data, return an object
    #        that reads rows on access. Give it an attribute `fingerprint`; otherwise every row is read at the start.
    def read_rows(self, split: str) -> list[Row]:
        c = self.config
        paths = {
            "train": c.training.dataset_path,
            "validation": c.validation.dataset_path,
            "test": c.task.test_dataset_path,
        }
        if paths[split] is None:
            return spirals(split, int(c.task.options.get("num_rows", 512)))
        with Path(str(paths[split])).open(newline="") as file:
            return [(float(x), float(y), int(label)) for x, y, label in csv.reader(file)]

    # -----> Convert rows to named tensors with rows as the first dimension.
    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        return {
            "features": torch.tensor([row[:2] for row in rows]),
            "labels": torch.tensor([row[2] for row in rows]),
        }

    # -----> Call the model and return its outputs.
    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        return model(batch["features"])

    # -----> The SUM of the loss over the rows, times the weight. A mean would overweight the rows of small batches.
    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        return weight * F.cross_entropy(outputs.float(), batch["labels"], reduction="sum")

    # -----> Values that evaluation keeps for each row.
    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        return {"prediction": outputs.argmax(-1), "label": batch["labels"]}

    # -----> Metrics of an entire set, from the values of all its rows, in their order on any number of ranks.
    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return {"accuracy": (rows["prediction"] == rows["label"]).double().mean().item()}

    # -----> The line for a row in test_prediction.txt.
    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        return str(int(row["prediction"]))

    # -----> Other methods that can be overridden: num_targets(batch), if the loss is a sum over tokens or pairs instead
    #        of rows; results(values), the content of test_results.json; is_labelled(split), False for rows without
    #        labels.


def spirals(split: str, count: int) -> list[Row]:
    """Points on two spirals with a little noise. Different for each split, and equal on every rank."""
    rng: Any = random.Random(split)
    rows = []
    for number in range(count):
        label, turn = number % 2, rng.uniform(0.2, 1.0)
        angle = math.tau * turn + math.pi * label
        noise = rng.gauss(0, 0.02), rng.gauss(0, 0.02)
        rows.append((turn * math.cos(angle) + noise[0], turn * math.sin(angle) + noise[1], label))
    return rows
