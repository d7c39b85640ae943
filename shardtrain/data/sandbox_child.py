"""Child process of ``sandbox``: open one artefact within hard limits, and write the result as a line of JSON."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.utils.errors import ShardtrainError, causes
from shardtrain.utils.hub_errors import describe_error
from shardtrain.utils.limits import is_out_of_memory


def _lower(kind: int, limit: int) -> None:
    """Set a limit of this process, unless there is already a lower one, for example from a scheduler."""
    _, most = resource.getrlimit(kind)
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(kind, (limit, most))


def bound(memory_bytes: int, seconds: int, file_bytes: int = 0) -> None:
    """Limit the memory and CPU time of this process, and forbid it to write files.

    ``file_bytes`` is the size of the files that the process will memory-map. These files need address space,
    but no memory.
    """
    # Only Linux enforces these memory limits.
    if sys.platform == "linux":
        pages = Path("/proc/self/statm").read_text().split()
        sizes = [int(count) * resource.getpagesize() for count in pages]
        mapped, resident, _, _, _, data, _ = sizes
        more = max(memory_bytes - resident, 0)
        # Allow address space for mapping the files twice. RLIMIT_DATA limits all other memory, however
        # large (and sparse) the files are.
        _lower(resource.RLIMIT_AS, mapped + more + 2 * file_bytes)
        _lower(resource.RLIMIT_DATA, data + more)
    # The imports before this call count, too. They may be slow on a busy machine.
    _lower(resource.RLIMIT_CPU, seconds + math.ceil(time.process_time()))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class LibraryError(Exception):
    """A library cannot read the artefact. The message is its reason, in one line."""

    def __init__(self, error: Exception, path: str = "") -> None:
        reason = describe_error(error)
        super().__init__(f"{path}: {reason}" if path else reason)
        self.errno = getattr(error, "errno", None) or 0


def _open_tokenizer(request: Mapping[str, Any]) -> None:
    from shardtrain.data.tokenizers.open_tokenizer import open_content

    path = Path(request["path"])
    bound(request["memory_bytes"], request["seconds"])
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != request["sha256"]:
        raise ValueError("it was changed while it was opened")
    tokenizer = open_content(path, content, request["option"], request["spec"])
    # Some files open, but fail or hang when they tokenize a text. So try words, a long run of one character,
    # and all kinds of characters.
    for text in (
        "hello world",
        "a" * 1000,
        "".join(map(chr, range(32, 1000))),
        "日本 é\u0301 🦜\n\t",
    ):
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)


def _open_parquet(request: Mapping[str, Any]) -> None:
    import pyarrow.parquet

    from shardtrain.data.sources import parquet

    # Use half of the limit, because the trainer needs the other half for itself and for the rows.
    bound(request["memory_bytes"] // 2, request["seconds"])
    pyarrow.set_cpu_count(1)
    try:
        limits = parquet.thrift_limits(request["max_list"])
        file = pyarrow.parquet.ParquetFile(request["path"], pre_buffer=False, **limits)
        if not request["groups"]:
            # Do the same as the parent will do with the footer.
            parquet.suspicious_groups(file.metadata)
            _ = file.schema_arrow
            return
        for _ in file.iter_batches(
            batch_size=request["rows"], row_groups=request["groups"], use_threads=False
        ):
            pass
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        if is_out_of_memory(error):
            raise
        raise LibraryError(error) from None


def _open_arrow(request: Mapping[str, Any]) -> None:
    import datasets  # test with the library that the parent uses to read the files

    from shardtrain.data.sources import _arrow_offsets
    from shardtrain.data.sources._batches import rows_of_batch

    bound(request["memory_bytes"], request["seconds"], request["file_bytes"])
    path = ""
    opened = []
    try:
        if "folder" in request:
            saved = datasets.load_from_disk(request["folder"])
            opened = list(saved.values()) if isinstance(saved, Mapping) else [saved]
        for path in request.get("paths", ()):
            opened.append(datasets.Dataset.from_file(path))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise LibraryError(error, path) from None
    for dataset in opened:
        table = dataset.data.table
        # Arrow would follow lengths and offsets that point out of their buffers. The rows of a large table
        # are checked when they are read, except columns of rare types.
        is_small = table.nbytes <= _arrow_offsets.FULL_CHECK_BYTES
        table.validate(full=is_small)
        for column in table.columns:
            if not is_small and not _arrow_offsets.is_checkable(column.type):
                column.validate(full=True)
        rows = dataset.with_format("arrow")
        samples = {0, len(rows) // 2, len(rows) - 1} if len(rows) else set()
        for index in samples:
            row = rows[index]
            if is_small or _arrow_offsets.are_valid(row):
                list(rows_of_batch(row, request["max_row_bytes"]))


OPENERS = {"tokenizer": _open_tokenizer, "parquet": _open_parquet, "arrow": _open_arrow}


def main() -> None:
    """Open the artefact of the request on standard input, and write one line of JSON."""
    request = json.loads(sys.stdin.buffer.read())
    refused = ""
    failed: list[str] = []
    error_number = 0
    too_large = f"needs more than data.artefact_memory_bytes={request['memory_bytes']} to open"
    try:
        OPENERS[request["kind"]](request)
    except LibraryError as error:
        failed = [str(error)]
        error_number = error.errno
    except ShardtrainError as error:
        failed = str(error).splitlines() or [type(error).__name__]
        for cause in causes(error):
            # A reader may wrap the error of a library that could not allocate memory.
            if is_out_of_memory(cause):
                refused = too_large
            error_number = error_number or getattr(cause, "errno", None) or 0
    except BaseException as error:
        # BaseException, because a panic in Rust is not an Exception
        refused = f"cannot be opened ({' '.join(str(error).split())[:200]})"
        if is_out_of_memory(error):
            refused = too_large
    answer = {
        "refused": refused[:1000],
        "failed": [] if refused else [line[:1000] for line in failed[:5]],
        "errno": int(error_number),
    }
    os.write(1, json.dumps(answer).encode() + b"\n")
    # Exit without running exit handlers of libraries.
    os._exit(0)


if __name__ == "__main__":
    main()
