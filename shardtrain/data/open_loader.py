"""The data of training or of validation, opened for one rank."""

from __future__ import annotations

import logging

from shardtrain.config.schema import Config, Training, Validation
from shardtrain.data.build_dataset import open_data
from shardtrain.data.loader import DataLoader, RankSlice
from shardtrain.data.tokenization_work import warn_duplicate_tokenization
from shardtrain.ops import accelerator
from shardtrain.utils.errors import ConfigError, Problem

logger = logging.getLogger(__name__)


def open_dataloader(
    config: Config,
    *,
    batch_rank: int,
    num_batch_ranks: int,
    accumulation: int,
    samples_consumed: int = 0,
    section: Training | Validation | None = None,
    shuffle: bool = True,
    loop: bool | None = None,
) -> DataLoader:
    """Open the data of training or validation, and seek to any point of their order at once.

    Ranks that share a batch (tensor, context and pipeline peers) pass the same ``batch_rank``, 0..num_batch_ranks-1.
    ``accumulation`` is the number of micro-batches per step. ``samples_consumed`` counts samples over all ranks since
    the start of the run. ``section`` is config.training unless config.validation is passed. Without ``shuffle`` rows
    come in the order of the dataset. ``loop`` repeats the data or ends them after one pass, whatever the options say;
    at the end all ranks stop at the same step, which is filled up with rows that have no targets and sample id -1.

    Raises:
        ConfigError: when the dataset or tokenizer is unknown or cannot be opened.
        DataError: when the data cannot be read or have no targets.
    """
    section = section or config.training
    word = "validation" if isinstance(section, Validation) else "training"
    if not 0 <= batch_rank < num_batch_ranks:
        raise ValueError(f"batch_rank={batch_rank} is not in 0..{num_batch_ranks - 1}")
    if accumulation < 1 or samples_consumed < 0:
        raise ValueError(f"accumulation={accumulation} must be at least 1, samples_consumed={samples_consumed} 0")
    for key in ("local_batch_size", "seq_len"):
        if getattr(section, key) < 1:
            raise ConfigError(Problem(f"{word}.{key}", getattr(section, key), "must be at least 1", "use 1 or more"))
    opened = open_data(config, section, shuffle=shuffle, loop=loop)
    share = RankSlice(section.local_batch_size, batch_rank, num_batch_ranks, accumulation)
    if section.dataloader.pin_memory and not accelerator.pins_memory():
        logger.warning("%s.dataloader.pin_memory=true has no effect without an accelerator", word)
    if any(feed.num_readers for feed in opened.feeds):
        warn_duplicate_tokenization(opened, share, max(1, section.dataloader.num_workers))
    return DataLoader(opened, share, section.dataloader, samples_consumed)
