"""Documents that a stretch of queries and a stretch of keys have in common: rows and places of their tokens.

Separate from ``document_mask.py`` because kernels that it dispatches to also cut their work by documents.
Shape suffixes: B batch, T tokens, l queries, s keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Shared(NamedTuple):
    """A document that occurs in a stretch of queries and in a stretch of keys: its row, and its places in both."""

    row: slice
    queries: slice
    keys: slice


def shared(queries_Bl: Tensor, keys_Bs: Tensor) -> list[Shared]:
    """Return the documents that occur both in a stretch of queries and in a stretch of keys.

    Args:
        queries_Bl: number of the document of each query. Numbers ascend along a row.
        keys_Bs: number of the document of each key.

    Raises:
        ValueError: if the numbers of a row do not ascend.

    >>> shared(torch.tensor([[3, 3, 4]]), torch.tensor([[2, 3]]))
    [Shared(row=slice(0, 1, None), queries=slice(0, 2, None), keys=slice(1, 2, None))]
    """
    of_queries = _places(queries_Bl)
    of_keys = of_queries if keys_Bs is queries_Bl else _places(keys_Bs)
    found = []
    for row, (queries, keys) in enumerate(zip(of_queries, of_keys, strict=True)):
        for number, places in queries.items():
            if number in keys:
                found.append(Shared(slice(row, row + 1), places, keys[number]))
    return found


def _places(documents_Bl: Tensor) -> list[dict[int, slice]]:
    """For each row, map the number of each document to the places of its tokens."""
    rows = []
    for documents_l in documents_Bl:
        numbers, lengths = torch.unique_consecutive(documents_l, return_counts=True)
        if bool((numbers[1:] <= numbers[:-1]).any()):
            raise ValueError("documents_BT must ascend along each row: a number came back, or a smaller one followed")
        stops = lengths.cumsum(0)
        starts = stops - lengths
        ranges = zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True)
        rows.append({number: slice(start, stop) for number, start, stop in ranges})
    return rows


def shifted(places: slice, by: int) -> slice:
    """Return places of a stretch as places of the row, in which the stretch begins at ``by``."""
    return slice(places.start + by, places.stop + by)
