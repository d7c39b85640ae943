"""Your task: rows, batches, loss, predictions, metrics. Lines to change are marked with ----->.

As it stands it tells two interleaved spirals apart, with a model of its own (model.py). All but the first four methods
may be removed. Nothing here knows of ranks: each step's rows are dealt to them, and sums are divided by the number of
targets of the whole step.
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

# -----> Metrics that metrics() gives, and which direction is better: for checkpoint.keep_best and validation.patience.
METRICS = {"accuracy": "max"}

Row = tuple[float, float, int]


class Task(RowTask):
    # -----> Rows of "train", "validation" or "test": anything with len() and [number]. A class that reads a row when it
    #        is asked for serves large data; give it an attribute `fingerprint`, or every row is read once at the start.
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

    # -----> Some rows as named tensors, the first dim of each being the row.
    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        return {
            "features": torch.tensor([row[:2] for row in rows]),
            "labels": torch.tensor([row[2] for row in rows]),
        }

    # -----> What the model is called with, and what comes out.
    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        return model(batch["features"])

    # -----> The SUM of the loss over the rows, times the weight. A mean would count rows of small batches for more.
    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        return weight * F.cross_entropy(outputs.float(), batch["labels"], reduction="sum")

    # -----> What evaluation keeps of each row.
    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        return {"prediction": outputs.argmax(-1), "label": batch["labels"]}

    # -----> Metrics of a whole set: what was kept of all its rows, in their order, whatever the number of ranks.
    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return {"accuracy": (rows["prediction"] == rows["label"]).double().mean().item()}

    # -----> The line of a row in test_prediction.txt.
    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        return str(int(row["prediction"]))

    # -----> Also to be overridden, one at a time: num_targets(batch), where the loss is a sum over something else than
    #        rows (tokens, pairs); results(values), what test_results.json holds; is_labelled(split), False for rows
    #        without what is to be predicted.


def spirals(split: str, count: int) -> list[Row]:
    """Points on two spirals, with a little noise: others for each split, the same on every rank."""
    rng: Any = random.Random(split)
    rows = []
    for number in range(count):
        label, turn = number % 2, rng.uniform(0.2, 1.0)
        angle = math.tau * turn + math.pi * label
        noise = rng.gauss(0, 0.02), rng.gauss(0, 0.02)
        rows.append((turn * math.cos(angle) + noise[0], turn * math.sin(angle) + noise[1], label))
    return rows
