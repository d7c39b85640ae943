"""JSON lines: one object per line, plain or compressed. A ``.json`` file may also be one array of objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardtrain.data import shared_opening
from shardtrain.data.sources import Request, Shards, Table
from shardtrain.data.sources._data_files import File, check_text, is_many, list_files, place_listed
from shardtrain.data.sources._index import RecordIndex, RecordReader
from shardtrain.data.sources._json import parse_bytes
from shardtrain.data.sources._json_array import ArrayPart, is_array, open_array
from shardtrain.data.sources._rows import FileShards, FileTable, Part, RecordsPart
from shardtrain.facts import file_kinds

ENDINGS = file_kinds.ENDINGS["jsonl"]


def open_source(request: Request) -> Table | Shards:
    """Open a file, a folder or a glob pattern of files with JSON objects.

    Return one shard per file if a file is compressed or if there are many files.

    Raises:
        ConfigError: the option is not set, or matches no file.
        DataError: a file cannot be used.
    """
    return open_files(list_files(request, "jsonl", ENDINGS), request)


def open_files(files: Sequence[File], request: Request) -> Table | Shards:
    """Open files that were already listed; see open_source."""
    if is_many(files):
        return FileShards(
            files, parse_bytes, request.max_row_bytes, look=LookAtJsonLines(request.max_row_bytes)
        )
    reader = RecordReader()
    in_sequence = any(file.compression for file in files)
    # Arrays that this rank has opened, if it is the rank that reads the files.
    opened: dict[int, ArrayPart] = {}

    # One rank finds the starts of rows for all ranks. It reads arrays completely. It indexes lines, which
    # can then be read in any order, unless a file is compressed.
    def look() -> list[dict[str, Any]]:
        for file in files:
            check_text(file)
        places: list[dict[str, Any]] = []
        for number, file in enumerate(files):
            if is_array(file):
                opened[number] = open_array(file, request.max_row_bytes)
                places.append({"array": opened[number].elements})
            else:
                lines = None
                if not in_sequence:
                    index = RecordIndex(file, reader, max_row_bytes=request.max_row_bytes)
                    lines = index.arrays()
                places.append({"lines": lines})
        return places

    looked = shared_opening.once(place_listed(files), look)
    parts: dict[int, Part] = {}
    for number, (file, found_places) in enumerate(zip(files, looked, strict=True)):
        if "array" in found_places:
            parts[number] = opened.get(number) or ArrayPart(
                file, found_places["array"], request.max_row_bytes
            )
        elif not in_sequence:
            parts[number] = RecordsPart(
                RecordIndex(file, reader, found_places["lines"]), parse_bytes, request.max_row_bytes
            )
    if in_sequence:
        return FileShards(files, parse_bytes, request.max_row_bytes, parts=parts)
    return FileTable(files, list(parts.values()))


@dataclass(frozen=True)
class LookAtJsonLines:
    """Checks a file when it is opened, if there are many files, see ``FileShards.look``."""

    max_row_bytes: int

    def __call__(self, file: File) -> Part | None:
        check_text(file)
        return open_array(file, self.max_row_bytes) if is_array(file) else None
