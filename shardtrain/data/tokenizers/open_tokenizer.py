"""The interface of tokenizers, and the function that opens one."""

from __future__ import annotations

import codecs
import copyreg
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardtrain.config import assets
from shardtrain.data import sandbox, shared_opening
from shardtrain.data.tokenizers.byte import ByteTokenizer
from shardtrain.data.tokenizers.json_file import JsonTokenizer
from shardtrain.data.tokenizers.own_tokenizer import OwnTokenizer
from shardtrain.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from shardtrain.data.tokenizers.tiktoken_model import TiktokenTokenizer, looks_like
from shardtrain.data.tokenizers.tokenizer_config import files_beside
from shardtrain.utils import atomic_io, bounded_reads
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.temporary import temporary_folder

__all__ = ["ByteTokenizer", "Ids", "Spans", "Tokenizer", "open_tokenizer"]

Ids = npt.NDArray[np.int32]
Spans = npt.NDArray[np.int64]

OWN = "model.tokenizer_path"
"""The only option that may name a Python file."""

MAX_FILE_BYTES = 2**28
"""A larger file is rejected without reading it. The largest vocabularies in use need 40 MiB."""

_NAMES = ("tokenizer.json", "tokenizer.model")


class Tokenizer(Protocol):
    """Interface of a tokenizer. Ids are in 0..vocab_size-1.

    A tokenizer can be pickled. Unpickling opens the file again, and raises an error if it has changed.
    After a fork, both processes can use the tokenizer.
    """

    spec: str
    """The argument of ``open_tokenizer``: "bytes", "python_bpe" or a path."""
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    prefix_ids: tuple[int, ...]
    """Ids that the tokenizer's own files put before a text, such as BOS or ``[CLS]``."""
    suffix_ids: tuple[int, ...]
    """Ids that the tokenizer's own files put after a text, such as EOS or ``[SEP]``."""
    special_ids: frozenset[int]
    """Ids of control tokens, such as the token that ends a turn of a conversation."""
    special_tokens: Mapping[str, str]
    """Maps the names that chat templates use for special tokens to their texts: ``{"bos_token": "<s>"}``."""
    chat_template: str | None
    """Jinja template for conversations."""
    tool_template: str | None
    """Jinja template for conversations with tools, if there is a separate one."""
    fingerprint: str
    """SHA-256 in hex of everything that determines the ids. Equal fingerprints mean equal tokens."""

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, without BOS and EOS."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text.

        Uses several cores if TOKENIZERS_PARALLELISM and RAYON_NUM_THREADS allow it.
        """
        ...

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[Ids, Spans]]:
        """Return the ids of each text, and their character ranges (n, 2).

        A range consists of the index of a token's first character, and the index after its last character.
        Tokens may share a character. Special tokens in a text become their ids, because this method is for
        conversations that a template has rendered.
        """
        ...

    def decode(
        self, ids: Sequence[int] | npt.NDArray[np.integer], keep_special: bool = False
    ) -> str:
        """Return the text of ids, with special tokens only if ``keep_special``."""
        ...


def open_tokenizer(path: str, option: str = "model.hf_assets_path") -> Tokenizer:
    """Open "bytes", "python_bpe", a file, or a folder with ``tokenizer.json`` or else ``tokenizer.model``.

    The type of a file is recognized by its content: a ``tokenizer.json`` of the tokenizers library, a
    sentencepiece model, or tiktoken's ranks in base64, which are read like those of Llama 3. Only
    ``model.tokenizer_path`` may name a .py file. Errors name ``option``. If ranks open data together, one
    of them reads the files and sends them to the others (``shared_opening``).

    Raises:
        ConfigError: the file does not exist or cannot be read, or a library is missing.
    """
    if path == assets.BYTES:
        return ByteTokenizer()
    if path.endswith(".py") and option == OWN:
        # This option may name code, because the user has chosen it. All other options name untrusted files.
        return OwnTokenizer(path, option)
    if assets.is_built_in(path):
        return open_content(*_read(path, option), option, path)

    # The rank that reads the files opens the tokenizer here, and sends the files to the others.
    opened: list[Tokenizer] = []

    def look() -> Any:
        file, content = _read(path, option)
        opened.append(open_content(file, content, option, path))
        files = {file.name: content, **files_beside(file.parent)}
        return {
            "name": file.name,
            "files": {name: np.frombuffer(data, np.uint8) for name, data in files.items()},
        }

    received = shared_opening.once(path, look)
    if opened:
        return opened[0]

    # The other ranks write the files to a temporary folder,
    # because a tokenizer reads the files next to its own.
    with temporary_folder("tokenizer") as folder:
        for name, data in received["files"].items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        file = folder / received["name"]
        return open_content(file, file.read_bytes(), option, path)


def open_content(file: Path, content: bytes, option: str, path: str) -> Tokenizer:
    """Open a tokenizer whose file was already read. Raises the same errors as ``open_tokenizer``."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if file.suffix == ".json" or content[:1] == b"{":
        return JsonTokenizer(file, content, option, path)
    if looks_like(content):
        return TiktokenTokenizer(file, content, option, path)
    return SentencePieceTokenizer(file, content, option, path)


def _read(path: str, option: str) -> tuple[Path, bytes]:
    """Return a tokenizer's file and its bytes, after a child process has opened it within limits.

    Raises the same errors as ``open_tokenizer``.
    """
    file = assets.tokenizer_folder(path)
    try:
        # A folder may contain a tokenizer in several formats. The names are in the order of preference.
        if file.is_dir():
            candidates = [file / name for name in _NAMES]
            file = next(filter(bounded_reads.is_present, candidates), candidates[0])
        if not bounded_reads.is_present(assets.tokenizer_folder(path)):
            raise ConfigError(
                Problem(
                    option,
                    path,
                    rule="does not exist",
                    fix='name a tokenizer\'s file or folder, get one with "shardtrain data download", or use "bytes"',
                )
            )
        if not bounded_reads.is_present(file):
            raise ConfigError(
                Problem(
                    option,
                    path,
                    rule=f"contains no {' or '.join(_NAMES)}",
                    fix='name a folder that contains one of them, or use "bytes"',
                )
            )
        with open(file, "rb", opener=atomic_io.without_waiting) as opened:
            if os.fstat(opened.fileno()).st_size > MAX_FILE_BYTES:
                raise ConfigError(
                    Problem(
                        option,
                        str(file),
                        rule=f"has more than {MAX_FILE_BYTES} bytes, which is larger than any tokenizer",
                        fix="name a tokenizer's file",
                    )
                )
            content = opened.read()
    except OSError as error:
        fix = "copy or download a file that this user may read"
        raise bounded_reads.unreadable(option, file, error, fix) from error
    if not content:
        raise ConfigError(Problem(option, str(file), "is empty", "copy or download it again"))
    if content.startswith(b"version https://git-lfs"):
        raise ConfigError(
            Problem(
                option,
                str(file),
                rule="is a Git LFS pointer instead of the file",
                fix="fetch the file itself, with git lfs pull or shardtrain data download",
            )
        )

    # First open the file in a child process with limits, because a malicious file could make a library fill
    # the memory or crash.
    digest = hashlib.sha256(content).hexdigest()
    request = {"path": str(file.absolute()), "sha256": digest, "option": option, "spec": path}
    try:
        if not assets.is_built_in(path):
            sandbox.open_in_child("tokenizer", request, digest)
    except sandbox.Failed as failed:
        trouble = bounded_reads.trouble(file, OSError(failed.errno, failed.lines[0]))
        raise trouble or ConfigError(failed.lines) from None
    except sandbox.Refused as refused:
        raise ConfigError(
            Problem(
                option,
                str(file),
                rule=str(refused),
                fix=refused.fix or "use another tokenizer's files, or raise the limit",
            )
        ) from None
    return file, content


def reopen(spec: str, option: str, fingerprint: str) -> Tokenizer:
    """Open a tokenizer again in another process.

    Raises:
        ConfigError: it cannot be opened, or has changed.
    """
    tokenizer = open_tokenizer(spec, option)
    if tokenizer.fingerprint != fingerprint:
        raise ConfigError(
            Problem(
                option,
                spec,
                rule="has changed while it was in use",
                fix="start again, and do not change the files during the run",
            )
        )
    return tokenizer


def _by_reopening(tokenizer: Any) -> tuple[Callable[..., Tokenizer], tuple[str, str, str]]:
    return reopen, (tokenizer.spec, tokenizer.option, tokenizer.fingerprint)


# Most tokenizers of the libraries cannot be pickled. So unpickling opens the file again.
for _kind in (JsonTokenizer, SentencePieceTokenizer, TiktokenTokenizer, OwnTokenizer):
    copyreg.pickle(_kind, _by_reopening)
