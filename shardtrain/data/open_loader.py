"""Opening the data loader of training or validation, with warnings about its options.

Separate from ``loader.py``, which every step runs.
"""

from __future__ import annotations

import logging
import math

import numpy as np

from shardtrain.config.schema import Config, Training, Validation
from shardtrain.data.build_dataset import DataPipeline, open_data
from shardtrain.data.loader import DataLoader, RankSlice
from shardtrain.ops import accelerator
from shardtrain.utils.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

_CHECKED_POSITIONS = 2**18
"""Positions of the order that are inspected for documents that several processes would tokenize."""


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
    """Open the training or validation data, at any position of their order.

    Args:
        batch_rank: 0..num_batch_ranks-1. Ranks that share a batch (tensor, context and pipeline peers) pass
            the same number.
        accumulation: number of micro-batches per step.
        samples_consumed: samples over all ranks since the start of the run.
        section: config.training by default, or config.validation.
        shuffle: False keeps the order of the dataset.
        loop: True repeats the data and False ends them after one pass; None uses the options. All ranks
            stop at the same step, which is padded with rows that have no targets and sample id -1.

    Raises:
        ConfigError: the dataset or tokenizer is unknown or cannot be opened.
        DataError: the data cannot be read or have no targets.
    """
    section = section or config.training
    word = "validation" if isinstance(section, Validation) else "training"
    if not 0 <= batch_rank < num_batch_ranks:
        raise ValueError(f"batch_rank={batch_rank} is not in 0..{num_batch_ranks - 1}")
    if accumulation < 1 or samples_consumed < 0:
        raise ValueError(
            f"accumulation={accumulation} must be at least 1, samples_consumed={samples_consumed} 0"
        )
    for key in ("local_batch_size", "seq_len"):
        if getattr(section, key) < 1:
            raise ConfigError(
                Problem(
                    f"{word}.{key}",
                    getattr(section, key),
                    rule="must be at least 1",
                    fix="use 1 or more",
                )
            )
    pipeline = open_data(config, section, shuffle=shuffle, loop=loop)
    share = RankSlice(section.local_batch_size, batch_rank, num_batch_ranks, accumulation)
    if section.dataloader.pin_memory and not accelerator.pins_memory():
        logger.warning("%s.dataloader.pin_memory=true has no effect without an accelerator", word)
    if any(feed.num_readers for feed in pipeline.feeds):
        _warn_duplicate_tokenization(pipeline, share, max(1, section.dataloader.num_workers))
    return DataLoader(pipeline, share, section.dataloader, samples_consumed)


def _warn_duplicate_tokenization(pipeline: DataPipeline, share: RankSlice, workers: int) -> None:
    """Warn if several processes tokenize the same documents, because each runs the virtual readers of all
    its rows.

    ``workers`` is the number of workers of each rank, at least 1.
    """
    if share.num_batch_ranks * workers == 1:
        return
    # Which rank, and which of its workers, makes the row at each of the first positions of the order.
    step, within = np.divmod(np.arange(_CHECKED_POSITIONS), share.global_batch)
    rank, row = np.divmod(within, share.accumulation * share.local_batch_size)
    worker = (step * share.accumulation + row // share.local_batch_size) % workers
    sources, numbers = pipeline.mixture.locate(np.arange(_CHECKED_POSITIONS))
    for index, (feed, name) in enumerate(zip(pipeline.feeds, pipeline.names, strict=True)):
        if not feed.num_readers or not (sources == index).any():
            continue
        # Distinct pairs of reader and process, over distinct readers: how many processes run each reader.
        is_of_source = sources == index
        readers = (numbers % feed.num_readers)[is_of_source]
        processes = (rank * workers + worker)[is_of_source]
        pairs = readers * (share.num_batch_ranks * workers) + processes
        times = len(np.unique(pairs)) / len(np.unique(readers))
        if times <= 1:
            continue
        fix = ""
        if len(pipeline.feeds) == 1:
            multiple = share.global_batch * workers // math.gcd(workers, share.accumulation)
            fix = f"make data.readers a multiple of {multiple}, or "
        text = (
            "dataset %s: each document is tokenized by %.1f processes, "
            "as its %d virtual readers do not go evenly into ranks and workers; %sprepare the data"
        )
        logger.warning(text, name, times, feed.num_readers, fix)
