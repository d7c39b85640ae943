"""Whether several processes tokenize the same documents, as each runs the readers of all its rows."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardtrain.data.build_dataset import DataPipeline
    from shardtrain.data.loader import RankSlice

logger = logging.getLogger(__name__)

_POSITIONS_LOOKED_AT = 2**18


def warn_duplicate_tokenization(opened: DataPipeline, share: RankSlice, workers: int) -> None:
    """Warn of it, by the first 262,144 positions of the order; ``workers`` are those of each rank, at least 1."""
    if share.num_batch_ranks * workers == 1 or not any(feed.num_readers for feed in opened.feeds):
        return
    step, within = np.divmod(np.arange(_POSITIONS_LOOKED_AT), share.global_batch)
    rank, row = np.divmod(within, share.accumulation * share.local_batch_size)
    worker = (step * share.accumulation + row // share.local_batch_size) % workers
    sources, numbers = opened.mixture.locate(np.arange(_POSITIONS_LOOKED_AT))
    for index, (feed, name) in enumerate(zip(opened.feeds, opened.names, strict=True)):
        if not feed.num_readers or not (sources == index).any():
            continue
        readers = (numbers % feed.num_readers)[sources == index]
        processes = (rank * workers + worker)[sources == index]
        times = len(np.unique(readers * (share.num_batch_ranks * workers) + processes)) / len(np.unique(readers))
        if times > 1:
            multiple = share.global_batch * workers // math.gcd(workers, share.accumulation)
            fix = f"make data.readers a multiple of {multiple}, or " if len(opened.feeds) == 1 else ""
            text = (
                "dataset %s: each document is tokenized by %.1f processes, as its %d virtual readers do not go evenly "
                "into ranks and workers; %sprepare the data"
            )
            logger.warning(text, name, times, feed.num_readers, fix)
