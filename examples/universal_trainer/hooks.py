"""Hooks of a parameters.yml. They replace the edits at the marks -----> in the source of pytorch_universal_trainer.

Set `hooks_file` in parameters.yml to this file. A class Task that derives from RowTask, as here, defines its own rows,
loss and metrics. One that derives from shardtrain.tasks.classification.Classification can override single methods of
the sentence classifier. A class Model replaces pretrained_model_dir. In this example, an MLP classifies points on two
rings.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.data.row_stream import RowBatch
from shardtrain.layout import Draw, Layout
from shardtrain.tasks import RowTask

# -----> metrics: their names, and whether higher ("max") or lower ("min") is better. The first one selects the best
#        checkpoint.
METRICS = {"accuracy": "max"}

Row = tuple[float, float, int]


class Task(RowTask):
    # -----> tokenizer: a task on texts derives from Classification and overrides its property `tokenizer`. These rows
    #        need none.

    # -----> read_files: rows of "train", "validation" or "test", anything with len() and [number].
    def read_rows(self, split: str) -> list[Row]:
        rng: Any = random.Random(split)  # different points for each split, equal on every rank
        rows = []
        for number in range(int(self.config.task.options["num_rows"])):
            label, angle = number % 2, rng.uniform(0, math.tau)
            radius = rng.gauss(1.0 + label, 0.15)
            rows.append((radius * math.cos(angle), radius * math.sin(angle), label))
        return rows

    # -----> collate: rows as named tensors, with rows as the first dimension.
    def collate(self, rows: list[Row]) -> dict[str, Tensor]:
        return {
            "points": torch.tensor([row[:2] for row in rows]),
            "labels": torch.tensor([row[2] for row in rows]),
        }

    # -----> model call: the outputs of the model for a batch.
    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        return model(batch["points"])

    # -----> loss: the SUM over the rows, times the weight, which is 1 / (rows of the entire step).
    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        return weight * F.cross_entropy(outputs.float(), batch["labels"], reduction="sum")

    # -----> evaluate: values to keep for each row.
    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        return {"prediction": outputs.argmax(-1), "label": batch["labels"]}

    # -----> metrics of an entire set, with each row once, in the order of the data.
    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return {"accuracy": (rows["prediction"] == rows["label"]).double().mean().item()}

    # -----> writer: the content of {dev,test}_results.json.
    def results(self, values: Mapping[str, float]) -> dict[str, float]:
        return {"Accuracy": values["accuracy"]}

    # -----> writer: the line for a row in {dev,test}_prediction.txt.
    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        return str(int(row["prediction"]))


# -----> model: any nn.Module, with its sizes, layout and initial values. Remove all of this to use the model of
#        pretrained_model_dir.
@dataclass(frozen=True)
class Config:
    width: int = 32
    num_layers: int = 2


FLAVORS = {"debugmodel": {}}

LAYOUT = Layout(
    first=("embed",),
    layers="layers",
    last=("head",),
    tensor={"embed": "replicate", "layers.*.*": "replicate", "head": "replicate"},
)


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed = nn.Linear(2, c.width)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.Sequential(nn.GELU(), nn.Linear(c.width, c.width))
                for i in range(c.num_layers)
            }
        )
        self.head = nn.Linear(c.width, 2)

    def forward(self, points_B2: Tensor) -> Tensor:
        x_BD = self.embed(points_B2)
        for layer in self.layers.values():
            x_BD = x_BD + layer(x_BD)
        return self.head(x_BD)


def initial(c: Config) -> dict[str, Draw]:
    return {
        "embed.weight": Draw("normal", std=2**-0.5),
        "*.bias": Draw("zeros"),
        "layers.*.*.weight": Draw("normal", std=c.width**-0.5),
        "layers.*.*.bias": Draw("zeros"),
        "head.weight": Draw("normal", std=c.width**-0.5),
    }


# -----> optimizer: options, `python main.py --params=... --optimizer.name AdamW --optimizer.eps 1e-6`.
