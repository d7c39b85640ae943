"""Plain text files, compressed or not. Each file is one row, ``{"text": ...}``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardtrain.data import shared_opening
from shardtrain.data.sources import BadRow, Request, Row, Table
from shardtrain.data.sources._compressed import BLOCK_BYTES, Damaged, open_stream
from shardtrain.data.sources._data_files import (
    File,
    FileSource,
    check_text,
    is_many,
    list_files,
    place_listed,
)
from shardtrain.data.sources._index import BYTE_ORDER_MARK, too_long
from shardtrain.data.sources._json import not_utf8
from shardtrain.facts import file_kinds

ENDINGS = file_kinds.ENDINGS["text"]


def open_source(request: Request) -> Table:
    """Open a file, all ``*.txt`` files below a folder, or the files that match a pattern.

    Files must be UTF-8. A byte order mark is removed. Line ends and U+0000 are kept.

    Raises:
        ConfigError: the option is not set, or matches no file.
        DataError: a file cannot be used.
    """
    return open_files(list_files(request, "text", ENDINGS, empty=True), request)


def open_files(files: Sequence[File], request: Request) -> Table:
    """Open files that were already listed; see open_source."""

    def look() -> None:
        for file in files:
            check_text(file)

    if not is_many(files):
        shared_opening.once(place_listed(files), look)
    return TextFiles(files, request.max_row_bytes)


@dataclass
class TextFiles(FileSource):
    """A table in which each row is a file, see ``Table``."""

    max_row_bytes: int

    @property
    def num_rows(self) -> int:
        """Number of files."""
        return len(self.members)

    def row(self, index: int) -> Row:
        file = self.members[index]
        # If there are many files, they were not checked when the dataset was opened.
        if is_many(self.members):
            check_text(file)
        if file.compression is None and file.size > self.max_row_bytes:
            return too_long(file.size)
        pieces = []
        total = 0
        with open_stream(file) as stream:
            try:
                while total <= self.max_row_bytes and (block := stream.read(BLOCK_BYTES)):
                    pieces.append(block)
                    total += len(block)
            except Damaged as error:
                return BadRow(str(error))
        if total > self.max_row_bytes:
            return BadRow("is longer than data.max_row_bytes")
        content = b"".join(pieces)
        text = content.removeprefix(BYTE_ORDER_MARK)
        try:
            return {"text": text.decode()}
        except UnicodeDecodeError as error:
            return not_utf8(error, shift=len(content) - len(text))

    def place(self, index: int) -> str:
        return self.members[index].path
