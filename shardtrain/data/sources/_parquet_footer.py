"""Find Parquet footers with which pyarrow would end the process.

``pyarrow.parquet.RowGroupMetaData.column`` must not throw a C++ exception, because its binding does not catch one:
Python then ends with SIGABRT. Parquet's library throws one for an encrypted column, and if the length of a level
histogram does not match the schema. One flipped bit in a footer is enough.

Source: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift
"""

from __future__ import annotations

from typing import Any

from shardtrain.data.sources._parquet_pages import LIST, STRUCT, Fields, Unclear, read_struct

# Numbers of fields in parquet.thrift.
_ROW_GROUPS = 4
_COLUMNS = 1
_META_DATA = 3
_CRYPTO_METADATA = 8
_SIZE_STATISTICS = 16
_UNENCODED_BYTES = 1
_REPETITION_HISTOGRAM = 2
_DEFINITION_HISTOGRAM = 3


def can_describe(footer: bytes, schema: Any) -> bool:
    """True if pyarrow can certainly describe each column chunk of a file.

    Args:
        footer: the bytes of FileMetaData.
        schema: the pyarrow ParquetSchema of the file.
    """
    columns = [schema.column(number) for number in range(len(schema))]
    try:
        file_fields, _ = read_struct(footer, 0, has_lists=True)
        for group in _structs(file_fields, _ROW_GROUPS):
            chunks = _structs(group, _COLUMNS)
            if len(chunks) != len(columns):
                return False
            if not all(map(_can_describe_chunk, chunks, columns)):
                return False
    except (Unclear, IndexError):
        return False
    return True


def _can_describe_chunk(chunk: Fields, column: Any) -> bool:
    kind, meta = chunk.get(_META_DATA, (0, None))
    if kind != STRUCT or _CRYPTO_METADATA in chunk:
        return False
    if _SIZE_STATISTICS not in meta:
        return True
    kind, sizes = meta[_SIZE_STATISTICS]
    if kind != STRUCT:
        return False
    if _UNENCODED_BYTES in sizes and column.physical_type != "BYTE_ARRAY":
        return False
    levels = {
        _REPETITION_HISTOGRAM: column.max_repetition_level,
        _DEFINITION_HISTOGRAM: column.max_definition_level,
    }
    for number, max_level in levels.items():
        kind, histogram = sizes.get(number, (LIST, []))
        # An empty histogram is allowed.
        if kind != LIST or len(histogram) not in (0, max_level + 1):
            return False
    return True


def _structs(fields: Fields, number: int) -> list[Fields]:
    """Return the elements of a required list of structs. Raises Unclear."""
    kind, elements = fields.get(number, (0, None))
    if kind != LIST or not all(isinstance(element, dict) for element in elements):
        raise Unclear
    return list(elements)
