"""Preferences: of two answers to a prompt one was chosen; the model learns to find it likelier than it did at first.

Direct preference optimisation (Rafailov et al. 2023, equation 7). With the log-probability of an answer under the model
and under the reference, which is the model as the run began, frozen: an answer's reward is beta times the difference of
the two, and a pair's loss is -log sigmoid(reward of the chosen - reward of the rejected), summed over pairs and divided
once by the pairs of the whole step.

A row has a prompt and two answers, as texts or as lists of messages, which the chat template writes. Tokens of the
prompt count in neither log-probability; an answer longer than seq_len is cut at its end. The reference is a second copy
of the weights on the same mesh (``reference.py``), so it costs their memory once more, without gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain import first_weights
from shardtrain.config.schema import Config
from shardtrain.data.batch import filler_documents
from shardtrain.data.document import Document
from shardtrain.data.encode import PromptEncoder
from shardtrain.data.ends import described
from shardtrain.data.feed import digest
from shardtrain.data.loader import Stream
from shardtrain.data.row_stream import RowBatch
from shardtrain.data.sources import BadRow
from shardtrain.errors import ConfigError, Problem
from shardtrain.log import logger
from shardtrain.models.moe import has_experts
from shardtrain.targets import IGNORE
from shardtrain.tasks import _files
from shardtrain.tasks.text_task import TextTask

METRICS = {"reward_accuracy": "max", "reward_margin": "max"}
DEGREES = ("tensor_parallel_degree",)


@dataclass(frozen=True)
class Pair:
    """One row: tokens of the prompt with each answer, and the target of each token, IGNORE where it is the prompt's."""

    chosen: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
    rejected: tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]


class Preference(TextTask):
    """See the module; ``reference`` is the frozen model, put there before the first step."""

    needs_reference = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reference: nn.Module | None = None
        self._width = config.parallelism.tensor_parallel_degree  # which deals equal parts of a row

    def check(self, stream: Stream, module: ModuleType, shape: Any) -> None:
        """See RowTask; the model must be causal, since what fills up rows comes after them."""
        super().check(stream, module, shape)
        if not getattr(module, "CAUSAL", True):
            rule = "sees the tokens that it would have to predict, and gives no log-probability of an answer"
            raise ConfigError(Problem("model.name", self.config.model.name, rule, "use a causal model"))

    def read_rows(self, split: str) -> _files.FileRows[Pair]:
        """Read the files of a split; raises what ``_files.read`` does."""
        section, _ = _files.section_of(self.config, split)
        found = _files.read(self.config, split, lambda rows: self._pairs(rows, section.seq_len))
        start = first_weights.identity(self.config)
        found.files = {**found.files, "reference weights": start}
        encoders = [encoder.fingerprint for encoder in self._encoders]
        rows = (part for row in found for side in (row.chosen, row.rejected) for part in (s.tobytes() for s in side))
        found.fingerprint = digest(*encoders, section.seq_len, start, digest(*rows))
        cut = sum(len(side[0]) == section.seq_len for row in found for side in (row.chosen, row.rejected))
        logger.info(described(self.tokenizer, self.config.data))
        logger.info(f"{split}: {len(found)} pairs of answers, of which {cut} are as long as seq_len or were cut to it")
        if split == "train" and found:
            self.tokens_per_target = sum(len(row.chosen[0]) + len(row.rejected[0]) for row in found) / len(found)
        return found

    def collate(self, rows: list[Pair]) -> dict[str, Tensor]:
        """Tokens and targets (B, 2, T), the chosen first; T is that of the longest answer with its prompt."""
        longest = max(len(side[0]) for row in rows for side in (row.chosen, row.rejected))
        width = -(-longest // self._width) * self._width
        tokens_B2T = torch.zeros(len(rows), 2, width, dtype=torch.int64)
        targets_B2T = torch.full_like(tokens_B2T, IGNORE)
        for number, row in enumerate(rows):
            for place, (tokens, targets) in enumerate((row.chosen, row.rejected)):
                tokens_B2T[number, place, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
                targets_B2T[number, place, : len(targets)] = torch.from_numpy(targets)
        return {"tokens_B2T": tokens_B2T, "targets_B2T": targets_B2T}

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Rewards (B, 2), of the chosen answer first."""
        assert self.reference is not None, "the reference is opened before the first step"
        with torch.no_grad():
            before_B2 = log_probabilities(self.reference, batch)
        rewards_B2: Tensor = self.config.task.beta * (log_probabilities(model, batch) - before_B2)
        return rewards_B2

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """-log sigmoid of the margins, over pairs."""
        return -weight * F.logsigmoid(outputs[:, 0] - outputs[:, 1]).sum()

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """The rewards of each pair."""
        return {"rewards": outputs.float()}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Share of pairs whose chosen answer has the higher reward, and by how much on average."""
        margins = (rows["rewards"][:, 0] - rows["rewards"][:, 1]).double()
        return {"reward_accuracy": float((margins > 0).double().mean()), "reward_margin": float(margins.mean())}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """The two rewards."""
        return " ".join(f"{value:.6g}" for value in row["rewards"].tolist())

    @cached_property
    def _encoders(self) -> tuple[PromptEncoder, PromptEncoder]:
        fields = (self.config.task.chosen_field, self.config.task.rejected_field)
        chosen, rejected = (
            PromptEncoder(self.tokenizer, dataclasses.replace(self.config.data, completion_field=field))
            for field in fields
        )
        return chosen, rejected

    def _pairs(self, rows: Sequence[Mapping[str, Any] | BadRow], seq_len: int) -> Iterator[Pair | BadRow]:
        good = [row for row in rows if not isinstance(row, BadRow)]
        chosen, rejected = (iter(encoder.encode(good)) for encoder in self._encoders)
        for row in rows:
            yield row if isinstance(row, BadRow) else _pair(next(chosen), next(rejected), seq_len)


def log_probabilities(model: nn.Module, batch: RowBatch) -> Tensor:
    """Log-probability of each answer after its prompt, (B, 2), in float64.

    A token's is computed in float32 and the sum over tokens in float64: of two sums of thousands the loss is the small
    difference, in which the rounding of a float32 sum would stand at the fifth digit.
    """
    tokens_B2T, targets_B2T = batch["tokens_B2T"], batch["targets_B2T"]
    tokens_RT, targets_RT = tokens_B2T.flatten(0, 1), targets_B2T.flatten(0, 1)
    positions_RT = torch.arange(tokens_RT.size(1), device=tokens_RT.device).expand_as(tokens_RT)
    # the last target of a row is that of its last token: an answer ends a text
    documents = {}
    if has_experts(model):
        lengths_R = ((targets_RT != IGNORE) * (positions_RT + 1)).amax(1)
        documents["documents_BT"] = filler_documents(lengths_R, positions_RT)
    logits_RTV = model(tokens_RT, positions_RT, **documents)
    # row by row: of the logits in float32 only those of one answer exist at a time in forward
    losses = [
        F.cross_entropy(logits_TV.float(), targets_T, ignore_index=IGNORE, reduction="none").sum(dtype=torch.float64)
        for logits_TV, targets_T in zip(logits_RTV, targets_RT, strict=True)
    ]
    return -torch.stack(losses).unflatten(0, (-1, 2))


def _pair(chosen: Document | BadRow, rejected: Document | BadRow, seq_len: int) -> Pair | BadRow:
    sides = []
    for document in (chosen, rejected):
        if isinstance(document, BadRow):
            return document
        learned = document.learned if document.learned is not None else np.ones(len(document.tokens), bool)
        tokens, learned = document.tokens[: seq_len + 1], learned[: seq_len + 1]
        targets = np.where(learned[1:], tokens[1:], IGNORE).astype(np.int64)
        if not (targets != IGNORE).any():
            return BadRow("no token of an answer lies within seq_len")
        sides.append((tokens[:-1], targets))
    return Pair(sides[0], sides[1])


Task = Preference
