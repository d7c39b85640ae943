"""Find the documents that occur in both a range of queries and a range of keys, with the ranges of their tokens.

Separate from ``document_mask.py`` because kernels that it calls split their work by documents too.
Shape suffixes: B batch, T tokens, l queries, s keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Shared(NamedTuple):
    """A document in both a range of queries and a range of keys: its row, and its token range in both."""

    row: slice
    queries: slice
    keys: slice


def shared(queries_Bl: Tensor, keys_Bs: Tensor) -> list[Shared]:
    """Return the documents that occur in both a range of queries and a range of keys.

    Args:
        queries_Bl: Document number of each query. Numbers ascend along a row.
        keys_Bs: Document number of each key.

    Raises:
        ValueError: the numbers of a row do not ascend.

    >>> shared(torch.tensor([[3, 3, 4]]), torch.tensor([[2, 3]]))
    [Shared(row=slice(0, 1, None), queries=slice(0, 2, None), keys=slice(1, 2, None))]
    """
    query_ranges = _ranges(queries_Bl)
    key_ranges = query_ranges if keys_Bs is queries_Bl else _ranges(keys_Bs)
    documents = []
    for row, (queries, keys) in enumerate(zip(query_ranges, key_ranges, strict=True)):
        for number, tokens in queries.items():
            if number in keys:
                documents.append(Shared(slice(row, row + 1), tokens, keys[number]))
    return documents


def _ranges(documents_Bl: Tensor) -> list[dict[int, slice]]:
    """Return the token range of each document, by document number, for each row."""
    rows = []
    for documents_l in documents_Bl:
        numbers, lengths = torch.unique_consecutive(documents_l, return_counts=True)
        if bool((numbers[1:] <= numbers[:-1]).any()):
            raise ValueError(
                "documents_BT must ascend along each row, with consecutive tokens for each document"
            )
        stops = lengths.cumsum(0)
        starts = stops - lengths
        ranges = zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True)
        rows.append({number: slice(start, stop) for number, start, stop in ranges})
    return rows


def shifted(tokens: slice, by: int) -> slice:
    """Return a token range moved by ``by`` tokens."""
    return slice(tokens.start + by, tokens.stop + by)
