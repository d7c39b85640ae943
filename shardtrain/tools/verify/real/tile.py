"""Random numbers for tensors of real size, copied from a table of normal numbers at changing offsets.

Drawing two billion numbers takes minutes, but copying rows of a table takes seconds. A number depends only on
its position in the full tensor, so every mesh starts from the same values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from shardtrain.ops.dtensor import local_slices, local_tensor

_ROWS = 1024
"""Number of rows after which the table is reused."""
_STEP = 1021
"""Offset in the table between consecutive rows, a prime number."""


def fill_(tensor: Tensor, name: str, std: float = 1.0, mean: float = 0.0) -> None:
    """Fill this rank's part of a tensor with two or three dimensions in place.

    Row r is a window of the table, scaled to ``std`` and shifted to ``mean``. The scale changes slightly with
    each reuse of the table, so distant rows differ.
    """
    local = local_tensor(tensor).detach()
    slices = local_slices(tensor)
    if local.numel() == 0:
        return
    columns = slices[-1]
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    table = torch.empty(_ROWS * _STEP + tensor.shape[-1]).normal_(generator=generator)
    # The windows overlap: row r begins _STEP numbers after row r - 1. They are not copied.
    windows = table.as_strided((_ROWS, columns.stop - columns.start), (_STEP, 1), columns.start)
    for rows, first in _row_blocks(local, slices, tensor.shape):
        start = 0
        while start < len(rows):
            run, window = divmod(first + start, _ROWS)
            part = rows[start : start + _ROWS - window]
            part.copy_(windows[window : window + len(part)])
            scale = 0.95 + 0.001 * (run * 37 % 101)
            part.mul_(std * scale)
            if mean:
                part.add_(mean)
            start += len(part)


def _row_blocks(
    local: Tensor, slices: tuple[slice, ...], shape: torch.Size
) -> Iterator[tuple[Tensor, int]]:
    """Yield blocks of consecutive rows, with the number of the first row in the full tensor as a matrix."""
    if local.ndim == 2:
        yield local, slices[0].start
        return
    first_matrix = slices[0].start
    first_row = slices[1].start
    for number, matrix in enumerate(local):
        yield matrix, (first_matrix + number) * shape[1] + first_row
