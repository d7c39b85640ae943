"""Sliding-window attention: a token attends to itself and the ``window - 1`` tokens before it (Beltagy et al. 2020).

A block of queries is only computed with its range of visible keys. Work and memory therefore grow with
the window instead of the sequence. Shape suffixes: l queries and s keys of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

QUERIES_AT_ONCE = 128
"""Minimum number of queries per block on a CPU. With windows of 64 to 4096, blocks of 64 to 256 queries took equal
time, and blocks of 1024 took 1.1 to 4 times as long."""


class Band(NamedTuple):
    """Visible keys of a block: query i attends to the keys j with ``first + i <= j <= last + i``."""

    first: int
    last: int


class WindowBlock(NamedTuple):
    """A block of queries with their range of keys. Each query sees at least one key.

    Attributes:
        queries, keys: Token ranges.
        band: Visible keys of each query, counted within the block.
    """

    queries: slice
    keys: slice
    band: Band


def queries_at_once(window: int, device: torch.device) -> int:
    """Return the number of queries per block. Only the CPU needs blocks; other kernels support windows themselves.

    >>> queries_at_once(64, torch.device("cpu")), queries_at_once(4096, torch.device("cpu"))
    (128, 256)
    """
    return max(QUERIES_AT_ONCE, window // 16) if device.type == "cpu" else sys.maxsize


def blocks(
    num_queries: int, num_keys: int, offset: int, window: int, at_once: int
) -> Iterator[WindowBlock]:
    """Yield blocks of queries with their visible keys. ``offset`` is the distance from key 0 to query 0.

    >>> [(block.queries, block.keys) for block in blocks(130, 130, 0, 3, at_once=128)]
    [(slice(0, 128, None), slice(0, 128, None)), (slice(128, 130, None), slice(126, 130, None))]
    """
    # Skip queries at both ends that see no key.
    begin = max(0, -offset)
    end = min(num_queries, num_keys + window - 1 - offset)
    for start in range(begin, end, at_once):
        stop = min(start + at_once, end)
        low = max(0, start + offset - window + 1)
        high = min(num_keys, stop + offset)
        last = start + offset - low
        yield WindowBlock(slice(start, stop), slice(low, high), Band(last - window + 1, last))


def mask(num_queries: int, num_keys: int, band: Band, like: Tensor) -> Tensor:
    """Return an additive mask (l, s) with the dtype of ``like``: 0 for visible keys, minus infinity for others."""
    seen_ls = torch.ones(num_queries, num_keys, dtype=torch.bool, device=like.device)
    seen_ls = seen_ls.tril_(band.last).triu_(band.first)
    return like.new_zeros(num_queries, num_keys).masked_fill_(~seen_ls, -torch.inf)
