"""Tokens that were hidden, from those around them (BERT: Devlin et al. 2019, section 3.1).

Of each row some tokens are chosen: 80 % of them become the mask, 10 % any other token, and 10 % stay. Which
ones follows from (seed, row, epoch), so that they are the same on every mesh and after a restart; held-out
rows are masked alike each time. A row is bos, the text, eos, and ends of rows longer than seq_len are cut.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shardtrain.config.schema import Config
from shardtrain.data.digest import digest
from shardtrain.data.documents import columns
from shardtrain.data.filler import filler_documents
from shardtrain.data.loader import DataLoader
from shardtrain.data.row_stream import RowBatch, RowFeed, Rows
from shardtrain.data.sources import BadRow
from shardtrain.ops.cross_entropy import cross_entropy_sum
from shardtrain.ops.seeding import seed_of
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks.text_task import Example, ExampleTask
from shardtrain.utils.errors import ConfigError, Problem

METRICS = {"accuracy": "max"}
DEGREES = ()
_MASKED = 0.8
_RANDOM = 0.1


class MaskedLanguageModel(ExampleTask):
    """The task; its options are those of ``task.options``: mask_fraction and mask_token_id."""

    kind = "masked"
    num_labels = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.labels = []
        self.fraction = float(config.task.options.get("mask_fraction", 0.15))

    @cached_property
    def mask_id(self) -> int:
        """The token that stands for a hidden one."""
        mask_id = self.config.task.options.get("mask_token_id")
        if isinstance(mask_id, int):
            return mask_id
        text = self.tokenizer.special_tokens.get("mask_token")
        ids = [] if text is None else self.tokenizer.encode_spans([text])[0][0].tolist()
        if len(ids) != 1:
            rule = "names no token that stands for a hidden one, and the tokenizer has no mask_token"
            raise ConfigError(Problem("task.options.mask_token_id", None, rule, "give its id"))
        return int(ids[0])

    def feed(self, rows: Rows, seed: int | None, passes: int | None) -> RowFeed:
        """Rows masked by the epoch in which they come."""
        return _MaskedFeed(self, rows, seed, passes)

    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Tokens as they are shown and targets (B, T), lengths (B,); T is that of the longest row."""
        width = max(len(shown) for shown, _ in rows)
        tokens_BT = torch.zeros(len(rows), width, dtype=torch.int64)
        targets_BT = torch.full_like(tokens_BT, IGNORE)
        for number, (shown, targets) in enumerate(rows):
            tokens_BT[number, : len(shown)] = torch.from_numpy(shown)
            targets_BT[number, : len(shown)] = torch.from_numpy(targets)
        lengths_B = torch.tensor([len(shown) for shown, _ in rows])
        return {"tokens_BT": tokens_BT, "targets_BT": targets_BT, "lengths_B": lengths_B}

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Chosen tokens."""
        return int((batch["targets_BT"] != IGNORE).sum())

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Logits (B, T, V)."""
        tokens_BT = batch["tokens_BT"]
        lengths_B = batch["lengths_B"]
        if hasattr(model, "kind"):
            return model(tokens_BT, lengths_B=lengths_B)  # type: ignore[no-any-return]
        positions_BT = torch.arange(tokens_BT.size(1), device=tokens_BT.device).expand_as(tokens_BT)
        return model(tokens_BT, positions_BT, documents_BT=filler_documents(lengths_B, positions_BT))  # type: ignore[no-any-return]

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Cross-entropy of the chosen tokens."""
        return cross_entropy_sum(outputs, batch["targets_BT"], weight)

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """How many of a row's chosen tokens are right, and how many there are."""
        targets_BT = batch["targets_BT"]
        right_BT = (outputs.argmax(-1) == targets_BT) & (targets_BT != IGNORE)
        return {"right": right_BT.sum(1), "chosen": (targets_BT != IGNORE).sum(1)}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Share of chosen tokens that are predicted."""
        return {"accuracy": int(rows["right"].sum()) / max(1, int(rows["chosen"].sum()))}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """Right and chosen tokens of a row."""
        return f"{int(row['right'])}\t{int(row['chosen'])}"

    def check(self, stream: DataLoader, module: ModuleType, shape: Any) -> None:
        """Refuse a causal model too, which would see hidden tokens from one side alone; raises ConfigError."""
        super().check(stream, module, shape)
        if not getattr(module, "AS_IS", False) and getattr(module, "CAUSAL", True):
            rule = "sees no token that follows, and cannot learn hidden ones from both sides"
            raise ConfigError(Problem("model.name", self.config.model.name, rule, "use encoder or transformers"))
        if not 0 <= self.mask_id < shape.vocab_size:
            rule = f"is not an id of the model, which has {shape.vocab_size}"
            raise ConfigError(Problem("task.options.mask_token_id", self.mask_id, rule, "give the mask's own id"))

    def hide(self, row: Example, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens as they are shown, and the chosen ones as targets; at least one is chosen."""
        rng = random.Random(seed)
        shown = row.tokens.astype(np.int64)
        targets = np.full_like(shown, IGNORE)
        special = {self.tokenizer.bos_id, self.tokenizer.eos_id, *self.tokenizer.special_ids}
        places = [place for place, token in enumerate(shown.tolist()) if token not in special]
        # By random() alone, whose numbers Python promises to keep for a seed; those of shuffle() may change.
        order = sorted((rng.random(), place) for place in places)
        for _, place in order[: max(1, round(self.fraction * len(places)))]:
            targets[place] = shown[place]
            fate = rng.random()
            if fate < _MASKED:
                shown[place] = self.mask_id
            elif fate < _MASKED + _RANDOM:
                shown[place] = int(rng.random() * self.vocab)
        return shown, targets

    def _read(self, labelled: bool, row: Mapping[str, Any]) -> tuple[list[str], int] | BadRow:
        text = columns.text(row, self.config.data.text_field)
        return ([text], IGNORE) if text else BadRow("the text is empty", harmless=True)


class _MaskedFeed(RowFeed):
    """Rows of which some tokens are hidden, others in each epoch."""

    def __init__(self, task: MaskedLanguageModel, rows: Rows, seed: int | None, passes: int | None) -> None:
        super().__init__(rows, seed, passes)
        self._task = task
        self._epochs = seed is not None
        self.fingerprint = digest(self.fingerprint, task.fraction, task.mask_id)

    def read(self, k: int, number: int) -> Any:
        epoch = k // self.num_rows if self._epochs else 0
        return self._task.hide(self.rows[number], seed_of(self._task.config.debug.seed, number, epoch))


Task = MaskedLanguageModel
