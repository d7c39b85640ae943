"""Tables in text files: ``.tsv`` with tabs between fields and no quotes, and ``.csv`` as in RFC 4180."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardtrain.data import shared_opening
from shardtrain.data.sources import BadRow, Request, Row, Shards, Table
from shardtrain.data.sources._compressed import open_stream
from shardtrain.data.sources._data_files import File, check_text, is_many, list_files, place_listed
from shardtrain.data.sources._index import RecordIndex, RecordReader
from shardtrain.data.sources._json import not_utf8
from shardtrain.data.sources._records import records
from shardtrain.data.sources._rows import FileShards, FileTable, Part, RecordsPart
from shardtrain.facts import file_kinds
from shardtrain.utils.errors import DataError

ENDINGS = file_kinds.ENDINGS["tsv"]


def open_source(request: Request) -> Table | Shards:
    """Open a file, a folder or a pattern, with rows ``{column: text}``.

    Return shards if a file is compressed or there are many files, else a table. The first line of each file
    names the columns. If ``request.header`` is False, they are named "0", "1", ... A line that contains
    only whitespace is not a row. In a CSV file, quoted fields may contain newlines,
    and quotes inside them are doubled.

    Raises:
        ConfigError: the option is not set, or matches no file.
        DataError: a file cannot be used, or the files have different columns.
    """
    return open_files(list_files(request, "tsv", ENDINGS), request)


def open_files(files: Sequence[File], request: Request) -> Table | Shards:
    """Open files that were already listed; see open_source."""
    quoted = files[0].kind == ".csv"
    skipped = int(request.header)
    look = LookAtTable(files[0], request)
    reader = RecordReader()
    in_sequence = not is_many(files) and any(file.compression for file in files)

    # One rank finds the columns and the starts of rows for all ranks. If there are many files, it reads
    # only the columns of the first file.
    def first_look() -> dict[str, Any]:
        for file in files:
            if (file.kind == ".csv") != quoted:
                raise file.unusable(
                    f"has another format than {files[0].path}", "select *.tsv or *.csv by a pattern"
                )
        if is_many(files):
            return {"columns": look.columns()}
        for file in files:
            check_text(file)
        columns = _columns(files, quoted, request)
        lines = []
        if not in_sequence:
            for file in files:
                index = RecordIndex(
                    file, reader, quoted=quoted, max_row_bytes=request.max_row_bytes
                )
                lines.append(index.arrays())
        return {"columns": columns, "lines": lines}

    looked = shared_opening.once(place_listed(files), first_look)
    parse = FieldsOf(tuple(looked["columns"]), quoted)
    if is_many(files):
        return FileShards(
            files, parse, request.max_row_bytes, skipped=skipped, quoted=quoted, look=look
        )
    if in_sequence:
        return FileShards(files, parse, request.max_row_bytes, skipped=skipped, quoted=quoted)
    parts = []
    for file, lines in zip(files, looked["lines"], strict=True):
        index = RecordIndex(file, reader, lines, quoted=quoted)
        parts.append(RecordsPart(index, parse, request.max_row_bytes, skipped=skipped))
    return FileTable(files, parts)


@dataclass(frozen=True)
class LookAtTable:
    """Checks a file when it is opened, see ``FileShards.look``.

    If there are many files, this replaces a check of all files when the dataset is opened.
    """

    first: File
    request: Request

    def columns(self) -> tuple[str, ...]:
        """Return the columns of all files, from the first file."""
        check_text(self.first)
        return _columns([self.first], self.first.kind == ".csv", self.request)

    def __call__(self, file: File) -> Part | None:
        check_text(file)
        _columns([self.first, file], self.first.kind == ".csv", self.request)
        return None


@dataclass(frozen=True)
class FieldsOf:
    """Converts a record to a row with these columns."""

    columns: tuple[str, ...]
    quoted: bool

    def __call__(self, data: bytes) -> Row:
        """Return the row, or a BadRow."""
        fields = split(data, self.quoted)
        if isinstance(fields, BadRow):
            return fields
        if len(fields) != len(self.columns):
            counts = f"{len(fields)}, not {len(self.columns)}"
            return BadRow("has a different number of fields than columns", detail=counts)
        return dict(zip(self.columns, fields, strict=True))


def split(data: bytes, quoted: bool) -> list[str] | BadRow:
    """Return the fields of one record."""
    try:
        text = data.removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        return not_utf8(error)
    if not quoted:
        return text.split("\t")
    # The csv module limits fields to 128 KiB.
    # Raise this limit, because data.max_row_bytes already limits rows.
    if csv.field_size_limit() < len(text):
        csv.field_size_limit(len(text))
    try:
        (fields,) = csv.reader([text], strict=True)
    except (csv.Error, ValueError) as error:
        return BadRow("is not CSV", detail=str(error))
    return fields


def _columns(files: Sequence[File], quoted: bool, request: Request) -> tuple[str, ...]:
    """Return the columns of all files, from their first records. Raises DataError if they differ."""
    first = _first(files[0], quoted, request)
    if not request.header:
        return tuple(str(number) for number in range(len(first)))
    for file in files[1:]:
        columns = _first(file, quoted, request)
        if columns != first:
            rule = (
                f"has the columns {', '.join(columns)}, but {files[0].path} has {', '.join(first)}"
            )
            raise file.unusable(rule, "use the same first line in all files")
    return first


def _first(file: File, quoted: bool, request: Request) -> tuple[str, ...]:
    """Return the fields of a file's first record. Raises DataError if they are not column names."""
    with open_stream(file) as stream:
        line, record = next(
            records(stream, request.max_row_bytes, quoted=quoted), (1, BadRow("it does not exist"))
        )
    fields = record if isinstance(record, BadRow) else split(record, quoted)
    place = f"{file.path}:{line}"
    if isinstance(fields, BadRow):
        raise DataError(f"{place}: the first line cannot be read: {fields}; correct the file")
    are_names = len(set(fields)) == len(fields) and all(fields)
    if request.header and not are_names:
        shown = ", ".join(repr(name) for name in fields[:8])
        raise DataError(
            f"{place}: the first line must name the columns, each once, but is {shown}; "
            'add such a line, or if the file has none, set data.text_field to a number ("0" is the first column)'
        )
    return tuple(fields)
