"""Compute the memory that decoding a Parquet row group takes, from the headers of its pages.

A footer may claim any size. The sizes in page headers can be trusted, because the decoder allocates these
sizes and fails if the data do not fit. The headers are read without decompression, about 50 bytes per page of
a megabyte.

Source: https://parquet.apache.org/docs/file-format/, and Thrift's compact protocol.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BATCH_BYTES = 256 * 2**20
"""Maximum memory of the rows of one batch, if the row group allows it."""
GROWS_FROM_BYTES = 64 * 2**20
GROWTH = 100
"""A column that takes more than ``GROWS_FROM_BYTES``, and this many times its size on disk, is suspicious."""
LIST_GROWTH = 15
"""The same for the elements of a list column that takes more than a quarter of the memory limit.

A single row may have all elements of the row group. Text and token ids grow 3 to 12 times.
"""

DECODED_BYTES = 16 * 2**30
DECODED_GROWTH = 1000
"""A row group whose values take more than ``DECODED_BYTES``, and this many times its size on disk, is suspicious.

A kilobyte may choose the same long text for a million rows, which would take hours to read.
"""

_ROWS_AT_ONCE = (256, 64, 16, 4, 1)
_HEADER_BYTES = (16 * 1024, 64 * 1024)
"""Sizes of reads. The first size is enough for nearly every header, and often for several small pages."""
_PADDING_BYTES = 100
"""Arrow reads beyond the chunks of some old writers."""
_LEVEL_BYTES = 12
"""Memory of a list element in addition to its value: two levels in growing buffers, and its place."""
_OBJECT_BYTES = 56
"""A value of a row as a Python object."""
_TEXT_BYTES = 4
_DICTIONARY_ENTRY_BYTES = 16
_COPIES = 3
"""Number of copies of a value of fixed length in Arrow's growing buffer. Null values are copied too."""
_MAX_DICTIONARY_BYTES = 8 * 2**20
_MAX_CHOICE_BYTES = 2**20
_MAX_WIDTH = 22
"""Bits of a choice from the largest dictionary that is read."""
_MAX_DEPTH = 8
_CLOCK_PAGES = 1000

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}
_DICTIONARY_ENCODINGS = (2, 8)
_RLE = 3
_PREFIX_ENCODINGS = (6, 7)
"""DELTA_LENGTH_BYTE_ARRAY and DELTA_BYTE_ARRAY: their lengths are not in the page header."""

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY = range(9)
LIST = 9
STRUCT = 12
_DATA, _INDEX, _DICTIONARY, _DATA_V2 = range(4)

Fields = dict[int, tuple[int, Any]]
"""Type and value of each field of a Thrift struct. The value is None if it is not a number, a struct or a list."""


class Unclear(ValueError):
    """The headers of the pages are not clear. Arrow may or may not be able to read the pages."""


@dataclass(frozen=True)
class Page:
    """The header of a page, with its place in the file.

    Attributes:
        kind: 0 for data, 1 for an index, 2 for a dictionary, 3 for data of version 2.
        start: first byte after the header.
        has_rle_levels: True for data of version 1 whose levels are in the usual encoding.
    """

    kind: int
    start: int
    compressed: int
    uncompressed: int
    num_values: int
    encoding: int
    has_rle_levels: bool = False


class _Clock:
    """Limit on the CPU time for a row group. The clock is read once per ``_CLOCK_PAGES`` pages."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._pages = 0
        self._start = 0.0

    def count_page(self) -> None:
        """Count a page. Raises Unclear if the pages take too long."""
        self._pages += 1
        if self._pages % _CLOCK_PAGES:
            return
        now = time.thread_time()
        # The clock starts with the first thousand pages, which take milliseconds.
        if not self._start:
            self._start = now
        if now - self._start > self._seconds:
            raise Unclear


@dataclass(frozen=True)
class ColumnMemory:
    """Sizes in bytes that decoding one column of a row group takes.

    Attributes:
        disk: compressed size in the file.
        buffered: largest page before and after decompression, and the decoded dictionary.
        width: memory of a value, without text.
        longest_page: largest data page.
        plain: sum of all data pages that store their values directly, without a dictionary.
        longest_text: longest text that an entry of the dictionary may have, if texts are chosen from it.
        elements: memory of all elements of a list column; 0 for other columns.
        decoded: maximum size of all values.
        has_hidden_lengths: True if lengths of texts are not in the headers.
    """

    disk: int
    buffered: int
    width: int
    longest_page: int
    plain: int
    longest_text: int
    elements: int
    decoded: int
    has_hidden_lengths: bool

    def of_batch(self, num_rows: int) -> int:
        """Return the maximum size of the values of ``num_rows`` rows. Lists are counted completely."""
        if self.elements:
            return self.elements
        # In the worst case, each row has a text as long as a page. Together they are no longer than all
        # pages, unless a short encoding repeats a prefix.
        texts = num_rows * self.longest_page
        if not self.has_hidden_lengths:
            texts = min(texts, self.plain)
        return texts + num_rows * (self.width + self.longest_text)

    def grows(self, memory_bytes: int) -> bool:
        """True if the column may take much more memory than its size on disk suggests."""
        size = self.buffered + self.elements
        if size > GROWS_FROM_BYTES and size > GROWTH * self.disk:
            return True
        return self.elements > memory_bytes // 4 and self.elements > LIST_GROWTH * self.disk


@dataclass(frozen=True)
class GroupMemory:
    """Memory that decoding a row group takes."""

    columns: Sequence[ColumnMemory]

    @property
    def rows_at_once(self) -> int:
        """Number of rows to decode together, which fit into ``BATCH_BYTES``."""
        # List columns take the same memory for any number of rows.
        columns = [column for column in self.columns if not column.elements]
        for num_rows in _ROWS_AT_ONCE:
            batch_bytes = sum(column.of_batch(num_rows) for column in columns)
            if batch_bytes <= BATCH_BYTES:
                return num_rows
        return 1

    def is_suspicious(self, memory_bytes: int) -> bool:
        """True if decoding may exceed a quarter of ``memory_bytes``, or if the group or a column grows too much."""
        disk = sum(column.disk for column in self.columns)
        decoded = sum(column.decoded for column in self.columns)
        if decoded > max(DECODED_BYTES, DECODED_GROWTH * disk):
            return True
        num_bytes = 0
        for column in self.columns:
            if column.has_hidden_lengths or column.grows(memory_bytes):
                return True
            num_bytes += column.buffered
            if not column.elements:
                num_bytes += column.of_batch(1)
        return num_bytes > max(memory_bytes // 4, GROWS_FROM_BYTES)


def memory_of_group(descriptor: int, parquet: Any, group: Any, seconds: float) -> GroupMemory:
    """Return the memory that decoding a row group takes.

    Args:
        descriptor: the open file.
        parquet: the pyarrow ParquetFile, and ``group`` its metadata of the row group.
        seconds: maximum of CPU time.

    Raises:
        Unclear: a header cannot be understood.
        OSError: the file cannot be read.
    """
    columns = []
    clock = _Clock(seconds)
    window = _Window(descriptor)
    for number in range(group.num_columns):
        schema = parquet.schema.column(number)
        columns.append(_column(descriptor, group.column(number), schema, clock, window))
    return GroupMemory(columns)


def _column(
    descriptor: int, chunk: Any, schema: Any, clock: _Clock, window: _Window
) -> ColumnMemory:
    """Return the memory of one column."""
    is_list = schema.max_repetition_level > 0
    kind = chunk.physical_type
    width = _WIDTHS.get(kind, _TEXT_BYTES)
    if kind == "FIXED_LEN_BYTE_ARRAY":
        width = _COPIES * max(schema.length, 1)
    sums = _PageSums()
    for page in _pages(window, chunk, clock):
        sums.add(page)

    # A short reference may select a long text of the dictionary, so texts can grow on decoding. First
    # assume the worst case, and read the references only if that would exceed the limit.
    longest_text = 0
    chosen_text = 0
    num_chosen = sum(page.num_values for page in sums.chosen_pages)
    if kind == "BYTE_ARRAY" and sums.dictionary is not None and num_chosen:
        longest_text = sums.dictionary.uncompressed
        chosen_text = longest_text * num_chosen
        limit = GROWS_FROM_BYTES if is_list else DECODED_BYTES
        if chosen_text > limit:
            reader = _PageReader(descriptor, chunk.compression)
            chosen_text = reader.chosen_text(sums.dictionary, sums.chosen_pages, schema)
    # For values other than texts, ``width`` is the full size.
    longest_page = 0
    plain = 0
    if kind == "BYTE_ARRAY":
        longest_page = sums.longest_page
        plain = sums.plain
    decoded = sums.num_values * (width + _OBJECT_BYTES) + chosen_text + plain
    elements = 0
    if is_list:
        elements = sums.num_values * (width + _LEVEL_BYTES) + chosen_text + plain
    return ColumnMemory(
        disk=max(chunk.total_compressed_size, 1),
        buffered=sums.buffered,
        width=width,
        longest_page=longest_page,
        plain=plain,
        longest_text=longest_text,
        elements=elements,
        decoded=decoded,
        has_hidden_lengths=sums.has_hidden_lengths,
    )


class _PageSums:
    """Sums over the pages of a column.

    Attributes:
        dictionary: The page with the dictionary, if there is one.
        chosen_pages: Pages whose values refer to the dictionary.
        num_values: Number of values.
        plain: Bytes of pages without references.
        longest_page: Bytes of the largest data page.
        has_hidden_lengths: True if an encoding does not show the length of its texts.
    """

    def __init__(self) -> None:
        self.dictionary: Page | None = None
        self.chosen_pages: list[Page] = []
        self.num_values = 0
        self.plain = 0
        self.longest_page = 0
        self.has_hidden_lengths = False
        self._largest_page = 0

    @property
    def buffered(self) -> int:
        """Bytes that the decoder holds: the dictionary, and one page before and after decompression."""
        if self.dictionary is None:
            return self._largest_page
        of_dictionary = self.dictionary.uncompressed + self.dictionary.compressed
        entries = _DICTIONARY_ENTRY_BYTES * self.dictionary.num_values
        return self._largest_page + of_dictionary + entries

    def add(self, page: Page) -> None:
        """Add a page."""
        self._largest_page = max(self._largest_page, page.compressed + page.uncompressed)
        if page.kind == _DICTIONARY:
            self.dictionary = page
        if page.kind not in (_DATA, _DATA_V2):
            return
        self.longest_page = max(self.longest_page, page.uncompressed)
        self.num_values += page.num_values
        if page.encoding in _DICTIONARY_ENCODINGS:
            self.chosen_pages.append(page)
        else:
            self.plain += page.uncompressed
        if page.encoding in _PREFIX_ENCODINGS:
            self.has_hidden_lengths = True


def _pages(window: _Window, chunk: Any, clock: _Clock) -> Iterator[Page]:
    """Yield the headers of the pages of a column chunk, in the range that Arrow reads."""
    place = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < place:
        place = chunk.dictionary_page_offset
    end = place + chunk.total_compressed_size
    num_values = 0
    while True:
        # Some old writers state a size that is too small. Arrow then reads on until it has all values.
        if place >= end:
            has_all_values = num_values >= chunk.num_values
            if has_all_values or place >= end + _PADDING_BYTES:
                return
        page = window.page(place)
        yield page
        if page.kind in (_DATA, _DATA_V2):
            num_values += page.num_values
        place = page.start + page.compressed
        clock.count_page()


class _Window:
    """The last part of a file that was read. It often contains the next headers too, if pages are small."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._start = 0
        self._data = b""

    def page(self, place: int) -> Page:
        """Read the header of the page at ``place``. Raises Unclear."""
        if 0 <= place - self._start < len(self._data):
            try:
                return self._parse(place)
            except IndexError:
                pass
        # An IndexError means that the header is longer than the data. Read again from its start, and then
        # more.
        for size in _HEADER_BYTES:
            self._start = place
            self._data = os.pread(self._descriptor, size, place)
            try:
                return self._parse(place)
            except IndexError:
                pass
        raise Unclear

    def _parse(self, place: int) -> Page:
        fields, end = read_struct(self._data, place - self._start)
        return _page_of(fields, self._start + end)


def _page_of(fields: dict[int, tuple[int, Any]], start: int) -> Page:
    kind = _number(fields, 1)
    uncompressed = _number(fields, 2)
    compressed = _number(fields, 3)
    num_values = 0
    encoding = 0
    # For this kind of page: number of its header's field, and the fields of its number of values and
    # encoding.
    details = {_DATA: (5, 1, 2), _DICTIONARY: (7, 1, 2), _DATA_V2: (8, 1, 4)}.get(kind)
    if details is not None:
        number, values_field, encoding_field = details
        struct_kind, inner = fields.get(number, (0, None))
        if struct_kind != STRUCT:
            raise Unclear
        num_values = _number(inner, values_field)
        encoding = _number(inner, encoding_field)
    has_rle_levels = False
    if kind == _DATA:
        has_rle_levels = _number(inner, 3) == _RLE and _number(inner, 4) == _RLE
    return Page(kind, start, compressed, uncompressed, num_values, encoding, has_rle_levels)


def _number(fields: dict[int, tuple[int, Any]], number: int) -> int:
    """Return a required number that is not negative. Raises Unclear."""
    kind, value = fields.get(number, (0, -1))
    if kind != _I32 or value < 0:
        raise Unclear
    return int(value)


def read_struct(
    data: bytes, place: int, depth: int = 0, has_lists: bool = False
) -> tuple[Fields, int]:
    """Read a struct of Thrift's compact protocol. Return its fields and the next place.

    Raises:
        Unclear: the struct has a field twice, or without ``has_lists`` a list. Page headers do not have lists.
        IndexError: the data end in it.
    """
    # Hostile data could nest structs until Python's stack overflows.
    if depth > _MAX_DEPTH:
        raise Unclear
    fields: Fields = {}
    number = 0
    while True:
        # The first byte has the type of the field, and the difference of its number and the previous number.
        # A difference of 0 means that the number follows.
        head = data[place]
        place += 1
        kind = head & 15
        if kind == _STOP:
            return fields, place
        difference = head >> 4
        if difference:
            number += difference
        else:
            number, place = _signed(data, place)
        # The type of a boolean field is its value.
        value: Any = None
        if kind not in (_TRUE, _FALSE):
            value, place = _value(kind, data, place, depth, has_lists)
        # Arrow may skip a field with an unusual number, or use the last of two. Then it would read another
        # size.
        if number in fields or not 0 < number < 2**15:
            raise Unclear
        if kind == _I32 and not -(2**31) <= value < 2**31:
            raise Unclear
        fields[number] = (kind, value)


def _value(kind: int, data: bytes, place: int, depth: int, has_lists: bool) -> tuple[Any, int]:
    """Read a number, a struct or a list, and skip other values. Return the value and the next place."""
    if kind in (_I16, _I32, _I64):
        return _signed(data, place)
    if kind == _BINARY:
        length, place = _varint(data, place)
        return None, place + length
    if kind == STRUCT:
        return read_struct(data, place, depth + 1, has_lists)
    if kind == LIST and has_lists:
        return _list(data, place, depth)
    if kind == _BYTE:
        return None, place + 1
    if kind == _DOUBLE:
        return None, place + 8
    raise Unclear


def _list(data: bytes, place: int, depth: int) -> tuple[list[Any], int]:
    """Read a list. Return its elements and the next place."""
    # The first byte has the type of the elements and their number. A number of 15 means that the number follows.
    head = data[place]
    place += 1
    count = head >> 4
    kind = head & 15
    if count == 15:
        count, place = _varint(data, place)
    # In a list, a boolean is a byte.
    if kind in (_TRUE, _FALSE):
        kind = _BYTE
    elements = []
    for _ in range(count):
        # A value of fixed size may begin after the end of the data.
        if place >= len(data):
            raise IndexError
        element, place = _value(kind, data, place, depth, has_lists=True)
        elements.append(element)
    return elements, place


def _signed(data: bytes, place: int) -> tuple[int, int]:
    """Read a number in zigzag encoding. Return it and the next place."""
    number, place = _varint(data, place)
    # Zigzag encoding: 0, 1, 2, 3 mean 0, -1, 1, -2.
    return (number >> 1) ^ -(number & 1), place


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Read an unsigned number of at most 9 bytes. Return it and the next place."""
    number = 0
    for shift in range(0, 63, 7):
        byte = data[place]
        place += 1
        number |= (byte & 127) << shift
        # The highest bit is 0 in the last byte.
        if byte < 128:
            return number, place
    raise Unclear


class _PageReader:
    """Decompresses the small pages of a column: its dictionary, and the choices from it."""

    def __init__(self, descriptor: int, compression: str) -> None:
        self._descriptor = descriptor
        self._compression = compression

    def chosen_text(self, dictionary: Page, chosen: Sequence[Page], schema: Any) -> int:
        """Return the maximum size of all texts that the pages ``chosen`` take from a dictionary."""
        # most dictionaries are filled with different texts, each of which is used a few times
        most_uses = self._most_uses(dictionary, chosen, schema)
        size = most_uses * dictionary.uncompressed
        if size <= GROWS_FROM_BYTES:
            return size
        num_chosen = sum(page.num_values for page in chosen)
        return min(size, num_chosen * self._longest_text(dictionary))

    def _most_uses(self, dictionary: Page, chosen: Sequence[Page], schema: Any) -> int:
        """Return how often the most frequent entry of the dictionary is used, or a larger number."""
        num_chosen = sum(page.num_values for page in chosen)
        if sum(page.uncompressed for page in chosen) > _MAX_CHOICE_BYTES:
            return num_chosen
        if dictionary.num_values > dictionary.uncompressed // _TEXT_BYTES:
            return num_chosen
        uses = np.zeros(dictionary.num_values, np.int64)
        try:
            for page in chosen:
                if not page.has_rle_levels:
                    return num_chosen
                _count_choices(self._content(page), page.num_values, schema, uses)
        except (OSError, ValueError, IndexError):
            return num_chosen
        return int(uses.max(initial=0))

    def _longest_text(self, page: Page) -> int:
        """Return the length of the longest text in a dictionary. If it is not readable, return its full size."""
        if page.uncompressed > _MAX_DICTIONARY_BYTES:
            return page.uncompressed
        try:
            data = self._content(page)
        except (OSError, ValueError):
            return page.uncompressed
        longest = place = 0
        last = len(data) - _TEXT_BYTES
        read_length = struct.Struct("<I").unpack_from
        for _ in range(page.num_values):
            if place > last:
                break
            (length,) = read_length(data, place)
            if length > longest:
                longest = length
            place += _TEXT_BYTES + length
        return min(longest, page.uncompressed)

    def _content(self, page: Page) -> bytes:
        """Return the decompressed content of a page.

        Raises:
            OSError, ValueError: the page is damaged or too large, or its codec is not supported.
        """
        import pyarrow

        if page.compressed > _MAX_DICTIONARY_BYTES:
            raise ValueError
        packed = os.pread(self._descriptor, page.compressed, page.start)
        if self._compression == "UNCOMPRESSED":
            return packed
        codec = pyarrow.Codec(self._compression.lower())
        content: bytes = codec.decompress(packed, page.uncompressed, asbytes=True)
        return content


def _count_choices(
    content: bytes, num_values: int, schema: Any, uses: npt.NDArray[np.int64]
) -> None:
    """Add to ``uses`` how often a data page chooses each entry of its dictionary.

    The values follow the levels, in runs of equal values or of packed bits.

    Raises:
        IndexError, ValueError: the page ends early, or chooses an entry that does not exist.
    """
    place = 0
    for level in (schema.max_repetition_level, schema.max_definition_level):
        if level:
            place += _TEXT_BYTES + int.from_bytes(content[place : place + _TEXT_BYTES], "little")
    width = content[place]
    place += 1
    if width > _MAX_WIDTH:
        raise ValueError
    weights = 1 << np.arange(width, dtype=np.int64)
    while num_values > 0 and place < len(content):
        head, place = _varint(content, place)
        count = head >> 1
        if head & 1:
            packed = np.frombuffer(content[place : place + count * width], np.uint8)
            place += count * width
            bits = np.unpackbits(packed, bitorder="little")
            entries = (
                bits[: len(bits) // max(width, 1) * width].reshape(-1, max(width, 1)) @ weights
            )
            uses += np.bincount(entries, minlength=len(uses))
            # packed values of width 0 take no bytes
            if not width:
                uses[0] += 8 * count
            num_values -= 8 * count
            continue
        num_bytes = (width + 7) // 8
        entry = int.from_bytes(content[place : place + num_bytes], "little")
        place += num_bytes
        uses[entry] += min(count, num_values)
        num_values -= count
