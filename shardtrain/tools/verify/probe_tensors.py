"""Match the tensors of two forward passes with different rows or tokens.

A ``Pick`` selects the comparable parts of two tensors. ``replay_unchanged`` and ``replay_half`` are values
for the parameter ``fit`` of ``traces.trace``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardtrain.tools.verify.probe_inputs import ROWS
from shardtrain.tools.verify.traces import Pick, Trace, differs


def entire(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Pick that compares the entire tensors."""
    return one, other


def row_of_batch(row: int) -> Pick:
    """Return a ``Pick`` that compares one row of a batch of ROWS rows with a pass over only that row.

    Rows and tokens may be flattened into one dimension, with the rows outermost.
    """

    def pick(batch: Tensor, single: Tensor) -> tuple[Tensor, Tensor] | None:
        # A tensor without rows, such as a table of positions, is the same in both passes.
        if batch.shape == single.shape:
            return batch, single
        if batch.ndim != single.ndim or batch.ndim == 0:
            return None
        # With flattened tokens, a row has several elements of the first dimension.
        size = single.size(0)
        if batch.size(0) != ROWS * size or batch.shape[1:] != single.shape[1:]:
            return None
        start = row * size
        return batch[start : start + size], single

    return pick


def unchanged_tokens(count: int, tokens: slice) -> Pick:
    """Return a ``Pick`` that compares only the slice ``tokens`` of each dimension with ``count`` elements."""

    def pick(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
        if one.shape != other.shape:
            return None
        token_dims = [dim for dim, size in enumerate(one.shape) if size == count]
        # Rows and tokens that are flattened into one dimension cannot be separated.
        if not token_dims and one.numel() > 1 and ROWS * count in one.shape:
            return None
        # Attention scores have two dimensions of tokens.
        for token_dim in token_dims:
            index = [slice(None)] * one.ndim
            index[token_dim] = tokens
            one = one[tuple(index)]
            other = other[tuple(index)]
        return one, other

    return pick


def half_of_tokens(count: int, start: int) -> Pick:
    """Return a ``Pick`` that compares ``count // 2`` tokens from ``start`` with a pass over only these tokens."""

    def pick(full: Tensor, half: Tensor) -> tuple[Tensor, Tensor] | None:
        if full.ndim != half.ndim:
            return None
        for dim, (full_size, half_size) in enumerate(zip(full.shape, half.shape, strict=True)):
            if full_size == half_size:
                continue
            # This is not a dimension of tokens, so the tensors are not comparable.
            if full_size != count or half_size != count // 2:
                return None
            full = full.narrow(dim, start, half_size)
        return full, half

    return pick


def first_with_other_inputs(
    one: Trace,
    other: Trace,
    paths: Sequence[str],
    pick: Pick,
    tolerance: float,
) -> str | None:
    """Return the path of the first call in ``paths`` whose inputs differ between two passes, or None.

    Both passes must have called the modules in the same order.
    """
    ones = [call for call in one.calls if call.path in paths]
    others = [call for call in other.calls if call.path in paths]
    for one_call, other_call in zip(ones, others, strict=True):
        for one_input, other_input in zip(one_call.inputs, other_call.inputs, strict=True):
            pair = pick(one_input, other_input)
            if pair is None:
                continue
            picked, single = pair
            if differs(single, picked, tolerance):
                return one_call.path
    return None


def replay_unchanged(recorded: list[Tensor], output: Any) -> Any:
    """Return the recorded tensors, nested like ``output``."""
    # Clone each tensor, because a module may change its inputs in place, and a recording is used several
    # times.
    remaining = iter(recorded)
    if isinstance(output, Tensor):
        return next(remaining).clone()
    if isinstance(output, tuple | list):
        items = []
        for item in output:
            if isinstance(item, Tensor):
                item = next(remaining).clone()
            items.append(item)
        return type(output)(items)
    return output


def replay_half(start: int, recorded: list[Tensor], output: Any) -> Any:
    """Return half of the recorded tokens, nested like ``output``.

    ``start`` is 0 for the first half. Any other value selects the second half.
    """
    remaining = iter(recorded)

    def cut(current: Any) -> Any:
        if not isinstance(current, Tensor):
            return current
        full = next(remaining)
        for dim, (full_size, half_size) in enumerate(zip(full.shape, current.shape, strict=True)):
            if full_size != half_size:
                first = full_size - half_size if start else 0
                full = full.narrow(dim, first, half_size)
        return full.clone()

    if isinstance(output, tuple | list):
        return type(output)(cut(x) for x in output)
    return cut(output)
