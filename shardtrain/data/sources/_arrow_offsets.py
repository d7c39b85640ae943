"""Check that the offsets of Arrow arrays are within their data, before values are read.

Arrow reads a text or a list at its offsets without checking them. Arrow's own complete check also reads all
texts and all elements of lists, even for a single row. Before these functions are called, pyarrow's quick
check must have checked the sizes of buffers and the lengths of arrays.

Source: https://arrow.apache.org/docs/format/Columnar.html
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

OUTSIDE = "has an offset outside of its data"
"""Reason of a bad row."""
FULL_CHECK_BYTES = 2**28
"""A smaller table is checked completely when it is opened, by ``sandbox_child``."""

Check = Callable[[Any], bool]
"""Return True if the offsets of an array are valid."""
_OFFSETS = 1
_DATA = 2
_BLOCK = 2**20
"""Number of offsets that are compared together, to limit memory."""


def is_checkable(kind: Any) -> bool:
    """True if ``are_valid`` supports a type. Others, such as dictionaries and unions, are rare."""
    try:
        _check_of(kind)
    except TypeError:
        return False
    return True


def are_valid(batch: Any) -> bool:
    """True if all offsets of a table or record batch are valid. Columns of other types are skipped."""
    for column in batch.columns:
        kind = column.type
        if not is_checkable(kind):
            continue
        check = _check_of(kind)
        if check is _no_offsets:
            continue
        chunks = column.chunks if hasattr(column, "chunks") else [column]
        for chunk in chunks:
            if not check(chunk):
                return False
    return True


@lru_cache(maxsize=1000)
def _check_of(kind: Any) -> Check:
    """Return the check for a type. Raises TypeError for a type that is not supported."""
    import pyarrow

    types = pyarrow.types
    # An extension type, such as an image, is stored as another type.
    if isinstance(kind, pyarrow.BaseExtensionType):
        inner = _check_of(kind.storage_type)
        if inner is _no_offsets:
            return _no_offsets
        return lambda array: inner(array.storage)
    if types.is_string(kind) or types.is_binary(kind):
        return lambda array: _is_valid_text(array, np.int32)
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return lambda array: _is_valid_text(array, np.int64)
    if types.is_list(kind) or types.is_large_list(kind):
        dtype = np.int64 if types.is_large_list(kind) else np.int32
        element = _check_of(kind.value_type)
        return lambda array: _is_valid_list(array, dtype, element)
    # A map is stored as a list of pairs.
    if types.is_map(kind):
        pair = pyarrow.struct([kind.key_field, kind.item_field])
        entry = _check_of(pair)
        return lambda array: _is_valid_list(array, np.int32, entry)
    # Structs and lists of fixed size have no offsets, so check only their values.
    if types.is_struct(kind):
        fields = []
        for number in range(kind.num_fields):
            check = _check_of(kind.field(number).type)
            if check is not _no_offsets:
                fields.append((number, check))
        if not fields:
            return _no_offsets
        return lambda array: all(check(array.field(number)) for number, check in fields)
    if types.is_fixed_size_list(kind):
        value = _check_of(kind.value_type)
        if value is _no_offsets:
            return _no_offsets
        size = kind.list_size
        return lambda array: value(array.values.slice(array.offset * size, len(array) * size))
    if types.is_primitive(kind) or types.is_fixed_size_binary(kind) or types.is_null(kind):
        return _no_offsets
    if types.is_decimal(kind):
        return _no_offsets
    raise TypeError


def _no_offsets(_array: Any) -> bool:
    """The check of types without offsets."""
    return True


def _is_valid_text(array: Any, dtype: Any) -> bool:
    if not len(array):
        return True
    buffers = array.buffers()
    data = buffers[_DATA]
    size = 0 if data is None else data.size
    return _bounds(array, buffers[_OFFSETS], dtype, size) is not None


def _is_valid_list(array: Any, dtype: Any, element: Check) -> bool:
    if not len(array):
        return True
    values = array.values
    bounds = _bounds(array, array.buffers()[_OFFSETS], dtype, len(values))
    if bounds is None:
        return False
    if element is _no_offsets:
        return True
    first, last = bounds
    return element(values.slice(first, last - first))


def _bounds(array: Any, buffer: Any, dtype: Any, size: int) -> tuple[int, int] | None:
    """Return the first and the last offset. None if an offset is above ``size``, negative or too small."""
    try:
        first_byte = array.offset * np.dtype(dtype).itemsize
        offsets = np.frombuffer(buffer, dtype, len(array) + 1, first_byte)
    except (ValueError, TypeError, AttributeError):
        # the buffer is too short or does not exist
        return None
    first = int(offsets[0])
    last = int(offsets[-1])
    if first < 0 or last > size or first > last:
        return None
    for start in range(0, len(offsets) - 1, _BLOCK):
        part = offsets[start : start + _BLOCK + 1]
        if not bool((part[1:] >= part[:-1]).all()):
            return None
    return first, last


class CheckedChunks:
    """Checks each chunk of a table once, when its first row is read. A chunk has about 1,000 rows."""

    def __init__(self, table: Any) -> None:
        self._batches = table.to_batches()
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))
        self._valid: set[int] = set()

    def is_valid(self, row: int) -> bool:
        """True if all offsets in the chunk of a row are valid."""
        number = bisect_right(self._ends, row)
        if number in self._valid:
            return True
        if not are_valid(self._batches[number]):
            return False
        self._valid.add(number)
        return True
