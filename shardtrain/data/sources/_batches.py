"""Convert Arrow batches to rows, and estimate the size of these rows as Python objects.

The size differs from the size in Arrow.
Arrow may store a repeated value once, but each Python row has a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardtrain.data.sources import Row
from shardtrain.data.sources._index import too_long
from shardtrain.data.sources._json import not_utf8

_FEW_VALUES = 16
_ENTRY_BYTES = 8
"""Size of a reference in a list. It counts even for values that need no bytes in Arrow."""


def rows_of_batch(batch: Any, max_row_bytes: int) -> Iterator[Row]:
    """Yield the rows of an Arrow table or record batch.

    A row larger than ``max_row_bytes`` becomes a BadRow.
    """
    if python_bytes(batch) <= max_row_bytes:
        try:
            yield from batch.to_pylist()
            return
        except UnicodeDecodeError:
            # Convert each row separately below, to find the row that is not UTF-8.
            pass
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        size = python_bytes(row)
        if size > max_row_bytes:
            yield too_long(size)
            continue
        try:
            yield row.to_pylist()[0]
        except UnicodeDecodeError as error:
            yield not_utf8(error)


def python_bytes(batch: Any) -> int:
    """Return the approximate size of a table or record batch as Python objects.

    It is larger than the size in Arrow if columns repeat values.
    """
    others = [number for number, field in enumerate(batch.schema) if not _is_simple(field.type)]
    if not others:
        return int(batch.nbytes)
    simple = [number for number in range(batch.num_columns) if number not in others]
    size = int(batch.select(simple).nbytes)
    for number in others:
        column = batch.column(number)
        chunks = column.chunks if hasattr(column, "chunks") else [column]
        size += sum(_size(chunk) for chunk in chunks)
    return size


def _is_simple(kind: Any) -> bool:
    """True for types whose values Arrow stores separately."""
    from pyarrow import types

    return bool(
        types.is_primitive(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _size(array: Any) -> int:
    import pyarrow.compute

    # First handle types whose values are stored separately or consist of other arrays' values. Each value
    # is then stored once.
    kind = array.type
    count = len(array)
    types = pyarrow.types
    if not count:
        return 0
    if _is_simple(kind):
        return max(int(array.nbytes), count)
    if types.is_null(kind):
        return _ENTRY_BYTES * count
    if isinstance(array, pyarrow.ExtensionArray):
        return _size(array.storage)
    if types.is_dictionary(kind):
        return _ENTRY_BYTES * count + _chosen(array.dictionary, array.indices)
    if types.is_map(kind):
        first = int(array.offsets[0].as_py())
        length = int(array.offsets[count].as_py()) - first
        keys = array.keys.slice(first, length)
        items = array.items.slice(first, length)
        return _ENTRY_BYTES * count + _size(keys) + _size(items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _ENTRY_BYTES * count + _size(array.flatten())
    if types.is_struct(kind):
        return _ENTRY_BYTES * count + sum(map(_size, array.flatten()))
    # Views, unions and runs may reference the same value any number of times.
    if isinstance(array, pyarrow.lib.ListViewArray | pyarrow.lib.LargeListViewArray):
        lengths = pyarrow.compute.list_value_length(array)
        num_items = int(pyarrow.compute.sum(lengths, min_count=0).as_py())
        mean_size = -(-_size(array.values) // max(len(array.values), 1))
        return _ENTRY_BYTES * count + num_items * max(_ENTRY_BYTES, mean_size)
    if isinstance(array, pyarrow.UnionArray):
        fields = [array.field(number) for number in range(kind.num_fields)]
        return count * (_ENTRY_BYTES + sum(map(_size, fields)))
    if isinstance(array, pyarrow.RunEndEncodedArray):
        return count * (_ENTRY_BYTES + _size(array.values))
    return count * max(_ENTRY_BYTES, int(array.nbytes))


def _chosen(values: Any, indices: Any) -> int:
    """Return the size of the values that ``indices`` reference. A value counts once per reference."""
    import pyarrow.compute

    if pyarrow.types.is_primitive(values.type):
        return 0
    if not _is_simple(values.type):
        return len(indices) * _size(values)
    # Do not look at all values for each row of a table.
    if len(indices) <= _FEW_VALUES:
        buffers = (values[index].as_buffer() for index in indices.drop_null().to_pylist())
        return sum(buffer.size for buffer in buffers if buffer is not None)
    lengths = pyarrow.compute.binary_length(values).cast(pyarrow.int64()).take(indices)
    return int(pyarrow.compute.sum(lengths, min_count=0).as_py())
