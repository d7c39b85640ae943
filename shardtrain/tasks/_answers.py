"""Tasks that compare answers: their rows, and the log-probability of an answer after its prompt.

A row has a prompt and two answers (``data/documents/preferences.py`` lists the accepted shapes). Tokens of the
prompt are not learned. An answer is cut where it exceeds seq_len.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.config.schema import Config
from shardtrain.data.digest import digest
from shardtrain.data.documents import preferences
from shardtrain.data.documents.bad_rows import around_bad_rows, attempt
from shardtrain.data.documents.encode import PromptEncoder
from shardtrain.data.documents.encoded import Document
from shardtrain.data.documents.read_documents import TOO_LONG
from shardtrain.data.filler import filler_documents
from shardtrain.data.loader import DataLoader
from shardtrain.data.row_stream import RowBatch
from shardtrain.data.sources import BadRow
from shardtrain.data.tokenizers.ends import described
from shardtrain.hf import initial_weights
from shardtrain.models.moe import has_experts
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks import _files
from shardtrain.tasks.task import ShownText
from shardtrain.tasks.text_task import TextTask
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger


class Side(NamedTuple):
    """A prompt with an answer: tokens (T), and the target of each, IGNORE where it is the prompt's."""

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int64]
    last: int
    """The token after them, a target alone: the end of the answer where it was not cut."""

    @property
    def whole(self) -> npt.NDArray[np.int32]:
        """All tokens (T + 1)."""
        return np.append(self.tokens, np.int32(self.last))

    def shown(self, name: str) -> ShownText:
        """For ``data show``: which tokens are learned."""
        return ShownText(name, self.whole.tolist(), [False, *(self.targets != IGNORE).tolist()])


@dataclass(frozen=True)
class Pair:
    """One row: its prompt with each of the two answers."""

    chosen: Side
    rejected: Side
    margin: float = 0.0
    """By how much the score of the chosen answer should exceed that of the other; read by ``reward_model``."""


class AnswerTask(TextTask):
    """A task of a causal model that learns from answers; ``reference`` is the frozen model, where it needs one."""

    needs_reference = False
    kind = "causal"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reference: nn.Module | None = None
        self._width = config.parallelism.tensor_parallel_degree

    def check(self, stream: DataLoader, module: ModuleType, shape: Any) -> None:
        """The model must be causal, since what fills up rows comes after them."""
        super().check(stream, module, shape)
        if not getattr(module, "CAUSAL", True):
            rule = "sees the tokens that it would have to predict, and gives no log-probability of an answer"
            raise ConfigError(Problem("model.name", self.config.model.name, rule, "use a causal model"))

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Encodes a prompt and a completion, under the names "prompt" and "completion"."""
        data = self.config.data
        return PromptEncoder(
            self.tokenizer, dataclasses.replace(data, prompt_field="prompt", completion_field="completion")
        )

    def padded(self, sides: Sequence[Side]) -> tuple[Tensor, Tensor]:
        """Tokens and targets (R, T) of some sides; T is that of the longest."""
        # Sequence parallelism deals equal parts of a row to the tensor ranks.
        width = -(-max(len(side.tokens) for side in sides) // self._width) * self._width
        tokens_RT = torch.zeros(len(sides), width, dtype=torch.int64)
        targets_RT = torch.full_like(tokens_RT, IGNORE)
        for number, side in enumerate(sides):
            tokens_RT[number, : len(side.tokens)] = torch.from_numpy(side.tokens.astype(np.int64))
            targets_RT[number, : len(side.targets)] = torch.from_numpy(side.targets)
        return tokens_RT, targets_RT

    def start(self) -> dict[str, str]:
        """Fingerprint of the initial weights, a cache key of the rows if the task compares with a reference model."""
        return {"reference weights": initial_weights.identity(self.config)} if self.needs_reference else {}


class PairTask(AnswerTask):
    """A task of pairs of answers; outputs are rewards (B, 2), of the chosen one first, and what else a loss needs."""

    sequences_per_row = 2
    reads_last_token = False
    """True if the model reads the last token of an answer too. Otherwise that token is only a target."""

    def read_rows(self, split: str) -> _files.FileRows[Pair]:
        """Read the files of a split; raises what ``_files.read`` does."""
        section, _ = _files.section_of(self.config, split)
        pairs: _files.FileRows[Pair] = _files.read(self.config, split, partial(self.encode, split=split))
        sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]

        # If the loss compares with a reference model, the initial weights are part of the data's fingerprint, so that
        # a run only resumes with the same ones.
        start = self.start()
        pairs.files = {**pairs.files, **start}
        content = digest(*(part.tobytes() for side in sides for part in (side.tokens, side.targets)))
        margins = [pair.margin for pair in pairs]
        if any(margins):
            content = digest(content, *margins)
        pairs.fingerprint = digest(self.encoder.fingerprint, section.seq_len, *start.values(), content)

        cut = sum(len(side.tokens) == section.seq_len - self.reads_last_token for side in sides)
        logger.info(described(self.tokenizer, self.config.data))
        logger.info(f"{split}: {len(pairs)} pairs of answers, of which {cut} are as long as seq_len or were cut to it")
        return pairs

    def lengths(self, row: Pair) -> list[int]:
        """Return the tokens of both sides."""
        return [len(side.tokens) + self.reads_last_token for side in (row.chosen, row.rejected)]

    def collate(self, rows: list[Pair]) -> dict[str, Tensor]:
        """Tokens and targets (B, 2, T), the chosen first; T is that of the longest answer with its prompt."""
        tokens_RT, targets_RT = self.padded([side for row in rows for side in (row.chosen, row.rejected)])
        return {"tokens_B2T": tokens_RT.unflatten(0, (-1, 2)), "targets_B2T": targets_RT.unflatten(0, (-1, 2))}

    def predictions(self, outputs: Any, batch: RowBatch) -> dict[str, Tensor]:
        """The rewards of each pair."""
        return {"rewards": outputs.float()}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Share of pairs whose chosen answer has the higher reward, and by how much on average."""
        margins = (rows["rewards"][:, 0] - rows["rewards"][:, 1]).double()
        return {"reward_accuracy": float((margins > 0).double().mean()), "reward_margin": float(margins.mean())}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """The two rewards."""
        return " ".join(f"{value:.6g}" for value in row["rewards"].tolist())

    def shown(self, row: Pair) -> list[ShownText]:
        """Both sides."""
        return [row.chosen.shown("chosen"), row.rejected.shown("rejected")]

    def encode(self, rows: Sequence[Mapping[str, Any] | BadRow], split: str) -> Iterator[Pair | BadRow]:
        """Tokenize both answers of each row. Yield for each row a Pair, or a BadRow."""
        section, _ = _files.section_of(self.config, split)
        num_targets = section.seq_len - self.reads_last_token

        def tokenize(good_rows: list[tuple[list[dict[str, Any]], float]]) -> Iterator[Pair | BadRow]:
            # Tokenize all answers together: chosen and rejected of the first row, of the second row, ...
            documents = self.encoder.encode([answer for answers, _ in good_rows for answer in answers])
            sides = [side_of(document, num_targets) for document in documents]
            for (_, margin), chosen, rejected in zip(good_rows, sides[::2], sides[1::2], strict=True):
                if isinstance(chosen, BadRow):
                    yield chosen
                elif isinstance(rejected, BadRow):
                    yield rejected
                else:
                    yield Pair(chosen, rejected, margin)

        return around_bad_rows([attempt(self._split, row) for row in rows], tokenize)

    def margin(self, row: Mapping[str, Any]) -> float:
        """The margin of a row; 0 for tasks that read none."""
        return 0.0

    def _split(self, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float]:
        data = self.config.data
        task = self.config.task
        prompt, *answers = preferences.split(row, data.prompt_field, task.chosen_field, task.rejected_field)
        return [{**row, "prompt": prompt, "completion": answer} for answer in answers], self.margin(row)


def side_of(document: Document | BadRow, seq_len: int) -> Side | BadRow:
    """A prompt with its answer, cut to seq_len targets. If they are all of the prompt, the row is too long."""
    if isinstance(document, BadRow):
        return document
    learned = document.learned if document.learned is not None else np.ones(len(document.tokens), bool)
    tokens = document.tokens[: seq_len + 1]
    learned = learned[: seq_len + 1]
    targets = np.where(learned[1:], tokens[1:], IGNORE).astype(np.int64)
    if not (targets != IGNORE).any():
        return BadRow(TOO_LONG, harmless=True)
    return Side(tokens[:-1], targets, int(tokens[-1]))


def token_losses(model: nn.Module, tokens_RT: Tensor, targets_RT: Tensor) -> Tensor:
    """-log-probability of each target (R, T) in float32, 0 where there is none."""
    positions_RT = torch.arange(tokens_RT.size(1), device=tokens_RT.device).expand_as(tokens_RT)
    # Experts must not count filler, which follows the last target of a row: an answer ends a text.
    documents = {}
    if has_experts(model):
        lengths_R = ((targets_RT != IGNORE) * (positions_RT + 1)).amax(1)
        documents["documents_BT"] = filler_documents(lengths_R, positions_RT)
    logits_RTV = model(tokens_RT, positions_RT, **documents)
    # Row by row: of the logits in float32 only those of one answer exist at a time in forward.
    losses = [
        F.cross_entropy(logits_TV.float(), targets_T, ignore_index=IGNORE, reduction="none")
        for logits_TV, targets_T in zip(logits_RTV, targets_RT, strict=True)
    ]
    return torch.stack(losses)


def log_probabilities(model: nn.Module, tokens_RT: Tensor, targets_RT: Tensor) -> Tensor:
    """Log-probability of each answer after its prompt, (R,), in float64.

    A token's is computed in float32 and the sum over tokens in float64: of two sums of thousands the loss is the small
    difference, in which the rounding of a float32 sum would stand at the fifth digit.
    """
    return -token_losses(model, tokens_RT, targets_RT).sum(1, dtype=torch.float64)


def of_pairs(model: nn.Module, batch: RowBatch) -> Tensor:
    """``log_probabilities`` (B, 2) of a batch of pairs."""
    tokens_B2T = batch["tokens_B2T"]
    targets_B2T = batch["targets_B2T"]
    return log_probabilities(model, tokens_B2T.flatten(0, 1), targets_B2T.flatten(0, 1)).unflatten(0, (-1, 2))
