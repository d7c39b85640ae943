"""Sliding-window attention: a token attends to itself and the ``window - 1`` tokens before it (Beltagy et al. 2020).

A block of queries meets only the stretch of keys that it can see, so that work and memory grow with the window and not
with the sequence. Letters: l queries and s keys of a stretch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

QUERIES_AT_ONCE = 128
"""Queries that meet one stretch of keys on a CPU. 64 to 256 took equal time (windows of 64 to 4096), 1024 a tenth more
to four times as much."""


class Band(NamedTuple):
    """What queries of a stretch see of its keys: query i sees the keys j with ``first + i <= j <= last + i``."""

    first: int
    last: int


class WindowBlock(NamedTuple):
    """Queries that meet keys, each of them at least one: which tokens of either, and what each query sees."""

    queries: slice
    keys: slice
    band: Band


def queries_at_once(window: int, device: torch.device) -> int:
    """How many queries a block has: on a CPU few for what they see and mask, elsewhere all, since kernels know windows.

    >>> queries_at_once(64, torch.device("cpu")), queries_at_once(4096, torch.device("cpu"))
    (128, 256)
    """
    return max(QUERIES_AT_ONCE, window // 16) if device.type == "cpu" else sys.maxsize


def blocks(num_queries: int, num_keys: int, offset: int, window: int, at_once: int) -> Iterator[WindowBlock]:
    """Cut queries into blocks and keys to what each block sees; ``offset`` is how far the first query is past key 0.

    >>> [(block.queries, block.keys) for block in blocks(130, 130, 0, 3, at_once=128)]
    [(slice(0, 128, None), slice(0, 128, None)), (slice(128, 130, None), slice(126, 130, None))]
    """
    # Before its first and after its last query that sees a key, a stretch has none that do
    begin = max(0, -offset)
    end = min(num_queries, num_keys + window - 1 - offset)
    for start in range(begin, end, at_once):
        stop = min(start + at_once, end)
        low = max(0, start + offset - window + 1)
        high = min(num_keys, stop + offset)
        last = start + offset - low
        yield WindowBlock(slice(start, stop), slice(low, high), Band(last - window + 1, last))


def mask(num_queries: int, num_keys: int, band: Band, like: Tensor) -> Tensor:
    """What to add to the scores: 0 where a query sees a key, else minus infinity; (l, s), of the type of ``like``."""
    seen_ls = torch.ones(num_queries, num_keys, dtype=torch.bool, device=like.device)
    seen_ls = seen_ls.tril_(band.last).triu_(band.first)
    return like.new_zeros(num_queries, num_keys).masked_fill_(~seen_ls, -torch.inf)
