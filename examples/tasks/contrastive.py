"""Embedding models: pull a text and its positive together, and push all other texts away (InfoNCE, van den Oord
et al. 2018, with the negatives of all ranks).

A row has the columns ``anchor`` and ``positive``. The optional column ``negative`` is a text or a list of texts, and
all rows must have the same number of negatives. Texts get the special tokens that their tokenizer adds. The embedding
of a text is the mean of its hidden states in the last layer, or the hidden state of its last token. It is normalized.
For each anchor, the candidates are the positives and negatives of all rows of the step, on all data-parallel ranks.
The loss equals MultipleNegativesRankingLoss of sentence-transformers with the scale 1 / temperature.

After ``shardtrain export``, this command writes the additional files that sentence-transformers reads:

    python examples/tasks/contrastive.py FOLDER --pooling mean
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.config.schema import Config
from shardtrain.config.schema.data_options import END_OPTIONS
from shardtrain.data.digest import digest
from shardtrain.data.documents import columns
from shardtrain.data.documents.bad_rows import around_bad_rows, attempt
from shardtrain.data.filler import filler_documents
from shardtrain.data.row_stream import RowBatch
from shardtrain.data.sources import BadRow
from shardtrain.models.moe import has_experts
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks import _files
from shardtrain.tasks.text_task import TextTask
from shardtrain.utils.errors import ConfigError, DataError, Problem

METRICS = {"accuracy_at_1": "max", "mean_reciprocal_rank": "max"}
DEGREES = ()
POOLINGS = ("mean", "last")
DEFAULTS = {"pooling": "mean", "temperature": 0.05}

Texts = list[np.ndarray]
"""A row: the tokens of the anchor, the positive and the negatives."""


class Contrastive(TextTask):
    """The task. Outputs are embeddings (B, C, D) of the C texts of each row."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options = {**DEFAULTS, **config.task.options}
        self.pooling = options["pooling"]
        self.temperature = options["temperature"]
        unknown = sorted(set(options) - set(DEFAULTS))
        if unknown:
            names = ", ".join(DEFAULTS)
            raise _problem(unknown[0], options[unknown[0]], "is unknown", f"use {names}")
        if self.pooling not in POOLINGS:
            raise _problem("pooling", self.pooling, "is unknown", 'use "mean" or "last"')
        is_number = isinstance(self.temperature, int | float)
        if not is_number or not self.temperature > 0:
            fix = "use a number such as 0.05"
            raise _problem("temperature", self.temperature, "must be a number above 0", fix)
        for name in END_OPTIONS:
            value = getattr(config.data, name)
            if value is not None:
                rule = "would add tokens that sentence-transformers does not add"
                raise ConfigError(Problem(f"data.{name}", value, rule, "remove it"))
        # Ranks exchange tensors of equal size. A rank with fewer rows adds padding rows.
        self._num_rows = max(config.training.local_batch_size, config.validation.local_batch_size)

    def adapt(self, model, layout):
        returns_head_output = getattr(type(model).forward, "gives_output_of_head", False)
        if not returns_head_output or not isinstance(getattr(model, "head", None), nn.Linear):
            rule = "names a model whose forward does not return the output of its linear `head`"
            raise ConfigError(Problem("model.name", self.config.model.name, rule, "use a decoder"))
        return super().adapt(model, layout)

    def open_dataloader(self, *, accumulation: int, section=None, **arguments):
        # Negatives come from one batch, so accumulation would change the loss.
        if accumulation > 1:
            raise ConfigError(
                Problem(
                    "training.global_batch_size",
                    self.config.training.global_batch_size,
                    rule=f"requires {accumulation} micro-batches, whose rows are not negatives of each other",
                    fix="use more ranks, or raise training.local_batch_size",
                )
            )
        return super().open_dataloader(accumulation=accumulation, section=section, **arguments)

    def read_rows(self, split: str):
        section, _ = _files.section_of(self.config, split)
        rows = _files.read(self.config, split, partial(self.encode, split=split))
        for number, row in enumerate(rows):
            if len(row) != len(rows[0]):
                raise DataError(
                    f"{split} row {number} has {len(row) - 2} negatives, and row 0 has {len(rows[0]) - 2}; "
                    "all rows must have the same number of negatives"
                )
        content = (tokens.tobytes() for row in rows for tokens in row)
        rows.fingerprint = digest(self.tokenizer.fingerprint, section.seq_len, digest(*content))
        return rows

    def encode(
        self, rows: Sequence[Mapping[str, Any] | BadRow], split: str
    ) -> Iterator[Texts | BadRow]:
        section, _ = _files.section_of(self.config, split)
        prefix = self.tokenizer.prefix_ids
        suffix = self.tokenizer.suffix_ids

        def tokenize(good_rows: list[list[str]]) -> Iterator[Texts | BadRow]:
            all_texts = [text for texts in good_rows for text in texts]
            all_ids = iter(self.tokenizer.encode_batch(all_texts))
            # The ids of all texts are in one list. Divide them into rows again.
            for texts in good_rows:
                row = []
                for _ in texts:
                    ids = [*prefix, *next(all_ids).tolist()]
                    ids = [*ids[: section.seq_len - len(suffix)], *suffix]
                    row.append(np.array(ids, dtype=np.int32))
                if all(len(ids) for ids in row):
                    yield row
                else:
                    yield BadRow("a text is empty, and the tokenizer adds no token")

        return around_bad_rows([attempt(read_texts, row) for row in rows], tokenize)

    def lengths(self, row: Texts) -> list[int]:
        return [len(tokens) for tokens in row]

    def collate(self, rows: list[Texts]) -> dict[str, Tensor]:
        longest = max(len(tokens) for row in rows for tokens in row)
        tokens_BCT = torch.zeros(len(rows), len(rows[0]), longest, dtype=torch.int64)
        lengths_BC = torch.zeros(len(rows), len(rows[0]), dtype=torch.int64)
        for b, row in enumerate(rows):
            for c, tokens in enumerate(row):
                tokens_BCT[b, c, : len(tokens)] = torch.from_numpy(tokens)
                lengths_BC[b, c] = len(tokens)
        return {"tokens_BCT": tokens_BCT, "lengths_BC": lengths_BC}

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        tokens_RT = batch["tokens_BCT"].flatten(0, 1)
        lengths_R = batch["lengths_BC"].flatten()
        positions_RT = torch.arange(tokens_RT.size(1), device=tokens_RT.device).expand_as(tokens_RT)
        # Mark padding only for experts, which must not count it. Attention is causal, so no token sees the padding
        # after it.
        documents = {}
        if has_experts(model):
            documents["documents_BT"] = filler_documents(lengths_R, positions_RT)
        # Let the head return its input, the hidden states. It must be called, because FSDP gathers its weights there.
        model.head.forward = lambda hidden: hidden
        try:
            hidden_RTD = model(tokens_RT, positions_RT, **documents).float()
        finally:
            del model.head.forward
        # Pool the hidden states of each text.
        if self.pooling == "last":
            rows_R = torch.arange(len(lengths_R), device=tokens_RT.device)
            pooled_RD = hidden_RTD[rows_R, lengths_R - 1]
        else:
            is_token_RT1 = (positions_RT < lengths_R[:, None])[..., None]
            pooled_RD = (hidden_RTD * is_token_RT1).sum(1) / lengths_R[:, None]
        return F.normalize(pooled_RD, dim=-1).unflatten(0, (-1, batch["lengths_BC"].size(1)))

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        anchors_BD = outputs[:, 0]
        B, C, _ = outputs.shape
        is_row_B = batch.sample_ids_B.to(outputs.device) >= 0

        # Gather the candidates of all ranks, (ranks * rows * (C - 1), D). Padding rows are no candidates.
        missing = self._num_rows - B
        candidates_BCD = F.pad(outputs[:, 1:], (0, 0, 0, 0, 0, missing))
        candidates_ND = AllGather.apply(candidates_BCD).flatten(0, -2)
        is_row_N = AllGather.apply(F.pad(is_row_B.int(), (0, missing))).flatten() > 0
        is_row_N = is_row_N.repeat_interleave(C - 1)

        # The target of an anchor is the index of its positive among the candidates.
        scores_BN = anchors_BD @ candidates_ND.T / self.temperature
        scores_BN = scores_BN.masked_fill(~is_row_N, -torch.inf)
        first_row = _rank() * self._num_rows
        positives_B = (first_row + torch.arange(B, device=outputs.device)) * (C - 1)
        # Padding rows have no target.
        positives_B = positives_B.masked_fill(~is_row_B, IGNORE)
        losses = F.cross_entropy(scores_BN, positives_B, reduction="sum", ignore_index=IGNORE)
        return weight * losses

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        return {"anchor": outputs[:, 0], "positive": outputs[:, 1]}

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Rank the positive of each anchor among all positives of the set."""
        hits = 0
        reciprocals = 0.0
        for start in range(0, len(rows["anchor"]), 1024):
            scores = rows["anchor"][start : start + 1024] @ rows["positive"].T
            own = scores.diagonal(start)[:, None]
            ranks = (scores > own).sum(1) + 1
            hits += int((ranks == 1).sum())
            reciprocals += float((1 / ranks).sum())
        total = max(1, len(rows["anchor"]))
        return {"accuracy_at_1": hits / total, "mean_reciprocal_rank": reciprocals / total}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        return f"{float(row['anchor'] @ row['positive']):.6f}"


Task = Contrastive


class AllGather(torch.autograd.Function):
    """Stack the tensors of all ranks. Backward sums the gradients of a rank's tensor over all ranks."""

    @staticmethod
    def forward(ctx, local: Tensor) -> Tensor:
        if not dist.is_initialized():
            return local[None]
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        if not dist.is_initialized():
            return gradient[0]
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[_rank()]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def read_texts(row: Mapping[str, Any]) -> list[str]:
    """Return the anchor, the positive and the negatives of a row."""
    texts = [columns.text(row, "anchor"), columns.text(row, "positive")]
    negatives = columns.find(row, "negative")
    if negatives is None:
        return texts
    if isinstance(negatives, str):
        negatives = [negatives]
    if not isinstance(negatives, list) or not all(isinstance(text, str) for text in negatives):
        raise columns.Unusable("negative is not a text or a list of texts")
    return texts + negatives


def _problem(name: str, value: Any, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem(f"task.options.{name}", value, rule, fix))


def write_modules(folder: Path, pooling: str) -> None:
    """Write the files that describe the network, the pooling and the normalization to sentence-transformers."""
    hidden_size = json.loads((folder / "config.json").read_text())["hidden_size"]
    modules = []
    for number, (path, kind) in enumerate(
        [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    ):
        entry = {"idx": number, "name": str(number), "path": path}
        modules.append({**entry, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir(exist_ok=True)
    config = {
        "word_embedding_dimension": hidden_size,
        "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_lasttoken": pooling == "last",
        "pooling_mode_cls_token": False,
    }
    (folder / "modules.json").write_text(json.dumps(modules, indent=2))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=write_modules.__doc__)
    parser.add_argument("folder", type=Path, help="folder that shardtrain export wrote")
    parser.add_argument("--pooling", choices=POOLINGS, default=DEFAULTS["pooling"])
    given = parser.parse_args()
    if not (given.folder / "config.json").is_file():
        parser.error(
            f"{given.folder} has no config.json; pass a folder that shardtrain export wrote"
        )
    write_modules(given.folder, given.pooling)
