"""The next token of each token: rows of documents, as [data] makes them, and cross-entropy, on every mesh.

The loss is the runner's own (``distributed/runner.py``), which knows how sequences and vocabulary are split.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from shardtrain import data, models
from shardtrain.config.schema import Config
from shardtrain.layout import Layout
from shardtrain.tasks.task import check_kind, check_vocabulary
from shardtrain.utils.errors import ConfigError, Problem

METRICS = {"loss": "min", "perplexity": "min"}
DEGREES = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")


class LanguageModel:
    """The task ``language_model``; ``loss`` None leaves it to the runner."""

    loss = None
    num_labels = 0
    sequences_per_row = 1

    def __init__(self, config: Config) -> None:
        self.config = config

    def adapt(self, model: nn.Module, layout: Layout) -> nn.Module:
        """The model as the task needs it: as it is."""
        check_kind(self.config, model, "causal")
        return model

    def num_outputs(self, shape: Any) -> int:
        """Features of the model's output."""
        return int(shape.vocab_size)

    def open_dataloader(self, **options: Any) -> data.DataLoader:
        return data.open_dataloader(self.config, **options)

    def check(self, stream: data.DataLoader, module: ModuleType, shape: Any) -> None:
        """Refuse data and a model that do not fit together; raises ConfigError."""
        check_vocabulary(self.config, stream.vocab, shape)
        if stream.masks_documents:
            models.check_documents(module, self.config.model.name)
        if not getattr(module, "CAUSAL", True):
            rule = 'sees the tokens that it would have to predict, and cannot learn task.name="language_model"'
            raise ConfigError(Problem("model.name", self.config.model.name, rule, "use a causal model or another task"))


Task = LanguageModel
