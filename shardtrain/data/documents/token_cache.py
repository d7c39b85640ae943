"""Cache of tokenized datasets, in the user's cache folder.

Without it, tokenizing 60 MiB of text takes 22 CPU seconds whenever a run starts. The cache key contains
everything that determines the tokens: size, inode and both times of each file (users cannot set the time of
change), the tokenizer, the options, and the code that reads the files. Only the user can read cache files
(mode 0600). They contain a SHA-256, so a damaged file costs time but cannot change a token. If the cache
exceeds ``MAX_BYTES``, its oldest files are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.config.schema import Data, DataSource
from shardtrain.data import file_hashes
from shardtrain.data.documents.encoded import Encoder
from shardtrain.data.shared_opening import decode, encode
from shardtrain.data.sources import Request
from shardtrain.data.sources._data_files import File
from shardtrain.utils import atomic_io, user_cache

logger = logging.getLogger(__name__)

MAX_BYTES = 2 * 2**30
"""Maximum size of the cache. A dataset that would take more than a quarter of it is not cached."""
_MIN_SECONDS = 0.5
"""A dataset is not cached if tokenizing it takes less time than this."""
_MAX_FILES = 100_000
"""Maximum number of files of a cached dataset. A list of more files would need too much memory."""
_AFTER_TOKENS = (
    "cache_tokens", "document_mask", "long_documents", "packing", "readers", "sources", "stages", "streaming",
)  # fmt: skip
"""Options of [data] that are not part of the key, because they do not change the tokens.

(The options of a source are part of the key separately.)
"""
_LIBRARIES = (
    "numpy",
    "pyarrow",
    "sentencepiece",
    "tiktoken",
    "tokenizers",
    "transformers",
    "zstandard",
)
"""Libraries whose version may change the tokens of a row."""


def cached_or_computed(
    dataset: str,
    files: Sequence[File],
    facts: tuple[Data, DataSource, Request, Encoder, int],
    make: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Return the result of ``make``, from the cache if possible.

    Args:
        dataset: name of the dataset, for the log.
        files: the files of the dataset.
        facts: everything that determines the result, apart from the contents of ``files``. The last fact is
            the vocabulary size.
        make: returns the arrays of a token buffer, and the reasons why rows were skipped.
    """
    identities = _identities(files)
    if identities is None:
        return make()
    path = user_cache.folder() / "tokens" / _key(identities, facts)
    cached = _read(path, vocab_size=facts[-1])
    if cached is not None:
        logger.info("dataset %s: tokens from the cache in %s", dataset, path.parent)
        return cached
    # Cache only results that take time, of files whose timestamps are reliable.
    start = time.perf_counter()
    result = make()
    if time.perf_counter() - start < _MIN_SECONDS or not _are_settled(identities):
        return result
    # Do not cache the result if a file was replaced while it was read.
    if _identities(files) == identities:
        # Ignore a full or read-only home folder. The dataset is then tokenized again at the next start.
        with contextlib.suppress(OSError):
            _write(path, result)
    return result


def _identities(files: Sequence[File]) -> list[list[int]] | None:
    """Return size, times, inode and device of each file.

    None if there are too many files, or a file has changed since it was listed.
    (Reading the file reports this.)
    """
    if len(files) > _MAX_FILES:
        return None
    identities = []
    for file in files:
        try:
            now = os.stat(file.path)
        except OSError:
            return None
        if (now.st_size, now.st_mtime_ns, now.st_ino) != (file.size, file.mtime_ns, file.inode):
            return None
        identities.append([now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino, now.st_dev])
    return identities


def _are_settled(identities: list[list[int]]) -> bool:
    """True if no file was changed so recently that another change could keep the same timestamps."""
    newest = max((max(mtime, ctime) for _, mtime, ctime, _, _ in identities), default=0)
    return time.time() - newest / 1e9 > file_hashes.SETTLED_SECONDS


def _key(identities: list[list[int]], facts: tuple[Data, DataSource, Request, Encoder, int]) -> str:
    """Return the cache key of a dataset, a SHA-256."""
    data, source, request, encoder, vocab_size = facts
    versions = {"python": platform.python_version()}
    for library in _LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    # Include the code that reads and tokenizes. Tokens of an older version of the code are then not used.
    code = []
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        status = path.stat()
        code.append([path.name, status.st_size, status.st_mtime_ns])
    # Exclude options that do not change the tokens. The option's name is only used in error messages.
    data_options = _without(data, _AFTER_TOKENS)
    source_options = _without(source, ("weight", "epochs"))
    request_options = _without(request, ("option",))
    key_parts = [
        versions,
        code,
        data_options,
        source_options,
        request_options,
        encoder.fingerprint,
        vocab_size,
    ]
    return hashlib.sha256(json.dumps([key_parts, identities]).encode()).hexdigest()


def _without(options: Data | DataSource | Request, names: Sequence[str]) -> dict[str, Any]:
    """Return the options as a dict, without some names."""
    return {name: value for name, value in asdict(options).items() if name not in names}


def _read(path: Path, vocab_size: int) -> dict[str, Any] | None:
    """Read a cache file. Return None if it does not exist or is not valid."""
    try:
        with open(path, "rb", opener=atomic_io.without_waiting) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_size > MAX_BYTES // 4:
                return None
            mark = file.readline(128)
            content = file.read()
        if mark != _mark(content):
            return None
        result = decode(memoryview(content))
        if not _is_valid(result["line"], vocab_size):
            return None
        # Update the time of the file, because the least recently used files are removed first.
        with contextlib.suppress(OSError):
            os.utime(path)
        return dict(result)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None


def _is_valid(line: Mapping[str, Any], vocab_size: int) -> bool:
    """True if documents have tokens, ids fit the vocabulary, and a mask covers all tokens."""
    tokens = line["tokens"]
    starts = line["starts"]
    mask = line["mask"]
    if tokens.dtype.kind not in "iu" or int(tokens.max()) >= vocab_size:
        return False
    if starts.dtype != np.int64 or int(starts[0]) != 0 or int(starts[-1]) >= len(tokens):
        return False
    # Starts ascend strictly, so no document is empty.
    if not bool((np.diff(starts) > 0).all()):
        return False
    return mask is None or (mask.dtype == np.bool_ and len(mask) == len(tokens))


def _write(path: Path, result: dict[str, Any]) -> None:
    """Write a cache file, and remove the oldest files to stay below ``MAX_BYTES``."""
    content = b"".join(encode(result))
    if len(content) > MAX_BYTES // 4:
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic_io.sweep(path.parent)
    cache_files = sorted(path.parent.glob("[0-9a-f]" * 64), key=lambda file: file.stat().st_mtime)
    used_bytes = sum(file.stat().st_size for file in cache_files)
    free_bytes = MAX_BYTES - len(content) - used_bytes
    for file in cache_files:
        if free_bytes >= 0:
            break
        free_bytes += file.stat().st_size
        file.unlink(missing_ok=True)
    atomic_io.write(path, _mark(content) + content, mode=0o600)


def _mark(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"
