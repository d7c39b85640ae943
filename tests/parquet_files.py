"""Write Parquet files byte by byte, so tests can put inconsistent values into any field.

The names and numbers of fields are from parquet.thrift. The encoding is Thrift's compact protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOOL = 1
I32 = 5
I64 = 6
BINARY = 8
LIST = 9
STRUCT = 12
INT32 = 1
INT64 = 2
BYTE_ARRAY = 6
FIXED = 7
REQUIRED = 0
OPTIONAL = 1
REPEATED = 2
PLAIN = 0
RLE = 3
DELTA_BINARY = 5
DELTA_LENGTH = 6
DELTA_BYTES = 7
DICTIONARY = 8
CODECS = {"none": 0, "snappy": 1, "gzip": 2, "brotli": 4, "zstd": 6, "lz4_raw": 7}
MAGIC = b"PAR1"

Fields = Sequence[tuple[int, int, Any]]


def varint(number: int) -> bytes:
    """Encode an unsigned number as a varint: groups of 7 bits, the lowest first."""
    result = bytearray()
    while number > 127:
        result.append(number & 127 | 128)
        number >>= 7
    result.append(number)
    return bytes(result)


def zigzag(number: int) -> bytes:
    """Encode a signed number as a zigzag varint."""
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def thrift(fields: Fields) -> bytes:
    """Return a struct of fields (number, type, value), in ascending order. Values of STRUCT are bytes."""
    result = bytearray()
    previous = 0
    for number, kind, value in fields:
        result += bytes([(number - previous) << 4 | kind])
        previous = number
        result += value_of(kind, value)
    return bytes(result) + b"\0"


def value_of(kind: int, value: Any) -> bytes:
    """Return the value of a field. A list is a pair of the kind of its elements and their values."""
    if kind in (I32, I64):
        return zigzag(value)
    if kind == BINARY:
        return varint(len(value)) + bytes(value)
    if kind == LIST:
        element, values = value
        return list_head(element, len(values)) + b"".join(value_of(element, v) for v in values)
    return bytes(value)


def list_head(element: int, count: int) -> bytes:
    """Return the head of a list, which may claim any number of elements."""
    if count < 15:
        return bytes([count << 4 | element])
    return bytes([0xF0 | element]) + varint(count)


def rle(value: int, count: int, width: int) -> bytes:
    """Return a run of equal values in the RLE encoding."""
    return varint(count << 1) + value.to_bytes((width + 7) // 8, "little")


def with_length(levels: bytes) -> bytes:
    """Prefix levels with their length in bytes, as a data page of version 1 requires."""
    return len(levels).to_bytes(4, "little") + levels


def text(value: bytes) -> bytes:
    """Return a byte array in the PLAIN encoding."""
    return len(value).to_bytes(4, "little") + value


def delta_binary(first: int, count: int, block: int = 128, minis: int = 4) -> bytes:
    """Return ``count`` equal integers in the encoding DELTA_BINARY_PACKED: each block takes 6 bytes."""
    head = varint(block) + varint(minis) + varint(count) + zigzag(first)
    blocks = -(-max(count - 1, 0) // block)
    return head + (zigzag(0) + bytes(minis)) * blocks


@dataclass
class Page:
    """A page to write: its encoded content before compression, and overrides of fields of its header."""

    content: bytes
    num_values: int
    encoding: int = PLAIN
    kind: str = "v1"
    uncompressed: int | None = None
    compressed: int | None = None
    packed: bytes | None = None
    levels: tuple[int, int] = (0, 0)
    num_rows: int = 1
    more: Fields = ()

    def write(self, codec: str) -> bytes:
        """Return the bytes of the page: its header, then its compressed content."""
        packed = self.packed
        if packed is None:
            plain = sum(self.levels)
            packed = self.content[:plain] + compress(codec, self.content[plain:])
        size = len(self.content) if self.uncompressed is None else self.uncompressed
        disk = len(packed) if self.compressed is None else self.compressed
        inner: list[tuple[int, int, Any]] = [(1, I32, self.num_values)]
        # Each kind of page has its own type number and its own header field.
        if self.kind == "v1":
            page_type = 0
            inner += [(2, I32, self.encoding), (3, I32, RLE), (4, I32, RLE)]
            description = (5, STRUCT, thrift([*inner, *self.more]))
        elif self.kind == "dictionary":
            page_type = 2
            inner += [(2, I32, PLAIN)]
            description = (7, STRUCT, thrift([*inner, *self.more]))
        elif self.kind == "v2":
            page_type = 3
            repetition, definition = self.levels
            inner += [(2, I32, 0), (3, I32, self.num_rows), (4, I32, self.encoding)]
            inner += [(5, I32, definition), (6, I32, repetition)]
            description = (8, STRUCT, thrift([*inner, *self.more]))
        else:
            page_type = 1
            description = (6, STRUCT, b"\0")
        header = [(1, I32, page_type), (2, I32, size), (3, I32, disk), description]
        return thrift(header) + packed


def compress(codec: str, content: bytes) -> bytes:
    """Return the content in a codec, with many frames for zstandard if it is large and uniform."""
    if codec == "none":
        return content
    import pyarrow

    packed: bytes = pyarrow.Codec(codec).compress(content, asbytes=True)
    return packed


@dataclass
class Column:
    """One leaf column of a row group."""

    pages: Sequence[Page]
    path: Sequence[str] = ("text",)
    kind: int = BYTE_ARRAY
    codec: str = "zstd"
    num_values: int | None = None
    total_uncompressed: int | None = None
    more: Fields = ()


def leaf(name: str, kind: int, repetition: int = REQUIRED, *more: tuple[int, int, Any]) -> bytes:
    """Return a schema element of a leaf."""
    fields = [(1, I32, kind), *(f for f in more if f[0] == 2), (3, I32, repetition)]
    fields += [(4, BINARY, name.encode()), *(f for f in more if f[0] > 4)]
    return thrift(fields)


def group(
    name: str, children: int, repetition: int | None = None, *more: tuple[int, int, Any]
) -> bytes:
    """Return a schema element of a group."""
    fields: list[tuple[int, int, Any]] = []
    if repetition is not None:
        fields.append((3, I32, repetition))
    return thrift([*fields, (4, BINARY, name.encode()), (5, I32, children), *more])


UTF8 = (6, I32, 0)
AS_LIST = (6, I32, 3)


def list_schema(name: str, kind: int = BYTE_ARRAY, *more: tuple[int, int, Any]) -> list[bytes]:
    """Return the elements of an optional list of optional values: definition levels up to 3."""
    return [
        group(name, 1, OPTIONAL, AS_LIST),
        group("list", 1, REPEATED),
        leaf("element", kind, OPTIONAL, *more),
    ]


@dataclass
class Groups:
    """A Parquet file to write. Each row group is a list of columns with its number of rows."""

    schema: Sequence[bytes]
    row_groups: Sequence[tuple[Sequence[Column], int]]
    metadata: Fields = ()
    footer_bytes: bytes | None = None
    num_rows: int | None = None
    parts: list[bytes] = field(default_factory=list)

    def save(self, path: Path) -> Path:
        """Write the file and return its path."""
        self.parts = [MAGIC]
        groups = []
        for columns, num_rows in self.row_groups:
            chunks = []
            total = 0
            for column in columns:
                claimed, chunk = self._add_column(column)
                chunks.append(chunk)
                total += claimed
            group = [(1, LIST, (STRUCT, chunks)), (2, I64, total), (3, I64, num_rows)]
            groups.append(thrift(group))
        rows = sum(n for _, n in self.row_groups) if self.num_rows is None else self.num_rows
        footer = self.footer_bytes
        if footer is None:
            footer = thrift(
                [
                    (1, I32, 1),
                    (2, LIST, (STRUCT, list(self.schema))),
                    (3, I64, rows),
                    (4, LIST, (STRUCT, groups)),
                    *self.metadata,
                ]
            )
        with path.open("wb") as file:
            file.writelines(self.parts)
            file.write(footer + struct.pack("<I", len(footer)) + MAGIC)
        return path

    def _add_column(self, column: Column) -> tuple[int, bytes]:
        """Add the pages of a column chunk. Return its uncompressed size, as claimed, and its description."""
        start = sum(map(len, self.parts))
        place = start
        first_data = None
        size = 0
        for page in column.pages:
            data = page.write(column.codec)
            if first_data is None and page.kind != "dictionary":
                first_data = place
            self.parts.append(data)
            place += len(data)
            size += len(page.content)
        values = sum(p.num_values for p in column.pages if p.kind in ("v1", "v2"))
        claimed = size if column.total_uncompressed is None else column.total_uncompressed
        fields: list[tuple[int, int, Any]] = [
            (1, I32, column.kind),
            (2, LIST, (I32, [PLAIN, RLE])),
            (3, LIST, (BINARY, [name.encode() for name in column.path])),
            (4, I32, CODECS[column.codec]),
            (5, I64, values if column.num_values is None else column.num_values),
            (6, I64, claimed),
            (7, I64, place - start),
            (9, I64, start if first_data is None else first_data),
        ]
        if column.pages and column.pages[0].kind == "dictionary":
            fields.append((11, I64, start))
        description = (3, STRUCT, thrift([*fields, *column.more]))
        return claimed, thrift([(2, I64, start), description])


def one_column(
    path: Path, pages: Sequence[Page], num_rows: int, is_list: bool = False, **column: Any
) -> Path:
    """Write a file with the column "text": required texts, or an optional list of optional texts."""
    kind = column.get("kind", BYTE_ARRAY)
    more = (UTF8,) if kind == BYTE_ARRAY else ()
    if is_list:
        column.setdefault("path", ("text", "list", "element"))
        schema = [group("schema", 1), *list_schema("text", kind, *more)]
    else:
        schema = [group("schema", 1), leaf("text", kind, REQUIRED, *more)]
    return Groups(schema, [([Column(pages, **column)], num_rows)]).save(path)
