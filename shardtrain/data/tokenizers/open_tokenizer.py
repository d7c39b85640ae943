"""The interface of tokenizers, and opening the tokenizer at a path."""

from __future__ import annotations

import codecs
import copyreg
import hashlib
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
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.temporary import temporary_folder

__all__ = ["ByteTokenizer", "Ids", "Spans", "Tokenizer", "open_tokenizer"]

Ids = npt.NDArray[np.int32]
Spans = npt.NDArray[np.int64]

OWN = "model.tokenizer_path"
"""The only option that may name a Python file."""

MAX_FILE_BYTES = 2**28
"""A larger file is rejected unread. The largest vocabularies in use take 40 MiB."""

_NAMES = ("tokenizer.json", "tokenizer.model")


class Tokenizer(Protocol):
    """Interface of a tokenizer. Ids are in 0..vocab_size-1.

    A tokenizer can be pickled: the copy opens the file again, and rejects a file that has changed. It can
    also be used on both sides of a fork.
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
    """Ids that they put after a text, such as EOS or ``[SEP]``."""
    special_ids: frozenset[int]
    """Ids of control tokens, such as the token that ends a turn of a conversation."""
    special_tokens: Mapping[str, str]
    """Texts of named special tokens, with the names that chat templates use: ``{"bos_token": "<s>"}``."""
    chat_template: str | None
    """Jinja template of conversations."""
    tool_template: str | None
    """Template of conversations with tools, if it differs."""
    fingerprint: str
    """SHA-256 in hex of everything that determines the ids. Equal fingerprints mean equal tokens."""

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, without BOS and EOS."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text.

        Uses several cores if TOKENIZERS_PARALLELISM and RAYON_NUM_THREADS permit.
        """
        ...

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[Ids, Spans]]:
        """Return the ids of each text, and their character ranges. Special tokens in a text become their
        ids.

        A range [n, 2] is the first character of a token and the one after its last. Tokens may share a
        character. Used for conversations that a template has rendered.
        """
        ...

    def decode(
        self, ids: Sequence[int] | npt.NDArray[np.integer], keep_special: bool = False
    ) -> str:
        """Return the text of ids, with special tokens only if ``keep_special``."""
        ...


def open_tokenizer(path: str, option: str = "model.hf_assets_path") -> Tokenizer:
    """Open "bytes", "python_bpe", a file, or a folder with ``tokenizer.json`` or else ``tokenizer.model``.

    The content determines the kind of a file: ``tokenizer.json`` of the tokenizers library, a sentencepiece
    model, or base64 ranks of tiktoken, which are read like Llama 3's. Only ``model.tokenizer_path`` may
    name a .py file. ``option`` is named in errors. Ranks that open data together receive the files from the
    first of them (``shared_opening``).

    Raises:
        ConfigError: the file does not exist or cannot be read, or a library is missing.
    """
    if path == assets.BYTES:
        return ByteTokenizer()
    if path.endswith(".py") and option == OWN:
        # a path in the user's own config is code that the user chose; other options name artefacts
        return OwnTokenizer(path, option)
    if assets.is_built_in(path):
        return open_content(*_read(path, option), option, path)

    # the rank that reads the files opens its tokenizer, and sends the bytes to the others
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

    # the others write them to a temporary folder, because a tokenizer reads the files next to it
    with temporary_folder("tokenizer") as folder:
        for name, data in received["files"].items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        file = folder / received["name"]
        return open_content(file, file.read_bytes(), option, path)


def open_content(file: Path, content: bytes, option: str, path: str) -> Tokenizer:
    """Open a tokenizer file that was already read, in this process. Raises what ``open_tokenizer`` raises."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if file.suffix == ".json" or content[:1] == b"{":
        return JsonTokenizer(file, content, option, path)
    if looks_like(content):
        return TiktokenTokenizer(file, content, option, path)
    return SentencePieceTokenizer(file, content, option, path)


def _read(path: str, option: str) -> tuple[Path, bytes]:
    """Return the file of a tokenizer and its bytes, after a child process has opened it with limits.

    Raises what ``open_tokenizer`` raises.
    """
    file = assets.tokenizer_folder(path)
    try:
        if file.is_dir():
            file = next(
                (file / name for name in _NAMES if (file / name).exists()), file / _NAMES[0]
            )
        if not file.exists() and not assets.tokenizer_folder(path).exists():
            raise ConfigError(
                Problem(
                    option,
                    path,
                    rule="does not exist",
                    fix='name a tokenizer\'s file or folder, get one with "shardtrain data download", or use "bytes"',
                )
            )
        if not file.is_file():
            raise ConfigError(
                Problem(
                    option,
                    path,
                    rule=f"holds no {' or '.join(_NAMES)}",
                    fix='name a folder that contains one of them, or use "bytes"',
                )
            )
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                Problem(
                    option,
                    str(file),
                    rule=f"has more than {MAX_FILE_BYTES} bytes, more than any tokenizer",
                    fix="name a tokenizer's file",
                )
            )
        content = file.read_bytes()
    except OSError as error:
        raise bounded_reads.unreadable(option, path, error) from error
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

    # open it in a child with limits first: a library may fill the memory or crash on a file of unknown
    # origin
    digest = hashlib.sha256(content).hexdigest()
    request = {"path": str(file.absolute()), "sha256": digest, "option": option, "spec": path}
    try:
        if not assets.is_built_in(path):
            sandbox.prove("tokenizer", request, digest)
    except sandbox.Refused as refused:
        raise ConfigError(
            Problem(
                option,
                str(file),
                rule=str(refused),
                fix="use another tokenizer's files",
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
                fix="start again with unchanging files",
            )
        )
    return tokenizer


def _by_reopening(tokenizer: Any) -> tuple[Callable[..., Tokenizer], tuple[str, str, str]]:
    return reopen, (tokenizer.spec, tokenizer.option, tokenizer.fingerprint)


# the libraries' tokenizers cannot be pickled, or only without their files' content, so the copy opens the
# file again
for _kind in (JsonTokenizer, SentencePieceTokenizer, TiktokenTokenizer, OwnTokenizer):
    copyreg.pickle(_kind, _by_reopening)
