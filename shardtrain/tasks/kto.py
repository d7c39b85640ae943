"""KTO: learn from single answers that are labeled good or bad (Ethayarajh et al. 2024, arXiv 2402.01306,
eq. 7 and 8).

A row has a prompt, a completion and a label: true for a good completion. The reward of a row is the
difference of the completion's log-probabilities under the model and under the reference, which is the
frozen initial model. The loss is desirable_weight * (1 - sigmoid(beta * (reward - KL))) for a good
completion, and undesirable_weight * (1 - sigmoid(beta * (KL - reward))) for a bad one. It is summed over
rows and divided once by the number of rows of the step.

KL is estimated without gradient. In a group of ``task.group_size`` rows, each prompt is paired with the
completion of the previous row. KL is the mean reward of these pairs, or 0 if the mean is negative. Other
implementations use the rows of a micro-batch as the group. Here the groups are formed when the data are
read, in an order drawn from debug.seed for training. An entry of a batch is a group, so results do not
depend on the number of ranks or on accumulation. With ``training.local_batch_size`` 1 and groups as large
as the other implementation's batch, the losses are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shardtrain.config.schema import Config
from shardtrain.data.digest import digest
from shardtrain.data.documents import columns
from shardtrain.data.documents.bad_rows import around_bad_rows, attempt
from shardtrain.data.documents.columns import Unusable
from shardtrain.data.order import sample_at
from shardtrain.data.row_stream import RowBatch
from shardtrain.data.sources import BadRow
from shardtrain.data.tokenizers.ends import described
from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks import _files
from shardtrain.tasks._answers import AnswerTask, Side, log_probabilities, side_of
from shardtrain.tasks.task import ShownText
from shardtrain.utils.log import logger

METRICS = {"reward_accuracy": "max", "reward_margin": "max"}
DEGREES = ("tensor_parallel_degree",)
_LABELS = {"true": True, "false": False, "1": True, "0": False}
_PADDING = -1
"""Label of a padding entry of a group."""


class Answer(NamedTuple):
    """A row: a prompt with its full completion, its label, and the length to truncate sequences to.

    Sequences are truncated after completions are swapped between rows, as in TRL, because more of a
    completion fits after a shorter prompt.
    """

    side: Side
    is_good: bool
    seq_len: int

    @property
    def cut_side(self) -> Side:
        """The prompt with its completion, truncated to ``seq_len``."""
        return _cut(self.side, self.seq_len)


Group = tuple[Answer, ...]


class KTO(AnswerTask):
    """The task ``kto``."""

    @property
    def needs_reference(self) -> bool:
        # The reward is relative to the reference model.
        return True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        task = config.task
        self._size = task.group_size
        self._beta = task.beta
        self.sequences_per_row = task.group_size
        self._weights = (task.undesirable_weight, task.desirable_weight)

    def read_rows(self, split: str) -> _files.FileRows[Group]:
        """Read the files of a split, and put rows into groups. Raises what ``_files.read`` raises."""
        section, _ = _files.section_of(self.config, split)
        encode = partial(self.encode, split=split)
        single_rows: _files.FileRows[Group] = _files.read(self.config, split, encode)
        rows = [answer for (answer,) in single_rows]

        # KL depends on the composition of the groups, so they are formed here, in an order that depends
        # only on the seed.
        # Other splits keep the order of the data, so their predictions are in that order.
        order = np.arange(len(rows))
        if split == "train" and len(rows):
            order = sample_at(order, len(rows), self.config.debug.seed)
        ordered_rows = [rows[int(i)] for i in order]
        groups: _files.FileRows[Group] = _files.FileRows(_groups(ordered_rows, self._size))

        # the initial weights are the reference model, and part of the data's fingerprint
        start = self.start()
        groups.files = {**single_rows.files, **start}
        content: list[bytes | bool] = []
        for group in groups:
            for answer in group:
                side = answer.side
                content += [side.tokens.tobytes(), side.targets.tobytes(), answer.is_good]
        facts = (self.encoder.fingerprint, section.seq_len, self._size, *start.values())
        groups.fingerprint = digest(*facts, digest(*content))

        num_good = sum(answer.is_good for answer in rows)
        num_bad = len(rows) - num_good
        logger.info(described(self.tokenizer, self.config.data))
        logger.info(
            f"{split}: {num_good} good and {num_bad} bad answers, in {len(groups)} groups of up to {self._size}"
        )
        return groups

    def lengths(self, row: Group) -> list[int]:
        """Return the token count of each answer with its prompt, without the sequences that only estimate
        KL."""
        return [len(answer.cut_side.tokens) for answer in row]

    def collate(self, rows: list[Group]) -> dict[str, Tensor]:
        """Return tokens and targets (B, 2N, T), first N rows and then N sequences to estimate KL, and
        labels (B, N)."""
        size = max(len(group) for group in rows)
        sides = []
        labels = torch.full((len(rows), size), _PADDING)
        for number, group in enumerate(rows):
            matched = [answer.cut_side for answer in group]
            # pair each prompt with the completion of the previous row
            mismatched = []
            previous_rows = [group[-1], *group[:-1]]
            for answer, previous in zip(group, previous_rows, strict=True):
                exchanged = _exchanged(answer.side, previous.side)
                mismatched.append(_cut(exchanged, answer.seq_len))
            # Pad groups to the largest group of the batch. Padding rows have no target, so experts do not
            # count them.
            padding_row = matched[0]._replace(targets=np.full_like(matched[0].targets, IGNORE))
            padding = [padding_row] * (size - len(group))
            sides += [*matched, *padding, *mismatched, *padding]
            group_labels = [int(answer.is_good) for answer in group]
            labels[number, : len(group)] = torch.tensor(group_labels)

        tokens_RT, targets_RT = self.padded(sides)
        return {
            "tokens_BMT": tokens_RT.unflatten(0, (-1, 2 * size)),
            "targets_BMT": targets_RT.unflatten(0, (-1, 2 * size)),
            "labels_BN": labels,
        }

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of rows without padding."""
        return int((batch["labels_BN"] != _PADDING).sum())

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Return (B, N, 2): the reward of each row, and the KL of its group."""
        assert self.reference is not None, "the reference model is loaded before the first step"
        tokens_BMT = batch["tokens_BMT"]
        targets_BMT = batch["targets_BMT"]
        size = batch["labels_BN"].size(1)
        is_row_BN = batch["labels_BN"] != _PADDING

        def log_probs(network: nn.Module, half: slice) -> Tensor:
            tokens_RT = tokens_BMT[:, half].flatten(0, 1)
            targets_RT = targets_BMT[:, half].flatten(0, 1)
            return log_probabilities(network, tokens_RT, targets_RT).unflatten(0, (-1, size))

        # The first half of a group's entries are its rows. The second half are prompts with the completion
        # of another prompt, which estimate KL without a gradient.
        matched = slice(0, size)
        mismatched = slice(size, 2 * size)
        with torch.no_grad():
            kl_BN = log_probs(model, mismatched) - log_probs(self.reference, mismatched)
            kl_B = (kl_BN * is_row_BN).sum(1) / is_row_BN.sum(1)
            reference_BN = log_probs(self.reference, matched)
        rewards_BN = log_probs(model, matched) - reference_BN
        kl_per_row_BN = kl_B.clamp(min=0)[:, None].expand_as(rewards_BN)
        return torch.stack((rewards_BN, kl_per_row_BN), dim=-1)

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return the weighted sum over rows of the loss in the module docstring."""
        labels_BN = batch["labels_BN"]
        is_good_BN = labels_BN == 1
        # Good and bad completions differ in the sign of the exponent and in their weight.
        sign_BN = torch.where(is_good_BN, 1.0, -1.0)
        advantage_BN = outputs[..., 0] - outputs[..., 1]
        losses_BN = 1 - torch.sigmoid(self._beta * sign_BN * advantage_BN)
        weights_BN = torch.where(is_good_BN, self._weights[1], self._weights[0])
        is_row_BN = labels_BN != _PADDING
        return weight * (losses_BN * (weights_BN * is_row_BN)).sum()

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """Return the rewards and labels of each group, padded to ``task.group_size`` + 1, the largest
        group."""
        # ``_groups`` may add one row to a group.
        padding = (0, self._size + 1 - outputs.size(1))
        rewards_BN = nn.functional.pad(self._beta * outputs[..., 0].float(), padding)
        labels_BN = nn.functional.pad(batch["labels_BN"], padding, value=_PADDING)
        return {"rewards": rewards_BN, "label": labels_BN}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the share of rows with a reward of the right sign, and the mean reward of good minus bad
        answers."""
        labels = rows["label"].flatten()
        is_answer = labels != _PADDING
        rewards = rows["rewards"].flatten()[is_answer].double()
        labels = labels[is_answer]
        has_right_sign = (rewards > 0) == (labels == 1)
        accuracy = has_right_sign.double().mean()
        good = rewards[labels == 1]
        bad = rewards[labels == 0]
        margin = 0.0
        if len(good) and len(bad):
            margin = float(good.mean() - bad.mean())
        return {"reward_accuracy": float(accuracy), "reward_margin": margin}

    def step_sums(self, outputs: Tensor, batch: RowBatch) -> Tensor:
        """Return the reward sums and numbers of good and of bad answers, and the number of correct ones, (5,)."""
        labels_BN = batch["labels_BN"]
        rewards_BN = self._beta * outputs[..., 0].to(sum_dtype(outputs.device))
        sums = []
        for label in (1, 0):
            has_label_BN = (labels_BN == label).to(rewards_BN.dtype)
            sums += [(rewards_BN * has_label_BN).sum(), has_label_BN.sum()]
        has_right_sign_BN = (rewards_BN > 0) == (labels_BN == 1)
        sums.append((has_right_sign_BN & (labels_BN != _PADDING)).sum().to(rewards_BN.dtype))
        return torch.stack(sums)

    def step_metrics(self, sums: list[float]) -> dict[str, float]:
        """Return the result of ``metrics``, with the mean reward of the good and of the bad answers.

        A mean over no answers is omitted.
        """
        good, num_good, bad, num_bad, num_correct = sums
        metrics = {"reward_accuracy": num_correct / (num_good + num_bad)}
        if num_good:
            metrics["reward_chosen"] = good / num_good
        if num_bad:
            metrics["reward_rejected"] = bad / num_bad
        if num_good and num_bad:
            metrics["reward_margin"] = good / num_good - bad / num_bad
        return metrics

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """Return the rewards of a group as text."""
        rewards = row["rewards"][row["label"] != _PADDING]
        return " ".join(f"{value:.6g}" for value in rewards.tolist())

    def shown(self, row: Group) -> list[ShownText]:
        """Return each answer of a group, named by its label."""
        lines = []
        for answer in row:
            label = "good" if answer.is_good else "bad"
            lines.append(answer.cut_side.shown(label))
        return lines

    def encode(
        self, rows: Sequence[Mapping[str, Any] | BadRow], split: str
    ) -> Iterator[Group | BadRow]:
        """Tokenize rows. Yield a group with a single answer, or a BadRow, for each row."""
        section, _ = _files.section_of(self.config, split)
        seq_len = section.seq_len

        def tokenize(answers: list[tuple[dict[str, Any], bool]]) -> Iterator[Group | BadRow]:
            documents = self.encoder.encode([texts for texts, _ in answers])
            for document, (_, is_good) in zip(documents, answers, strict=True):
                cut = side_of(document, seq_len)
                if isinstance(cut, BadRow) or isinstance(document, BadRow):
                    yield cut  # type: ignore[misc]  # side_of returns a bad row as it is
                    continue
                full = side_of(document, len(document.tokens))
                assert isinstance(full, Side), "the truncated document has a target"
                yield (Answer(full, is_good, seq_len),)

        return around_bad_rows([attempt(self._read, row) for row in rows], tokenize)

    def _read(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return a row with prompt and completion for the encoder, and True if it is labeled good."""
        data = self.config.data
        field = self.config.task.label_field
        prompt = columns.column(row, data.prompt_field)
        completion = columns.column(row, data.completion_field)
        label = columns.label(row, field)
        # A prompt of messages needs its completion as a message, too.
        if isinstance(prompt, list | tuple) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        text = ""
        if isinstance(label, bool | int | str):
            text = str(label).lower()
        if text not in _LABELS:
            raise Unusable(
                f"label {str(label)[:40]!r} in column {field!r} is neither true nor false"
            )
        return {**row, "prompt": prompt, "completion": completion}, _LABELS[text]


def _groups(rows: list[Answer], size: int) -> Iterator[Group]:
    """Yield groups of ``size`` rows.

    A single last row joins the previous group, because KL needs a second row.
    """
    start = 0
    while start < len(rows):
        stop = min(start + size, len(rows))
        # A last group of one row could not be paired.
        if len(rows) - stop == 1:
            stop = len(rows)
        yield tuple(rows[start:stop])
        start = stop


def _exchanged(side: Side, other: Side) -> Side:
    """Return the prompt of ``side`` with the completion of ``other``."""
    # Target i is token i + 1. So the completion begins one token after the index of the first target.
    prompt_length = 1 + int(np.argmax(side.targets != IGNORE))
    prompt = side.all_tokens[:prompt_length]
    start = int(np.argmax(other.targets != IGNORE))
    tokens = np.concatenate((prompt, other.all_tokens[start + 1 :]))
    no_targets = np.full(len(prompt) - 1, IGNORE, dtype=np.int64)
    targets = np.concatenate((no_targets, other.targets[start:]))
    return Side(tokens[:-1], targets, int(tokens[-1]))


def _cut(side: Side, seq_len: int) -> Side:
    """Truncate to ``seq_len`` input tokens."""
    if len(side.tokens) <= seq_len:
        return side
    last = int(side.tokens[seq_len])
    return Side(side.tokens[:seq_len], side.targets[:seq_len], last)


Task = KTO
