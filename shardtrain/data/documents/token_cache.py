"""Tokens of datasets that are read whole at start, kept for the next start.

Tokenizing 60 MiB of text takes 22 CPU seconds, at each start of a run that is tried, swept or continued. What it
gave is kept in the user's cache folder and taken again only where everything that decides it is the same: every file
by size, inode and both times, of which nobody can set the second; the tokenizer, the options and the code that read
them. What is kept ends in nobody else's hands (mode 0600) and is checked by its SHA-256, so a damaged file costs time
and changes no token. The oldest are removed beyond ``MAX_BYTES``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.config.schema import Data, DataSource
from shardtrain.data.documents.encoded import Encoder
from shardtrain.data.shared_opening import decode, encode
from shardtrain.data.sources import Request
from shardtrain.data.sources._data_files import File
from shardtrain.utils import atomic_io, user_cache

logger = logging.getLogger(__name__)

MAX_BYTES = 2 * 2**30
"""Of all that is kept; a dataset that alone takes a quarter of it is not kept."""
_WORTH_SECONDS = 0.5
"""What is tokenized faster than this is not kept."""
_SETTLED_SECONDS = 2.0
"""Age from which the times of a file tell of the next change, whatever the grain of its filesystem's clock."""
_MOST_FILES = 100_000
"""Of a dataset; what each of more is would take more memory to compare than it saves time."""
_AFTER_TOKENS = (
    "cache_tokens", "document_mask", "long_documents", "packing", "readers", "sources", "stages", "streaming",
)  # fmt: skip
"""Options of [data] that decide what becomes of tokens; what ``sources`` says of a dataset is compared by itself."""
_LIBRARIES = ("numpy", "pyarrow", "sentencepiece", "tiktoken", "tokenizers", "transformers", "zstandard")
"""Those that decide what the tokens of a row are."""


def kept_or_made(
    dataset: str,
    files: Sequence[File],
    facts: tuple[Data, DataSource, Request, Encoder, int],
    make: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """What ``make`` gives: the arrays of a token buffer, and what was left out; that of an earlier start if it is kept.

    ``facts`` are all that decides it beside the content of ``files``; the last is the size of the vocabulary.
    """
    identities = _identities(files)
    if identities is None:
        return make()
    path = user_cache.folder() / "tokens" / _key(identities, facts)
    kept = _read(path, vocab_size=facts[-1])
    if kept is not None:
        logger.info("dataset %s: tokens of an earlier start, kept in %s", dataset, path.parent)
        return kept
    start = time.perf_counter()
    made = make()
    if time.perf_counter() - start < _WORTH_SECONDS or not _are_settled(identities):
        return made
    # files that were replaced while they were read would be taken for what stands there now
    if _identities(files) == identities:
        with contextlib.suppress(OSError):  # a home that is full or read-only costs each start the work
            _write(path, made)
    return made


def _identities(files: Sequence[File]) -> list[list[int]] | None:
    """Size, times, inode and device of each file; None where one is not what was listed, which reading it will tell."""
    if len(files) > _MOST_FILES:
        return None
    found = []
    for file in files:
        try:
            now = os.stat(file.path)
        except OSError:
            return None
        if (now.st_size, now.st_mtime_ns, now.st_ino) != (file.size, file.mtime_ns, file.inode):
            return None
        found.append([now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino, now.st_dev])
    return found


def _are_settled(identities: list[list[int]]) -> bool:
    newest = max((max(mtime, ctime) for _, mtime, ctime, _, _ in identities), default=0)
    return time.time() - newest / 1e9 > _SETTLED_SECONDS


def _key(identities: list[list[int]], facts: tuple[Data, DataSource, Request, Encoder, int]) -> str:
    data, source, request, encoder, vocab_size = facts
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    # the code of this package that reads and tokenizes: whoever works on it must see what it does now
    code = []
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        status = path.stat()
        code.append([path.name, status.st_size, status.st_mtime_ns])
    of_data = {name: value for name, value in asdict(data).items() if name not in _AFTER_TOKENS}
    of_source = {name: value for name, value in asdict(source).items() if name not in ("weight", "epochs")}
    # what errors call the dataset, which is not kept where there was one
    of_request = {name: value for name, value in asdict(request).items() if name != "option"}
    decides = [versions, code, of_data, of_source, of_request, encoder.fingerprint, vocab_size]
    return hashlib.sha256(json.dumps([decides, identities]).encode()).hexdigest()


def _read(path: Path, vocab_size: int) -> dict[str, Any] | None:
    """What ``_write`` has written; None where there is nothing, or something else."""
    try:
        with open(path, "rb", opener=atomic_io.without_waiting) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_size > MAX_BYTES // 4:
                return None
            mark = file.readline(128)
            content = file.read()
        if mark != _mark(content):
            return None
        found = decode(memoryview(content))
        tokens, starts, mask = (found["line"][name] for name in ("tokens", "starts", "mask"))
        is_whole = (
            tokens.dtype.kind in "iu"
            and starts.dtype == np.int64
            and int(tokens.max()) < vocab_size
            and int(starts[0]) == 0
            and bool((np.diff(starts) > 0).all())
            and int(starts[-1]) < len(tokens)
            and (mask is None or (mask.dtype == np.bool_ and len(mask) == len(tokens)))
        )
        if not is_whole:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the oldest that nobody uses are removed first
        return dict(found)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None


def _write(path: Path, made: dict[str, Any]) -> None:
    content = b"".join(encode(made))
    if len(content) > MAX_BYTES // 4:
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic_io.sweep(path.parent)
    kept = sorted(path.parent.glob("[0-9a-f]" * 64), key=lambda one: one.stat().st_mtime)
    room = MAX_BYTES - len(content) - sum(one.stat().st_size for one in kept)
    for one in kept:
        if room >= 0:
            break
        room += one.stat().st_size
        one.unlink(missing_ok=True)
    atomic_io.write(path, _mark(content) + content, mode=0o600)


def _mark(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"
