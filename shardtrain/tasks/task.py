"""What a task of rows is: override what differs, one method at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from shardtrain import models
from shardtrain.config.schema import Config, Training, Validation
from shardtrain.data.loader import DataLoader, RankSlice
from shardtrain.data.row_stream import RowBatch, RowDataLoader, RowFeed, Rows
from shardtrain.data.sources import BadRow
from shardtrain.layout import Layout
from shardtrain.utils.errors import ConfigError, DataError, Problem


@dataclass(frozen=True)
class ShownText:
    """A text of a row for ``data show``: its name, its tokens, and which of them are learned; None where
    none is."""

    name: str
    tokens: list[int]
    learned: list[bool] | None


class RowTask:
    """Rows in; loss, predictions and metrics out. One object per process, which keeps nothing of what it
    has seen.

    A subclass has ``read_rows``, ``collate``, ``forward`` and ``loss_sum``; ``predictions``, ``metrics``
    and ``prediction_text`` where there is more to know than the loss. All else holds without it: the order
    of rows, their share of each rank, accumulation, the division by the global count of targets, evaluation
    of each row once.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    # What a task says of itself

    def read_rows(self, split: str) -> Rows:
        """All rows of "train", "validation" or "test", in the order of the data; the same on every rank.

        The rows of "test" may come without what is to be predicted: see ``is_labelled``.
        """
        raise self._lacks("read_rows")

    def encode(self, rows: Sequence[Mapping[str, Any] | BadRow], split: str) -> Iterable[Any]:
        """Turn rows of the files of a split into rows of the task, or into a BadRow, one after the other.

        ``data check`` calls it, and ``read_rows`` of the tasks of this package.
        """
        raise self._lacks("encode")

    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Named tensors of some rows, at least one; what it pads must count for nothing in ``loss_sum``."""
        raise self._lacks("collate")

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """What the loss of a batch is a sum over: its rows, unless overridden."""
        return len(next(iter(batch.values())))

    def lengths(self, row: Any) -> list[int]:
        """Tokens of each sequence of a row, for throughput and FLOPs.

        Empty: a row has as many tokens as targets.
        """
        return []

    def forward(self, model: nn.Module, batch: RowBatch) -> Any:
        """Outputs of the model for a batch on its device."""
        raise self._lacks("forward")

    def loss_sum(self, outputs: Any, batch: RowBatch, weight: Tensor) -> Tensor:
        """``weight`` times the SUM of the loss over the batch's targets, a scalar.

        The weight holds one over the number of targets of the whole step, so padding, accumulation and
        ranks change no number; a mean over the batch would.
        """
        raise self._lacks("loss_sum")

    def predictions(self, outputs: Any, batch: RowBatch) -> dict[str, Tensor]:
        """What evaluation keeps of each row: named tensors whose first dim is the batch's rows.

        Nothing by default.
        """
        return {}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics of a whole set: ``predictions`` of all its rows, in the order of the data, on the CPU."""
        return {}

    def results(self, values: Mapping[str, float]) -> dict[str, float]:
        """What the file of results holds: the loss and the metrics, unless overridden."""
        return dict(values)

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """The line of one row in the file of predictions."""
        return " ".join(str(value.tolist()) for value in row.values())

    def shown(self, row: Any) -> list[ShownText]:
        """The texts of a row, for ``data show``.

        Raises:
            ConfigError: where the task does not say; override it.
        """
        fix = "define shown(row), as shardtrain/tasks/text_task.py does"
        raise ConfigError(Problem("task.name", self.config.task.name, "does not say how to show a row", fix))

    def is_labelled(self, split: str) -> bool:
        """Whether the rows of a split hold what is to be predicted."""
        return True

    num_labels: int = 0
    """Rows of the model's head, which takes the place of that to the vocabulary; 0 leaves the model as it
    is."""
    sequences_per_row: int = 1
    """Sequences of a row that the model computes with gradients, for a dry run."""

    # What the trainer asks of it

    @property
    def loss(self) -> RowTask:
        """Whose loss the runner takes."""
        return self

    def adapt(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Return the model, still on the meta device, with a head of ``num_labels`` rows.

        Raises:
            ConfigError: its last module is not a linear layer, or a network of transformers has other labels.
        """
        check_kind(self.config, model, self.kind)
        network: Any = getattr(model, "hf", None)
        if self.num_labels and network is None:
            models.replace_head(model, layout, self.num_labels)
        elif self.num_labels and network.config.num_labels != self.num_labels:
            rule = f'must be {self.num_labels}, the number of labels of task.name="{self.config.task.name}"'
            fix = f"set it to {self.num_labels}, or use a folder with as many labels"
            raise ConfigError(Problem("model.overrides.num_labels", network.config.num_labels, rule, fix))
        elif self.num_labels and network.config.get_text_config().pad_token_id is None:
            rule = "names a network without pad_token_id in config.json, which it needs to find the last token of a row"
            fix = "add one there: the id of a token that no row ends with"
            raise ConfigError(Problem("model.overrides.path", self.config.model.overrides.get("path"), rule, fix))
        return model

    def num_outputs(self, shape: Any) -> int:
        """Features of the model's output, or 0 where the task alone knows."""
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
    ) -> RowDataLoader:
        """As ``data.open_dataloader``; ``split`` is that of the section unless given.

        Raises:
            DataError: when a row cannot be used, or there is none.
        """
        section = section or self.config.training
        split = split or ("train" if section is self.config.training else "validation")
        rows = self.read_rows(split)
        if not len(rows):
            raise DataError(f"the {split} set has no rows")
        feed = self.feed(rows, self.config.debug.seed if shuffle else None, self._passes(loop))
        share = RankSlice(section.local_batch_size, batch_rank, num_batch_ranks, accumulation)
        last = self.config.training.last_batch if section is self.config.training else "rollover"
        return RowDataLoader(
            feed, self.collate, self.num_targets, self.lengths, share, section.dataloader, self.vocab, last
        )

    def feed(self, rows: Rows, seed: int | None, passes: int | None) -> RowFeed:
        """Rows in an order; to be overridden where what a row is depends on its place in it, such as the
        epoch."""
        return RowFeed(rows, seed, passes)

    vocab: int = 0
    """Ids of the tokenizer, where there is one."""
    kind: str = ""
    """What a network of ``transformers`` must be for, to learn this task: one of
    ``models.architecture.KINDS``."""

    def check(self, stream: DataLoader, module: ModuleType, shape: Any) -> None:
        """Refuse data and a model that do not fit together; raises ConfigError."""
        check_vocabulary(self.config, stream.vocab, shape)

    def _passes(self, loop: bool | None) -> int | None:
        if loop is not None:
            return None if loop else 1
        training = self.config.training
        if training.epochs:
            return training.epochs
        return None if training.on_data_end == "repeat" else 1

    def _lacks(self, method: str) -> ConfigError:
        fix = "define it, as shardtrain/tasks/classification.py does"
        return ConfigError(Problem("task.name", self.config.task.name, f"has a Task without {method}", fix))


def check_vocabulary(config: Config, vocab: int, shape: Any) -> None:
    """Refuse a tokenizer with more ids than the model has rows for; raises ConfigError."""
    rows = getattr(shape, "vocab_size", vocab)
    if vocab > rows:
        rule = f"names a tokenizer with {vocab} ids, and the model has rows for {rows}"
        fix = "use the model's own tokenizer, or set model.overrides.vocab_size"
        raise ConfigError(Problem("model.hf_assets_path", config.model.hf_assets_path, rule, fix))


def check_kind(config: Config, model: nn.Module, wanted: str) -> None:
    """Refuse a network of ``transformers`` that is for another task; raises ConfigError."""
    kind = getattr(model, "kind", wanted)
    if kind != wanted:
        rule = f'names a network for {kind}, and task.name="{config.task.name}" needs one for {wanted or "itself"}'
        fix = "set model.overrides.architecture to the class of transformers for it, or use another task"
        raise ConfigError(Problem("model.overrides.path", config.model.overrides.get("path"), rule, fix))
