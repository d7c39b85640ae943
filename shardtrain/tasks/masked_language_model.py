"""Masked language modeling: predict hidden tokens from the tokens around them (BERT: Devlin et al. 2019,
section 3.1).

A random part of the tokens of each row are targets: 80 % of them are replaced by the mask token, 10 % by a
random token, and 10 % stay. The choice depends only on (seed, row, epoch), so it is the same on every mesh
and after a resume. Held-out rows are masked in the same way each time. A row is BOS, the text, EOS,
truncated to seq_len.
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
from shardtrain.tasks.task import accuracy
from shardtrain.tasks.text_task import Example, ExampleTask
from shardtrain.utils.errors import ConfigError, Problem

METRICS = {"accuracy": "max"}
DEGREES = ()
# Shares of the targets that are replaced by the mask token, and by a random token. The others stay.
_MASKED = 0.8
_RANDOM = 0.1


class MaskedLanguageModel(ExampleTask):
    """The task ``masked_language_model``, with ``mask_fraction`` and ``mask_token_id`` in
    ``task.options``.
    """

    kind = "masked"
    num_labels = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # Rows have no label, so ``data show`` calls their text "text".
        self.labels = []
        self.fraction = float(config.task.options.get("mask_fraction", 0.15))

    @cached_property
    def mask_id(self) -> int:
        """Id of the mask token."""
        # Without the option, the tokenizer's mask token must be a single id.
        mask_id = self.config.task.options.get("mask_token_id")
        if isinstance(mask_id, int):
            return mask_id
        text = self.tokenizer.special_tokens.get("mask_token")
        ids = []
        if text is not None:
            ((encoded, _),) = self.tokenizer.encode_spans([text])
            ids = encoded.tolist()
        if len(ids) != 1:
            raise ConfigError(
                Problem(
                    "task.options.mask_token_id",
                    None,
                    rule="is required, because the tokenizer has no mask_token",
                    fix="set it to the id of the mask token",
                )
            )
        return int(ids[0])

    def feed(self, rows: Rows, seed: int | None, passes: int | None) -> RowFeed:
        """Return a feed that masks each row, differently in each epoch."""
        return _MaskedFeed(self, rows, seed, passes)

    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Return padded masked tokens and targets (B, T), and lengths (B,)."""
        T = max(len(masked) for masked, _ in rows)
        tokens_BT = torch.zeros(len(rows), T, dtype=torch.int64)
        targets_BT = torch.full_like(tokens_BT, IGNORE)
        for number, (masked, targets) in enumerate(rows):
            length = len(masked)
            tokens_BT[number, :length] = torch.from_numpy(masked)
            targets_BT[number, :length] = torch.from_numpy(targets)
        lengths_B = torch.tensor([len(masked) for masked, _ in rows])
        return {"tokens_BT": tokens_BT, "targets_BT": targets_BT, "lengths_B": lengths_B}

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of target tokens."""
        return int((batch["targets_BT"] != IGNORE).sum())

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Return the logits (B, T, V)."""
        tokens_BT = batch["tokens_BT"]
        lengths_B = batch["lengths_B"]
        # Networks of transformers build the mask of padding from the lengths themselves.
        if hasattr(model, "kind"):
            return model(tokens_BT, lengths_B=lengths_B)  # type: ignore[no-any-return]
        positions_BT = torch.arange(tokens_BT.size(1), device=tokens_BT.device).expand_as(tokens_BT)
        documents_BT = filler_documents(lengths_B, positions_BT)
        return model(tokens_BT, positions_BT, documents_BT=documents_BT)  # type: ignore[no-any-return]

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return the weighted sum of the cross-entropy of the targets."""
        return cross_entropy_sum(outputs, batch["targets_BT"], weight)

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """Return per row the number of targets that are predicted correctly, and the number of targets."""
        targets_BT = batch["targets_BT"]
        right_BT = (outputs.argmax(-1) == targets_BT) & (targets_BT != IGNORE)
        return {"right": right_BT.sum(1), "chosen": (targets_BT != IGNORE).sum(1)}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the share of targets that are predicted correctly."""
        return {"accuracy": accuracy(rows["right"], rows["chosen"])}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """Return the numbers of correct and of all targets of a row, separated by a tab."""
        return f"{int(row['right'])}\t{int(row['chosen'])}"

    def check(self, stream: DataLoader, module: ModuleType, shape: Any) -> None:
        """Raise ConfigError for a causal model, which sees only the tokens before a hidden one, or a wrong
        mask id."""
        super().check(stream, module, shape)
        # A folder of transformers may contain a masked model. ``kind`` checks that.
        is_causal = not getattr(module, "AS_IS", False) and getattr(module, "CAUSAL", True)
        if is_causal:
            raise ConfigError(
                Problem(
                    "model.name",
                    self.config.model.name,
                    rule="is causal, and masked language modeling requires a model that sees both sides of a token",
                    fix="use encoder or transformers",
                )
            )
        if not 0 <= self.mask_id < shape.vocab_size:
            raise ConfigError(
                Problem(
                    "task.options.mask_token_id",
                    self.mask_id,
                    rule=f"is not a token id of the model, whose vocabulary has {shape.vocab_size} ids",
                    fix="set it to the id of the mask token",
                )
            )

    def hide(self, row: Example, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the masked tokens (T) and the targets (T), IGNORE for tokens that are not chosen.

        At least one token is chosen. BOS, EOS and special tokens are never chosen.
        """
        rng = random.Random(seed)
        masked = row.tokens.astype(np.int64)
        targets = np.full_like(masked, IGNORE)
        # Special tokens mark the structure of a row, so they are never targets.
        special = {self.tokenizer.bos_id, self.tokenizer.eos_id, *self.tokenizer.special_ids}
        candidates = [index for index, token in enumerate(masked.tolist()) if token not in special]
        # Only random(): Python guarantees its numbers for a seed in all versions, but not those of shuffle()
        shuffled = sorted((rng.random(), index) for index in candidates)
        num_targets = max(1, round(self.fraction * len(candidates)))
        for _, index in shuffled[:num_targets]:
            # Some targets keep their token, so the model also learns from tokens that it sees.
            targets[index] = masked[index]
            draw = rng.random()
            if draw < _MASKED:
                masked[index] = self.mask_id
            elif draw < _MASKED + _RANDOM:
                masked[index] = int(rng.random() * self.vocab)
        return masked, targets

    def _read(self, labelled: bool, row: Mapping[str, Any]) -> tuple[list[str], int] | BadRow:
        text = columns.text(row, self.config.data.text_field)
        if not text:
            return BadRow("the text is empty", harmless=True)
        return [text], IGNORE


class _MaskedFeed(RowFeed):
    """Feed of masked rows. Each epoch masks other tokens; held-out rows have one epoch."""

    def __init__(
        self, task: MaskedLanguageModel, rows: Rows, seed: int | None, passes: int | None
    ) -> None:
        super().__init__(rows, seed, passes)
        self._task = task
        self._epochs = seed is not None
        # Other masks are other inputs, so they are part of the data's identity.
        self.fingerprint = digest(self.fingerprint, task.fraction, task.mask_id)

    def read(self, k: int, number: int) -> Any:
        epoch = k // self.num_rows if self._epochs else 0
        return self._task.hide(
            self.rows[number], seed_of(self._task.config.debug.seed, number, epoch)
        )


Task = MaskedLanguageModel
