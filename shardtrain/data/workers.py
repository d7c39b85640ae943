"""Read the items of a dataset in order, in this process or in worker processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from typing import TypeVar

import torch

from shardtrain.config.schema import DataLoaderOptions
from shardtrain.utils import library_environment, limits
from shardtrain.utils.errors import DataError

T = TypeVar("T")


def in_order(items: torch.utils.data.Dataset[T], options: DataLoaderOptions) -> Iterator[T]:
    """Yield the items 0, 1, 2, ... forever. Worker processes end with the iterator."""
    if not options.num_workers:
        return map(items.__getitem__, itertools.count())
    threads = limits.WORKER_THREADS * options.num_workers
    limits.require_threads(
        threads, f"{options.num_workers} data workers", "training.dataloader.num_workers"
    )
    # Fork workers on Linux, so they inherit datasets and tokenizers.
    # They may share open files, see ``shards``.
    start_method = "fork"
    if sys.platform != "linux":
        start_method = "spawn"
        # A spawned worker is a new interpreter. Without this variable, it could import its first modules
        # from the current directory.
        os.environ[library_environment.SAFE_PATH] = "1"
    loader = torch.utils.data.DataLoader(
        items,
        batch_size=None,  # an item is a batch already
        sampler=itertools.count(),
        num_workers=options.num_workers,
        prefetch_factor=options.prefetch_factor or 4,
        persistent_workers=options.persistent_workers,
        multiprocessing_context=multiprocessing.get_context(start_method),
        generator=torch.Generator(),  # a separate generator, so the run's random numbers do not change
        in_order=True,
    )
    return iter(loader)


def death_of_worker(error: RuntimeError) -> DataError | None:
    """Return the error to report if a worker process has died, else None.

    ``error`` may come from any code, because PyTorch raises it when it notices that a worker has died.
    """
    if "DataLoader worker" not in str(error):
        return None
    return DataError(f"a data worker process died: {str(error).splitlines()[0]}")
