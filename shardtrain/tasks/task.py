"""Base class of tasks: subclasses override the methods that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from shardtrain import models
from shardtrain.config.ramps import StepSizes
from shardtrain.config.schema import Config, Training, Validation
from shardtrain.data.loader import DataLoader, RankSlice
from shardtrain.data.row_stream import RowBatch, RowDataLoader, RowFeed, Rows
from shardtrain.data.sources import BadRow
from shardtrain.layout import Layout
from shardtrain.utils.errors import ConfigError, DataError, Problem


@dataclass(frozen=True)
class ShownText:
    """A text of a row for ``data show``: its name, its tokens, and its loss mask (None without a mask)."""

    name: str
    tokens: list[int]
    learned: list[bool] | None


class RowTask:
    """Defines rows, batches, the loss, predictions and metrics of a task. One object per process, without
    state.

    A subclass must define ``read_rows``, ``collate``, ``forward`` and ``loss_sum``. It defines
    ``predictions``, ``metrics`` and ``prediction_text`` if evaluation reports more than the loss. The
    trainer handles everything else: the order of rows, their division over ranks, accumulation, the
    division by the global number of targets, and evaluation of each row once.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    # Methods that subclasses define

    def read_rows(self, split: str) -> Rows:
        """Return all rows of "train", "validation" or "test" in the order of the data, the same on every
        rank.

        Rows of "test" may lack labels: see ``is_labelled``.
        """
        raise self._lacks("read_rows")

    def encode(self, rows: Sequence[Mapping[str, Any] | BadRow], split: str) -> Iterable[Any]:
        """Convert rows of a split's files to rows of the task, in order. Return a BadRow for each unusable
        row.

        Called by ``data check``, and by ``read_rows`` of the tasks of this package.
        """
        raise self._lacks("encode")

    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Return a batch of rows as named tensors, at least one.

        Padding must not contribute to ``loss_sum``.
        """
        raise self._lacks("collate")

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of terms in the loss sum of a batch: its rows by default."""
        return len(next(iter(batch.values())))

    def lengths(self, row: Any) -> list[int]:
        """Return the token count of each sequence of a row, for throughput and FLOPs.

        Empty if a row has as many tokens as targets.
        """
        return []

    def forward(self, model: nn.Module, batch: RowBatch) -> Any:
        """Return the outputs of the model for a batch on its device."""
        raise self._lacks("forward")

    def loss_sum(self, outputs: Any, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return ``weight`` times the SUM of the loss over the batch's targets, a scalar.

        The weight is 1 / (number of targets of the step over all ranks), so the result does not depend on
        padding, accumulation or ranks. A mean over the batch would.
        """
        raise self._lacks("loss_sum")

    def predictions(self, outputs: Any, batch: RowBatch) -> dict[str, Tensor]:
        """Return named tensors that evaluation keeps; their first dim is the batch's rows.

        Empty by default.
        """
        return {}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the metrics of a complete dataset from the ``predictions`` of all rows, in data order, on
        the CPU."""
        return {}

    def step_sums(self, outputs: Any, batch: RowBatch) -> Tensor | None:
        """Return sums over the rows of a batch for ``step_metrics``, (K,) in float64 on the batch's device.

        None by default. Called in every training step, so it must not wait for the device.
        """
        return None

    def step_metrics(self, sums: list[float]) -> dict[str, float]:
        """Return the metrics of a training step from ``step_sums`` over all of its rows and ranks."""
        return {}

    def results(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the contents of the results file: loss and metrics by default."""
        return dict(values)

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """Return the line of one row in the predictions file."""
        return " ".join(str(value.tolist()) for value in row.values())

    def shown(self, row: Any) -> list[ShownText]:
        """Return the texts of a row, for ``data show``.

        Raises:
            ConfigError: the task does not override this method.
        """
        raise self._lacks("shown", "text_task")

    def is_labelled(self, split: str) -> bool:
        """True if the rows of a split have labels."""
        return True

    # The head of the model.
    num_labels: int = 0
    """Number of outputs of a head that replaces the vocabulary head. 0 keeps the model unchanged."""
    sequences_per_row: int = 1
    """Number of sequences per row that pass through the model with gradients. Used by dry runs."""

    # Work that plans and throughput count in addition to tokens.
    def flops_per_row(self, model: nn.Module) -> Callable[[Any], float] | None:
        """Return a function from a row to the FLOPs of modules that do not process tokens, such as a vision
        tower. None without such modules.
        """
        return None

    def planned_flops_per_row(self, model: nn.Module) -> float:
        """Return 0, or the FLOPs of such modules for a row in plans and dry runs."""
        return 0.0

    def planned_batch(self, num_rows: int) -> RowBatch | None:
        """Return the batch of a dry run. None if only the number of its tokens counts."""
        return None

    def plan_notes(self) -> list[str]:
        """Return notes on what plans and dry runs assume about rows."""
        return []

    # Methods that the trainer calls

    @property
    def loss(self) -> RowTask:
        """The task whose loss the runner computes."""
        return self

    def adapt(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Return the model, still on the meta device, with a head of ``num_labels`` rows.

        Raises:
            ConfigError: its last module is not a linear layer, or a network of transformers has other labels.
        """
        # A network of transformers has its own head, whose number of labels config.json sets.
        check_kind(self.config, model, self.kind)
        network: Any = getattr(model, "hf", None)
        if self.num_labels and network is None:
            models.replace_head(model, layout, self.num_labels)
        elif self.num_labels and network.config.num_labels != self.num_labels:
            raise ConfigError(
                Problem(
                    "model.overrides.num_labels",
                    network.config.num_labels,
                    rule=f'must be {self.num_labels}, the number of labels of task.name="{self.config.task.name}"',
                    fix=f"set it to {self.num_labels}, or use a folder with as many labels",
                )
            )
        # Such a network reads the output at the last token before padding.
        elif self.num_labels and network.config.get_text_config().pad_token_id is None:
            raise ConfigError(
                Problem(
                    "model.overrides.path",
                    self.config.model.overrides.get("path"),
                    rule=(
                        "names a network without pad_token_id in config.json, "
                        "which it needs to find the last token of a row"
                    ),
                    fix="set pad_token_id there to the id of a token that never ends a row",
                )
            )
        return model

    def num_outputs(self, shape: Any) -> int:
        """Return the number of output features of the model, 0 if unknown."""
        return self.num_labels

    def open_dataloader(
        self,
        *,
        batch_rank: int,
        num_batch_ranks: int,
        accumulation: int,
        section: Training | Validation | None = None,
        shuffle: bool = True,
        loop: bool | None = None,
        split: str = "",
        sizes: StepSizes | None = None,
    ) -> RowDataLoader:
        """Open the data like ``data.open_dataloader``. ``split`` defaults to that of the section.

        Raises:
            DataError: a row is bad, or there are no rows.
        """
        # Training and validation differ in their section of the configuration.
        section = section or self.config.training
        if not split:
            split = "train" if section is self.config.training else "validation"
        rows = self.read_rows(split)
        if not len(rows):
            raise DataError(f"the {split} set has no rows")
        # Without shuffling, rows are read in the order of the data, for evaluation.
        seed = self.config.debug.seed if shuffle else None
        feed = self.feed(rows, seed, self._passes(loop))
        share = RankSlice(
            section.local_batch_size, batch_rank, num_batch_ranks, accumulation, sizes
        )
        # training.last_batch only applies to training.
        last = "rollover"
        if section is self.config.training:
            last = self.config.training.last_batch
        return RowDataLoader(
            feed,
            self.collate,
            self.num_targets,
            self.lengths,
            share,
            section.dataloader,
            self.vocab,
            last,
        )

    def feed(self, rows: Rows, seed: int | None, passes: int | None) -> RowFeed:
        """Return a feed of rows in training order.

        Override it if rows depend on their position, such as the epoch.
        """
        return RowFeed(rows, seed, passes)

    vocab: int = 0
    """Vocabulary size of the tokenizer, 0 without one."""
    kind: str = ""
    """Kind of ``transformers`` network that the task requires: one of ``models.architecture.KINDS``."""

    def check(self, stream: DataLoader, module: ModuleType, shape: Any) -> None:
        """Raise ConfigError if data and model do not fit together."""
        check_vocabulary(self.config, stream.vocab, shape)

    def _passes(self, loop: bool | None) -> int | None:
        """Return the number of passes over the data; None repeats them without end."""
        if loop is not None:
            # The caller decides for validation. Training follows its own options.
            return None if loop else 1
        training = self.config.training
        if training.epochs:
            return training.epochs
        return None if training.on_data_end == "repeat" else 1

    def _lacks(self, method: str, example: str = "classification") -> ConfigError:
        fix = f"define it, see shardtrain/tasks/{example}.py"
        return ConfigError(
            Problem("task.name", self.config.task.name, f"has a Task without {method}", fix)
        )


def accuracy(num_right: Tensor, num_targets: Tensor) -> float:
    """Return the share of targets that are predicted correctly, from counts per row. 0 without a target.

    >>> import torch
    >>> accuracy(torch.tensor([1, 2]), torch.tensor([2, 2])), accuracy(torch.zeros(1), torch.zeros(1))
    (0.75, 0.0)
    """
    total = int(num_targets.sum())
    return int(num_right.sum()) / max(1, total)


def check_vocabulary(config: Config, vocab: int, shape: Any) -> None:
    """Raise ConfigError for a tokenizer with more ids than the model's vocabulary."""
    # A model that does not declare a vocabulary cannot be compared.
    rows = getattr(shape, "vocab_size", vocab)
    if vocab > rows:
        raise ConfigError(
            Problem(
                "model.hf_assets_path",
                config.model.hf_assets_path,
                rule=f"contains a tokenizer with {vocab} ids, and the model has a vocabulary of {rows}",
                fix="use the model's own tokenizer, or set model.overrides.vocab_size",
            )
        )


def check_kind(config: Config, model: nn.Module, wanted: str) -> None:
    """Raise ConfigError for a ``transformers`` network of another kind than the task requires."""
    # Native models have no kind, and fit any task.
    kind = getattr(model, "kind", wanted)
    if kind != wanted:
        raise ConfigError(
            Problem(
                "model.overrides.path",
                config.model.overrides.get("path"),
                rule=f'contains a {kind} network, and task.name="{config.task.name}" requires {wanted or "another"}',
                fix="set model.overrides.architecture to the transformers class for this task, or use another task",
            )
        )
