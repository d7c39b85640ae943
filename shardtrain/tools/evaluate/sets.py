"""Measure the loss of a model on a dataset. The dataset is read once, and every target token counts once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardtrain import data, models
from shardtrain.config import derived
from shardtrain.config.schema import Validation
from shardtrain.data import IGNORE
from shardtrain.data.build_dataset import format_of_rows
from shardtrain.distributed.context_parallel.cores import document_argument
from shardtrain.facts.file_kinds import dataset_of
from shardtrain.ops.cross_entropy import cross_entropy_sum
from shardtrain.tools.evaluate.evaluate_request import RowOptions
from shardtrain.tools.generate.trained_model import OpenedModel
from shardtrain.train import document_isolation, validation
from shardtrain.train.open_together import together
from shardtrain.utils.errors import ConfigError, DataError, NumericalError, Problem

_TOKENS_AT_ONCE = 2**22
_MOST_SEQ_LEN = 2048
"""Maximum of the default sequence length.

Many models support much longer sequences than an evaluation needs.
"""
_MOST_TOKENS = 2**26
"""Maximum number of tokens in a batch. The input tensors of such a batch take 1.5 GiB."""


@dataclass
class RowsRead:
    """Progress of reading a dataset.

    Attributes:
        total: Number of sequences, or None if it is unknown before reading.
    """

    rows: int = 0
    total: int | None = None

    def text(self) -> str:
        """Format the progress. Empty before the first batch.

        >>> RowsRead(1200, 14594).text(), RowsRead(1200).text(), RowsRead().text()
        ('1,200 of 14,594 sequences', '1,200 sequences', '')
        """
        if not self.rows:
            return ""
        if not self.total:
            return f"{self.rows:,} sequences"
        return f"{self.rows:,} of {self.total:,} sequences"


def section_of(path: Path, batch_size: int, seq_len: int) -> Validation:
    """Return [validation] options for a file, or for a folder of prepared tokens."""
    dataset = "tokens"
    if path.is_file():
        dataset = dataset_of(path.name) or ""
    return Validation(
        dataset=dataset,
        dataset_path=str(path),
        split="train",
        local_batch_size=batch_size,
        seq_len=seq_len,
    )


def seq_len_of(opened: OpenedModel, rows: RowOptions) -> int:
    """Return the requested sequence length, or the run's, limited to 2048 and a multiple of the ranks."""
    if rows.seq_len is not None:
        return rows.seq_len
    width = opened.width
    limited = min(opened.config.training.seq_len, _MOST_SEQ_LEN)
    return max(width, limited // width * width)


def section_of_run(opened: OpenedModel) -> Validation:
    """Return the run's [validation] for one reader, which reads the rows of all its data-parallel ranks."""
    section = validation.section(opened.config, opened.num_ranks)
    if section.steps < 0:
        return section
    readers = max(1, derived.data_parallel_degree(opened.config, opened.num_ranks))
    return dataclasses.replace(section, steps=section.steps * readers)


def row_by_row(opened: OpenedModel, section: Validation, options: Mapping[str, Any]) -> OpenedModel:
    """Return the model with the [data] options for a dataset other than the run's. Collective.

    Each row has its own sequence, so the order of the rows does not matter. A row longer than a sequence
    continues in the next one. ``data.format`` is detected from the columns. ``options`` override these
    defaults.
    """
    defaults = {"packing": "padded", "long_documents": "split", "document_mask": "auto"}
    opened = opened.with_data(**{**defaults, **options})
    if "format" in options:
        return opened
    config = dataclasses.replace(opened.config, validation=section)
    with together(config):
        return opened.with_data(format=format_of_rows(config, section))


def measure(
    opened: OpenedModel, section: Validation, progress: RowsRead | None = None
) -> dict[str, float | int | None]:
    """Return the mean loss per target token in nats, the perplexity, and bits per byte of the text. Collective.

    Every rank reads all rows, because each layer is split over all ranks. ``progress`` is updated. At most
    ``section.steps`` batches are read, or all if it is negative. A perplexity too large for a float is None.

    Raises:
        ConfigError: sequences cannot be split over the ranks, or the dataset cannot be opened.
        DataError: the dataset has no target token.
        NumericalError: the loss is not finite.
    """
    progress = progress or RowsRead()
    # Report a missing tokenizer before opening the data.
    text = _Bytes(opened.tokenizer)
    _check_size(section, opened.width)
    config = dataclasses.replace(opened.config, validation=section)
    with together(config):
        stream = data.open_dataloader(
            config,
            section=section,
            batch_rank=0,
            num_batch_ranks=1,
            accumulation=1,
            shuffle=False,
            loop=False,
        )
    if stream.masks_documents:
        document_isolation.check(opened.model, models.find(config.model.name))
    device = next(opened.model.parameters()).device
    progress.total = stream.num_samples
    num_batches = None if section.steps < 0 else section.steps

    # Keep the sum on the device, in float64. Reading it in each step would synchronize with the device.
    loss = torch.zeros((), dtype=torch.float64, device=device)
    num_tokens = 0
    with torch.inference_mode():
        for batch in itertools.islice(stream, num_batches):
            on_device = _without_filler(batch, opened.width).to(device)
            documents = document_argument([on_device])
            logits_BTV = opened.model(on_device.tokens_BT, on_device.positions_BT, **documents)
            loss += cross_entropy_sum(logits_BTV, on_device.targets_BT)
            num_tokens += batch.num_targets
            progress.rows += batch.num_rows
            text.add(batch.targets_BT[batch.targets_BT != IGNORE].tolist())
    # This stops the workers that prefetch batches.
    stream.seek(0)

    if not num_tokens:
        raise DataError(
            f"{section.dataset_path}: none of the {progress.rows} sequences has a target token; use other data"
        )
    loss_sum = loss.item()
    mean = loss_sum / num_tokens
    if not math.isfinite(mean):
        raise NumericalError(
            f"the loss on {section.dataset_path} is {mean}; compute in another --dtype"
        )
    perplexity = None
    if mean < 709:  # exp(710) is infinite in float64
        perplexity = math.exp(mean)
    num_bytes = text.count()
    bits_per_byte = None
    if num_bytes:
        bits = loss_sum / math.log(2)
        bits_per_byte = bits / num_bytes
    return {
        "loss": mean,
        "perplexity": perplexity,
        "bits_per_byte": bits_per_byte,
        "tokens": num_tokens,
        "bytes": num_bytes,
        "rows": stream.num_documents,
        "sequences": progress.rows,
    }


def _check_size(section: Validation, width: int) -> None:
    """Raise ConfigError if sequences cannot be split over the ranks, or a batch would be too large."""
    if section.seq_len % width:
        raise ConfigError(
            Problem(
                "validation.seq_len",
                section.seq_len,
                rule=f"is not a multiple of {width}, the number of ranks over which sequences are split",
                fix="use --data and --seq_len",
            )
        )
    if section.seq_len * section.local_batch_size > _MOST_TOKENS:
        raise ConfigError(
            Problem(
                "validation.seq_len",
                section.seq_len,
                rule=f"with {section.local_batch_size} rows per batch exceeds {_MOST_TOKENS:,} tokens",
                fix="use shorter sequences, or fewer rows per batch",
            )
        )


def _without_filler(batch: data.Batch, width: int) -> data.Batch:
    """Trim a batch to its longest row, rounded up to a multiple of ``width``.

    Causal attention ignores padding.
    """
    if batch.lengths_B is None or batch.documents_BT is not None:
        return batch
    longest = int(batch.lengths_B.max())
    length = math.ceil(longest / width) * width
    return dataclasses.replace(
        batch,
        tokens_BT=batch.tokens_BT[:, :length].contiguous(),
        targets_BT=batch.targets_BT[:, :length].contiguous(),
        positions_BT=batch.positions_BT[:, :length].contiguous(),
    )


class _Bytes:
    """Counts the bytes of the target text. A character may be split between two rows."""

    def __init__(self, tokenizer: data.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._total = 0
        self._ids: list[int] = []

    def add(self, ids: Iterable[int]) -> None:
        for number in ids:
            self._ids.append(number)
            # Decode at the end of a document, where no character is incomplete, or to bound memory.
            if number == self._tokenizer.eos_id or len(self._ids) >= _TOKENS_AT_ONCE:
                self._spell()

    def count(self) -> int:
        self._spell()
        return self._total

    def _spell(self) -> None:
        if self._ids:
            self._total += len(self._tokenizer.decode(self._ids).encode())
        self._ids = []
