"""Language modeling: next-token cross-entropy over rows of documents, on every mesh.

The runner computes the loss (``distributed/runner.py``), because it knows how sequences and vocabulary are
split.
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
    """The task ``language_model``. ``loss`` is None because the runner computes the loss."""

    loss = None
    num_labels = 0
    sequences_per_row = 1

    def __init__(self, config: Config) -> None:
        self.config = config

    def adapt(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Return the model unchanged. Raises ConfigError for a transformers network of another kind."""
        check_kind(self.config, model, "causal")
        return model

    def num_outputs(self, shape: Any) -> int:
        """Return the number of output features of the model: its vocabulary size."""
        return int(shape.vocab_size)

    def open_dataloader(self, **options: Any) -> data.DataLoader:
        return data.open_dataloader(self.config, **options)

    def flops_per_row(self, model: nn.Module) -> None:
        """Return None: all modules process tokens."""

    def planned_flops_per_row(self, model: nn.Module) -> float:
        """Return 0: all modules process tokens."""
        return 0.0

    def planned_batch(self, num_rows: int) -> None:
        """Return None: dry runs count full sequences."""

    def plan_notes(self) -> list[str]:
        """Return no notes."""
        return []

    def check(self, stream: data.DataLoader, module: ModuleType, shape: Any) -> None:
        """Raise ConfigError if data and model do not fit together."""
        # A tokenizer with more ids than the embedding has rows would fail during training.
        check_vocabulary(self.config, stream.vocab, shape)
        # Packed documents need a model that keeps them apart.
        if stream.masks_documents:
            models.check_documents(module, self.config.model.name)
        if not getattr(module, "CAUSAL", True):
            raise ConfigError(
                Problem(
                    "model.name",
                    self.config.model.name,
                    rule='is not causal, and task.name="language_model" requires a causal model',
                    fix="use a causal model or another task",
                )
            )


Task = LanguageModel
