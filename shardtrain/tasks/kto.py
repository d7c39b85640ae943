"""Answers that were good or bad, each alone: KTO (Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and
8).

A row has a prompt, a completion and a label: true for a good one. Its reward is how much likelier the
completion has become than under the reference, the model as the run began. A good one's loss is
desirable_weight times (1 - sigmoid( beta (reward - KL))), a bad one's undesirable_weight times (1 -
sigmoid(beta (KL - reward))), summed over rows and divided once by the rows of the whole step.

KL is an estimate, of which no gradient is taken: over a group of ``task.group_size`` rows the mean reward
of prompts with the completion of the row before, at least 0. Others take the rows of a micro-batch for
that; here groups are made when the data are read, in an order drawn from debug.seed for training, and dealt
whole. So an entry of a batch is a group, and neither ranks nor accumulation change a number. With
``training.local_batch_size`` 1 and as many rows in a group as others have in a batch, the loss is theirs.
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
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks import _files
from shardtrain.tasks._answers import AnswerTask, Side, log_probabilities, side_of
from shardtrain.tasks.task import ShownText
from shardtrain.utils.log import logger

METRICS = {"reward_accuracy": "max", "reward_margin": "max"}
DEGREES = ("tensor_parallel_degree",)
_WORDS = {"true": True, "false": False, "1": True, "0": False}
_NOTHING = -1
"""The label of an entry that only fills up a group."""


class Answer(NamedTuple):
    """One row: a prompt with its whole completion, True if that is good, and the length to cut sequences to.

    The completion is cut after it was exchanged: with a shorter prompt more of it fits, as in TRL.
    """

    side: Side
    is_good: bool
    seq_len: int

    @property
    def cut_side(self) -> Side:
        """The prompt with as much of its completion as fits."""
        return _cut(self.side, self.seq_len)


Group = tuple[Answer, ...]


class KTO(AnswerTask):
    """The task ``kto``; ``reference`` is the frozen model, put there before the first step."""

    needs_reference = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        task = config.task
        self._size = task.group_size
        self._beta = task.beta
        self.sequences_per_row = task.group_size
        self._weights = (task.undesirable_weight, task.desirable_weight)

    def read_rows(self, split: str) -> _files.FileRows[Group]:
        """Read the files of a split and put rows into groups; raises what ``_files.read`` does."""
        section, _ = _files.section_of(self.config, split)
        lone: _files.FileRows[Group] = _files.read(self.config, split, partial(self.encode, split=split))
        rows = [answer for (answer,) in lone]

        # Groups are made here, of rows in an order that the seed alone decides: who is in a group with whom
        # decides KL.
        order = np.arange(len(rows))
        if split == "train" and len(rows):
            order = sample_at(order, len(rows), self.config.debug.seed)
        groups: _files.FileRows[Group] = _files.FileRows(_groups([rows[int(i)] for i in order], self._size))

        # The weights that a run begins with are the reference, and part of what its data are.
        start = self.start()
        groups.files = {**lone.files, **start}
        content: list[bytes | bool] = []
        for group in groups:
            for answer in group:
                content += [answer.side.tokens.tobytes(), answer.side.targets.tobytes(), answer.is_good]
        groups.fingerprint = digest(
            self.encoder.fingerprint, section.seq_len, self._size, *start.values(), digest(*content)
        )

        good = sum(answer.is_good for answer in rows)
        bad = len(rows) - good
        logger.info(described(self.tokenizer, self.config.data))
        logger.info(f"{split}: {good} good and {bad} bad answers, in {len(groups)} groups of up to {self._size}")
        return groups

    def lengths(self, row: Group) -> list[int]:
        """Return the tokens of each answer with its prompt, without those that only estimate KL."""
        return [len(answer.cut_side.tokens) for answer in row]

    def collate(self, rows: list[Group]) -> dict[str, Tensor]:
        """Tokens and targets (B, 2N, T), those of N rows and then those that estimate KL, and labels (B,
        N)."""
        size = max(len(group) for group in rows)
        sides = []
        labels = torch.full((len(rows), size), _NOTHING)
        for number, group in enumerate(rows):
            own = [answer.cut_side for answer in group]
            mixed = []
            for answer, before in zip(group, [group[-1], *group[:-1]], strict=True):
                mixed.append(_cut(_exchanged(answer.side, before.side), answer.seq_len))
            # Groups are filled up to the largest of the batch, by a row without a target, so that experts
            # know it for filler: how much there is depends on who shares a batch.
            filler = [own[0]._replace(targets=np.full_like(own[0].targets, IGNORE))] * (size - len(group))
            sides += [*own, *filler, *mixed, *filler]
            labels[number, : len(group)] = torch.tensor([int(answer.is_good) for answer in group])

        tokens_RT, targets_RT = self.padded(sides)
        return {
            "tokens_BMT": tokens_RT.unflatten(0, (-1, 2 * size)),
            "targets_BMT": targets_RT.unflatten(0, (-1, 2 * size)),
            "labels_BN": labels,
        }

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Rows."""
        return int((batch["labels_BN"] != _NOTHING).sum())

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Rewards of the rows and their group's KL, (B, N, 2)."""
        assert self.reference is not None, "the reference is opened before the first step"
        tokens_BMT = batch["tokens_BMT"]
        targets_BMT = batch["targets_BMT"]
        size = batch["labels_BN"].size(1)
        is_row_BN = batch["labels_BN"] != _NOTHING

        def of(which: nn.Module, part: slice) -> Tensor:
            tokens_RT = tokens_BMT[:, part].flatten(0, 1)
            targets_RT = targets_BMT[:, part].flatten(0, 1)
            return log_probabilities(which, tokens_RT, targets_RT).unflatten(0, (-1, size))

        # The first half of a group's entries are its rows, the second those that estimate KL: how much
        # likelier a completion of another prompt has become. No gradient is taken of the estimate.
        own = slice(0, size)
        mixed = slice(size, 2 * size)
        with torch.no_grad():
            kl_BN = of(model, mixed) - of(self.reference, mixed)
            kl_B = (kl_BN * is_row_BN).sum(1) / is_row_BN.sum(1)
            before_BN = of(self.reference, own)
        rewards_BN = of(model, own) - before_BN
        return torch.stack((rewards_BN, kl_B.clamp(min=0)[:, None].expand_as(rewards_BN)), dim=-1)

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """1 - sigmoid of how far rewards are on their side of KL, weighted, over rows."""
        labels_BN = batch["labels_BN"]
        sign_BN = torch.where(labels_BN == 1, 1.0, -1.0)
        losses_BN = 1 - torch.sigmoid(self._beta * sign_BN * (outputs[..., 0] - outputs[..., 1]))
        weights_BN = torch.where(labels_BN == 1, self._weights[1], self._weights[0]) * (labels_BN != _NOTHING)
        return weight * (losses_BN * weights_BN).sum()

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """The rewards of each group's rows and their labels, filled up to ``task.group_size`` + 1."""
        missing = self._size + 1 - outputs.size(1)
        rewards_BN = nn.functional.pad(self._beta * outputs[..., 0].float(), (0, missing))
        return {"rewards": rewards_BN, "label": nn.functional.pad(batch["labels_BN"], (0, missing), value=_NOTHING)}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Share of rows whose reward has the sign of their label, and by how much good ones have more on
        average."""
        labels = rows["label"].flatten()
        rewards = rows["rewards"].flatten()[labels != _NOTHING].double()
        labels = labels[labels != _NOTHING]
        right = ((rewards > 0) == (labels == 1)).double().mean()
        good = rewards[labels == 1]
        bad = rewards[labels == 0]
        margin = float(good.mean() - bad.mean()) if len(good) and len(bad) else 0.0
        return {"reward_accuracy": float(right), "reward_margin": margin}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """The rewards of a group."""
        return " ".join(f"{value:.6g}" for value in row["rewards"][row["label"] != _NOTHING].tolist())

    def shown(self, row: Group) -> list[ShownText]:
        """Each row of a group, by its label."""
        return [one.cut_side.shown("good" if one.is_good else "bad") for one in row]

    def encode(self, rows: Sequence[Mapping[str, Any] | BadRow], split: str) -> Iterator[Group | BadRow]:
        """Tokenize rows. Yield for each row a group with a single answer, or a BadRow."""
        seq_len = _files.section_of(self.config, split)[0].seq_len

        def tokenize(answers: list[tuple[dict[str, Any], bool]]) -> Iterator[Group | BadRow]:
            documents = self.encoder.encode([texts for texts, _ in answers])
            for document, (_, is_good) in zip(documents, answers, strict=True):
                cut = side_of(document, seq_len)
                if isinstance(cut, BadRow) or isinstance(document, BadRow):
                    yield cut  # type: ignore[misc]  # side_of returns a bad row as it is
                    continue
                whole = side_of(document, len(document.tokens))
                assert isinstance(whole, Side), "its first tokens have a target"
                yield (Answer(whole, is_good, seq_len),)

        return around_bad_rows([attempt(self._read, row) for row in rows], tokenize)

    def _read(self, row: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        data = self.config.data
        field = self.config.task.label_field
        prompt = columns.column(row, data.prompt_field)
        completion = columns.column(row, data.completion_field)
        label = columns.label(row, field)
        if isinstance(prompt, list | tuple) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        word = str(label).lower() if isinstance(label, bool | int | str) else ""
        if word not in _WORDS:
            raise Unusable(f"label {str(label)[:40]!r} in column {field!r} is neither true nor false")
        return {**row, "prompt": prompt, "completion": completion}, _WORDS[word]


def _groups(rows: list[Answer], size: int) -> Iterator[Group]:
    """Rows, ``size`` to a group; one that would be alone joins the group before it, to exchange completions
    with."""
    start = 0
    while start < len(rows):
        stop = len(rows) if len(rows) - start == size + 1 else min(start + size, len(rows))
        yield tuple(rows[start:stop])
        start = stop


def _exchanged(side: Side, other: Side) -> Side:
    """The prompt of one with the completion of another."""
    prompt = side.whole[: 1 + int(np.argmax(side.targets != IGNORE))]
    start = int(np.argmax(other.targets != IGNORE))
    tokens = np.concatenate((prompt, other.whole[start + 1 :]))
    targets = np.concatenate((np.full(len(prompt) - 1, IGNORE, dtype=np.int64), other.targets[start:]))
    return Side(tokens[:-1], targets, int(tokens[-1]))


def _cut(side: Side, seq_len: int) -> Side:
    """At most ``seq_len`` tokens; of a prompt that fills them the last learned token is kept at least."""
    if len(side.tokens) <= seq_len:
        return side
    return Side(side.tokens[:seq_len], side.targets[:seq_len], int(side.tokens[seq_len]))


Task = KTO
