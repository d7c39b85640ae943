"""Text to token ids and back: a byte-level tokenizer that needs no file, or a ``tokenizer.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from shardtrain.errors import ConfigError, Problem

if TYPE_CHECKING:
    import tokenizers

# used only when no file beside tokenizer.json says which token begins and which ends a document
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|startoftext|>", "<|bos|>")
_EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|eos|>")


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer; ids are in 0..vocab_size-1."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str
    """SHA-256 in hex of all that decides the ids; equal fingerprints give equal tokens."""

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Ids of a text, without bos and eos."""
        ...

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Text of ids; special tokens are left out."""
        ...


def open_tokenizer(path: str, option: str = "model.hf_assets_path") -> Tokenizer:
    """Open the tokenizer at a path: "bytes", a folder with ``tokenizer.json``, or that file itself.

    ``option`` is named in errors.

    Raises:
        ConfigError: when there is no such file, it cannot be read, or the ``tokenizers`` library is missing.
    """
    if path == "bytes":
        return ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        fix = 'name a folder that holds tokenizer.json, or use "bytes"'
        raise ConfigError(Problem(option, path, "holds no tokenizer.json", fix))
    if file.suffix != ".json":
        fix = "convert it with the transformers library and name the tokenizer.json"
        raise ConfigError(Problem(option, path, "is no tokenizer.json", fix))
    return JsonTokenizer(file, option)


class ByteTokenizer:
    """One id per UTF-8 byte, 0..255; 256 begins a document and 257 ends it."""

    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint = hashlib.sha256(b"shardtrain bytes 1").hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """UTF-8 bytes of a text; a lone surrogate becomes "?" as UTF-8 has no bytes for it."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Text of ids; bos and eos are left out and bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: when an id is not in 0..257.
        """
        array = np.asarray(ids, dtype=np.int64)
        if array.size and not (int(array.min()) >= 0 and int(array.max()) < self.vocab_size):
            raise ValueError("token id outside 0..257")
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer:
    """A ``tokenizer.json``, run by the ``tokenizers`` library; reading it runs no code from it.

    bos and eos come from ``tokenizer_config.json`` or ``special_tokens_map.json`` beside it, and otherwise from the
    special tokens with the usual names. Special tokens that a document spells out become their ids.
    """

    def __init__(self, file: Path, option: str = "model.hf_assets_path") -> None:
        content = file.read_bytes()
        self._tokenizer = _load(file, content, option)
        # ids may have gaps, so the largest id decides the rows that an embedding needs
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size == 0:
            raise ConfigError(Problem(option, str(file), "has an empty vocabulary", "use a trained tokenizer"))
        named = _named_specials(file.parent, option)
        self.bos_id = self._special_id(named, "bos_token", _BOS_NAMES, option)
        self.eos_id = self._special_id(named, "eos_token", _EOS_NAMES, option)
        ends = f"{self.bos_id} {self.eos_id}".encode()
        self.fingerprint = hashlib.sha256(hashlib.sha256(content).digest() + ends).hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Ids of a text, without bos and eos."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer]) -> str:
        """Text of ids; special tokens are left out."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def _special_id(self, named: dict[str, str | None], key: str, usual: tuple[str, ...], option: str) -> int | None:
        if key in named:
            token = named[key]
            token_id = None if token is None else self._tokenizer.token_to_id(token)
            if token is not None and token_id is None:
                fix = "correct tokenizer_config.json and special_tokens_map.json beside it"
                raise ConfigError(Problem(option, None, f"names the {key} {token!r}, which has no id", fix))
            return token_id
        special = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return next((special[name] for name in usual if name in special), None)


def _load(file: Path, content: bytes, option: str) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        fix = 'pip install tokenizers, or use "bytes"'
        raise ConfigError(Problem(option, str(file), "needs the tokenizers library", fix)) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises Exception itself for every fault of the file
        rule = f"cannot be read as a tokenizer ({str(error).splitlines()[0]})"
        raise ConfigError(Problem(option, str(file), rule, "replace the file by a complete tokenizer.json")) from error
    # a saved file may ask for cut and filled rows; documents must arrive whole
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _named_specials(folder: Path, option: str) -> dict[str, str | None]:
    """bos_token and eos_token as the files beside tokenizer.json name them; None where one is set to null."""
    named: dict[str, str | None] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            content: Any = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            problem = Problem(option, str(file), f"is no JSON ({error})", "replace the file, or remove it")
            raise ConfigError(problem) from error
        if not isinstance(content, dict):
            raise ConfigError(Problem(option, str(file), "is no JSON object", "replace the file, or remove it"))
        for key in {"bos_token", "eos_token"}.intersection(content):
            token = content[key]
            named[key] = token.get("content") if isinstance(token, dict) else token
    return named
