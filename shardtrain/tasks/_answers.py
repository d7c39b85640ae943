"""Base classes of tasks that learn from answers: their rows, and the log-probability of an answer after its
prompt.

A row of a pair task has a prompt and two answers (``data/documents/preferences.py`` lists the accepted
formats). Tokens of the prompt are not learned. Answers are truncated to seq_len.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
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
from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks import _files
from shardtrain.tasks.task import ShownText
from shardtrain.tasks.text_task import TextTask
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger


class Side(NamedTuple):
    """A prompt with one answer: input tokens (T), and their targets (T), IGNORE for tokens of the prompt."""

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int64]
    last: int
    """The token after the input tokens. It is a target but no input, such as the EOS token of an answer."""

    @property
    def all_tokens(self) -> npt.NDArray[np.int32]:
        """All tokens (T + 1), with the last target."""
        return np.append(self.tokens, np.int32(self.last))

    def shown(self, name: str) -> ShownText:
        """Return the text for ``data show``, with a mask of the learned tokens."""
        return ShownText(
            name, self.all_tokens.tolist(), [False, *(self.targets != IGNORE).tolist()]
        )


@dataclass(frozen=True)
class Pair:
    """A row of a pair task: its prompt with each of the two answers."""

    chosen: Side
    rejected: Side
    margin: float = 0.0
    """Minimum difference between the scores of the chosen and the rejected answer.

    Used by ``reward_model``.
    """


class AnswerTask(TextTask):
    """Base of tasks in which a causal model learns from answers.

    ``reference`` is the frozen reference model, set before the first step if ``needs_reference``.
    """

    kind = "causal"

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the model with a frozen reference model."""
        return False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.reference: nn.Module | None = None
        # sequence parallelism splits rows evenly over the tensor-parallel ranks
        self._length_multiple = config.parallelism.tensor_parallel_degree

    def check(self, stream: DataLoader, module: ModuleType, shape: Any) -> None:
        """Reject a model that is not causal: it would attend to the padding, which follows each row."""
        super().check(stream, module, shape)
        if not getattr(module, "CAUSAL", True):
            raise ConfigError(
                Problem(
                    "model.name",
                    self.config.model.name,
                    rule="is not causal, so it has no log-probability of an answer",
                    fix="use a causal model",
                )
            )

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Encoder of rows with a "prompt" and a "completion"."""
        # Rows are converted to these two columns before they are encoded.
        options = dataclasses.replace(
            self.config.data, prompt_field="prompt", completion_field="completion"
        )
        return PromptEncoder(self.tokenizer, options)

    def padded(self, sides: Sequence[Side]) -> tuple[Tensor, Tensor]:
        """Return padded tokens and targets (R, T).

        T is the longest length, rounded up for sequence parallelism.
        """
        longest = max(len(side.tokens) for side in sides)
        T = -(-longest // self._length_multiple) * self._length_multiple
        tokens_RT = torch.zeros(len(sides), T, dtype=torch.int64)
        targets_RT = torch.full_like(tokens_RT, IGNORE)
        # Padding follows the row, and its targets are ignored.
        for number, side in enumerate(sides):
            length = len(side.tokens)
            tokens_RT[number, :length] = torch.from_numpy(side.tokens.astype(np.int64))
            targets_RT[number, : len(side.targets)] = torch.from_numpy(side.targets)
        return tokens_RT, targets_RT

    def start(self) -> dict[str, str]:
        """Return the identity of the reference model, if there is one.

        Part of the data's fingerprint.
        """
        if not self.needs_reference:
            return {}
        # Without reference_path, the reference is the model at the start of the run.
        folder = self.config.task.reference_path
        if folder:
            return {"reference weights": initial_weights.of_folder(Path(folder))}
        weights = {"reference weights": initial_weights.identity(self.config)}
        adapters = self.config.lora.initial_load_path
        if self.config.lora.enable and adapters is not None:
            weights["reference adapters"] = initial_weights.of_adapters(adapters)
        return weights


class PairTask(AnswerTask):
    """Base of tasks with pairs of answers. Outputs start with the rewards (B, 2), the chosen answer first."""

    sequences_per_row = 2
    reads_last_token = False
    """True if the last token of an answer is also an input of the model. Otherwise it is only a target."""

    def read_rows(self, split: str) -> _files.FileRows[Pair]:
        """Read the files of a split. Raises what ``_files.read`` raises."""
        section, _ = _files.section_of(self.config, split)
        encode = partial(self.encode, split=split)
        pairs: _files.FileRows[Pair] = _files.read(self.config, split, encode)
        sides = []
        for pair in pairs:
            sides += [pair.chosen, pair.rejected]

        # The fingerprint of the data covers the weights of a reference model. So a run resumes only with the
        # same reference weights.
        start = self.start()
        pairs.files = {**pairs.files, **start}

        # The fingerprint also covers the tokens, and the margins if the rows have any.
        parts = []
        for side in sides:
            parts += [side.tokens.tobytes(), side.targets.tobytes()]
        content = digest(*parts)
        # Omit margins that are all 0, so data without margins have the same fingerprint as in older versions.
        margins = [pair.margin for pair in pairs]
        if any(margins):
            content = digest(content, *margins)
        facts = (self.encoder.fingerprint, section.seq_len, *start.values())
        pairs.fingerprint = digest(*facts, content)

        full_length = section.seq_len - self.reads_last_token
        num_full = sum(len(side.tokens) == full_length for side in sides)
        logger.info(described(self.tokenizer, self.config.data))
        logger.info(
            f"{split}: {len(pairs)} pairs of answers; {num_full} answers fill seq_len or were truncated to it"
        )
        return pairs

    def lengths(self, row: Pair) -> list[int]:
        """Return the token counts of both answers with their prompt."""
        return [len(side.tokens) + self.reads_last_token for side in (row.chosen, row.rejected)]

    def collate(self, rows: list[Pair]) -> dict[str, Tensor]:
        """Return padded tokens and targets (B, 2, T), the chosen answer first."""
        sides = []
        for row in rows:
            sides += [row.chosen, row.rejected]
        tokens_RT, targets_RT = self.padded(sides)
        return {
            "tokens_B2T": tokens_RT.unflatten(0, (-1, 2)),
            "targets_B2T": targets_RT.unflatten(0, (-1, 2)),
        }

    def predictions(self, outputs: Any, batch: RowBatch) -> dict[str, Tensor]:
        """Return the rewards (B, 2) of each pair."""
        return {"rewards": outputs[:, :2].float()}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the share of pairs whose chosen answer has the higher reward, and the mean difference."""
        chosen, rejected = rows["rewards"].unbind(1)
        margins = (chosen - rejected).double()
        return {
            "reward_accuracy": float((margins > 0).double().mean()),
            "reward_margin": float(margins.mean()),
        }

    def step_sums(self, outputs: Tensor, batch: RowBatch) -> Tensor:
        """Return the sums of both rewards and of correct pairs, and the number of pairs, (4,)."""
        wide = sum_dtype(outputs.device)
        rewards_B2 = self.predictions(outputs, batch)["rewards"].to(wide)
        is_correct_B = rewards_B2[:, 0] > rewards_B2[:, 1]
        num_correct = is_correct_B.sum(0, keepdim=True, dtype=wide)
        num_pairs = torch.full_like(num_correct, len(rewards_B2))
        return torch.cat((rewards_B2.sum(0), num_correct, num_pairs))

    def step_metrics(self, sums: list[float]) -> dict[str, float]:
        """Return the metrics of ``metrics``, and the mean reward of the chosen and of the rejected answers."""
        chosen, rejected, num_correct, num_pairs = sums
        return {
            "reward_chosen": chosen / num_pairs,
            "reward_rejected": rejected / num_pairs,
            "reward_accuracy": num_correct / num_pairs,
            "reward_margin": (chosen - rejected) / num_pairs,
        }

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """Return the two rewards as text."""
        return " ".join(f"{value:.6g}" for value in row["rewards"].tolist())

    def shown(self, row: Pair) -> list[ShownText]:
        """Return both answers with their prompt."""
        return [row.chosen.shown("chosen"), row.rejected.shown("rejected")]

    def encode(
        self, rows: Sequence[Mapping[str, Any] | BadRow], split: str
    ) -> Iterator[Pair | BadRow]:
        """Tokenize both answers of each row. Yield for each row a Pair, or a BadRow."""
        section, _ = _files.section_of(self.config, split)
        # The last token of a text is the target of the one before, unless the model also reads it.
        num_targets = section.seq_len
        if self.reads_last_token:
            num_targets -= 1

        # ``around_bad_rows`` passes only usable rows.
        def tokenize(
            good_rows: list[tuple[list[dict[str, Any]], float]],
        ) -> Iterator[Pair | BadRow]:
            # Tokenize all answers together: chosen and rejected of the first row, of the second row, ...
            answers_of_all: list[dict[str, Any]] = []
            for answers, _ in good_rows:
                answers_of_all += answers
            documents = self.encoder.encode(answers_of_all)
            sides = [side_of(document, num_targets) for document in documents]
            margins = [margin for _, margin in good_rows]
            for margin, chosen, rejected in zip(margins, sides[::2], sides[1::2], strict=True):
                if isinstance(chosen, BadRow):
                    yield chosen
                elif isinstance(rejected, BadRow):
                    yield rejected
                else:
                    yield Pair(chosen, rejected, margin)

        split_rows = [attempt(self._split, row) for row in rows]
        return around_bad_rows(split_rows, tokenize)

    def margin(self, row: Mapping[str, Any]) -> float:
        """Return the margin of a row. 0 by default."""
        return 0.0

    def _split(self, row: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float]:
        """Split a row into one row per answer for the encoder, and the margin."""
        data = self.config.data
        task = self.config.task
        prompt, *answers = preferences.split(
            row, data.prompt_field, task.chosen_field, task.rejected_field
        )
        rows = [{**row, "prompt": prompt, "completion": answer} for answer in answers]
        return rows, self.margin(row)


def side_of(document: Document | BadRow, seq_len: int) -> Side | BadRow:
    """Truncate a prompt with its answer to seq_len targets. A BadRow if no token of the answer remains."""
    if isinstance(document, BadRow):
        return document
    # Without a mask, every token is learned.
    learned = document.learned
    if learned is None:
        learned = np.ones(len(document.tokens), bool)
    # seq_len targets need one more token, because the first token is only an input.
    tokens = document.tokens[: seq_len + 1]
    learned = learned[: seq_len + 1]
    targets = np.where(learned[1:], tokens[1:], IGNORE).astype(np.int64)
    if not (targets != IGNORE).any():
        return BadRow(TOO_LONG, harmless=True)
    return Side(tokens[:-1], targets, int(tokens[-1]))


def token_losses(model: nn.Module, tokens_RT: Tensor, targets_RT: Tensor) -> Tensor:
    """Return the negative log-probability of each target (R, T) in float32, 0 at IGNORE."""
    positions_RT = torch.arange(tokens_RT.size(1), device=tokens_RT.device).expand_as(tokens_RT)
    # Expert load statistics must not count padding, which follows the last target of a row.
    documents = {}
    if has_experts(model):
        lengths_R = ((targets_RT != IGNORE) * (positions_RT + 1)).amax(1)
        documents["documents_BT"] = filler_documents(lengths_R, positions_RT)
    logits_RTV = model(tokens_RT, positions_RT, **documents)
    # Compute the loss row by row, because float32 logits of all rows would need much memory in forward.
    losses = [
        F.cross_entropy(logits_TV.float(), targets_T, ignore_index=IGNORE, reduction="none")
        for logits_TV, targets_T in zip(logits_RTV, targets_RT, strict=True)
    ]
    return torch.stack(losses)


def log_probabilities(model: nn.Module, tokens_RT: Tensor, targets_RT: Tensor) -> Tensor:
    """Return the log-probability of each answer after its prompt, (R,), in float64.

    Tokens are computed in float32 and summed in float64. The loss is the small difference of two sums in
    the thousands, and rounding of a float32 sum would change its fifth digit.
    """
    losses_RT = token_losses(model, tokens_RT, targets_RT)
    return -losses_RT.sum(1, dtype=sum_dtype(losses_RT.device))


def answer_lengths(batch: RowBatch) -> Tensor:
    """Return the number of tokens of each answer that count in the loss, (B, 2)."""
    return (batch["targets_B2T"] != IGNORE).sum(-1)


def of_pairs(model: nn.Module, batch: RowBatch) -> Tensor:
    """Return the ``log_probabilities`` (B, 2) of a batch of pairs."""
    tokens_B2T = batch["tokens_B2T"]
    targets_B2T = batch["targets_B2T"]
    # Both answers of a pair are separate rows of one forward pass.
    return log_probabilities(model, tokens_B2T.flatten(0, 1), targets_B2T.flatten(0, 1)).unflatten(
        0, (-1, 2)
    )
