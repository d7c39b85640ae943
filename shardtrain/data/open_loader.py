"""Open the data loader of training or validation, and warn about its options.

This is separate from ``loader.py``, which contains only code that runs in every step.
"""

from __future__ import annotations

import logging
import math

import numpy as np

from shardtrain.config.ramps import StepSizes
from shardtrain.config.schema import Config, Training, Validation
from shardtrain.data.build_dataset import DataPipeline, open_data
from shardtrain.data.loader import DataLoader, RankSlice
from shardtrain.ops import accelerator
from shardtrain.utils.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

_CHECKED_POSITIONS = 2**18
"""Number of positions to check for documents that several processes would tokenize."""


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
    sizes: StepSizes | None = None,
) -> DataLoader:
    """Open the training or validation data, at any position of their order.

    Args:
        config: the configuration.
        batch_rank: 0..num_batch_ranks-1. Tensor, context and pipeline parallel ranks that read the same
            batches pass the same number.
        num_batch_ranks: number of data-parallel ranks.
        accumulation: number of micro-batches per step.
        samples_consumed: number of samples that all ranks have read since the start of the run.
        section: config.training by default, or config.validation.
        shuffle: False keeps the order of the dataset.
        loop: True repeats the data, False ends them after one pass, and None uses the options. At the end,
            all ranks stop after the same step. Rows without targets and with the sample id -1 pad this step.
        sizes: sizes of steps that grow during the run. ``accumulation`` is then that of the last steps.

    Raises:
        ConfigError: the dataset or tokenizer is unknown or cannot be opened.
        DataError: the data cannot be read or have no targets.
    """
    section = section or config.training
    section_name = "validation" if isinstance(section, Validation) else "training"
    # Wrong ranks are a fault of the calling code, but wrong sizes are the user's.
    if not 0 <= batch_rank < num_batch_ranks:
        raise ValueError(f"batch_rank={batch_rank} is not in 0..{num_batch_ranks - 1}")
    if accumulation < 1 or samples_consumed < 0:
        raise ValueError(
            f"accumulation={accumulation} must be at least 1, samples_consumed={samples_consumed} 0"
        )
    for key in ("local_batch_size", "seq_len"):
        size = getattr(section, key)
        if size < 1:
            option = f"{section_name}.{key}"
            raise ConfigError(Problem(option, size, "must be at least 1", "use 1 or more"))
    pipeline = open_data(config, section, shuffle=shuffle, loop=loop)
    share = RankSlice(section.local_batch_size, batch_rank, num_batch_ranks, accumulation, sizes)
    if section.dataloader.pin_memory and not accelerator.pins_memory():
        logger.warning(
            "%s.dataloader.pin_memory=true has no effect without an accelerator", section_name
        )
    if any(feed.num_readers for feed in pipeline.feeds):
        _warn_duplicate_tokenization(pipeline, share, max(1, section.dataloader.num_workers))
    return DataLoader(pipeline, share, section.dataloader, samples_consumed)


def _warn_duplicate_tokenization(pipeline: DataPipeline, share: RankSlice, workers: int) -> None:
    """Warn if several processes would tokenize the same documents.

    Each process runs the virtual readers of all rows that it returns. If the rows of a reader are
    distributed over several processes, each of them tokenizes all documents of the reader. ``workers`` is
    the number of workers of each rank, at least 1.
    """
    if share.num_batch_ranks * workers == 1:
        return
    # For each of the first positions of the order, find out which worker of which rank makes its row.
    step, within = np.divmod(np.arange(_CHECKED_POSITIONS), share.global_batch)
    rank, row = np.divmod(within, share.accumulation * share.local_batch_size)
    worker = (step * share.accumulation + row // share.local_batch_size) % workers
    sources, numbers = pipeline.mixture.locate(np.arange(_CHECKED_POSITIONS))
    for index, (feed, name) in enumerate(zip(pipeline.feeds, pipeline.names, strict=True)):
        if not feed.num_readers or not (sources == index).any():
            continue
        # Count the processes per reader: the number of distinct (reader, process) pairs, divided by the
        # number of distinct readers.
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
            "dataset %s: each document is tokenized by %.1f processes, because its %d virtual readers cannot be "
            "divided evenly among ranks and workers; %sprepare the data"
        )
        logger.warning(text, name, times, feed.num_readers, fix)
