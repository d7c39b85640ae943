"""Tokenizer in a ``tokenizer.json`` file, executed by the ``tokenizers`` library."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardtrain.data.tokenizers import native_memory
from shardtrain.data.tokenizers.threads import threads
from shardtrain.data.tokenizers.tokenizer_config import END_TOKENS, MAX_IDS, ends_facts, read_beside
from shardtrain.utils import checked_json, libraries, limits
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    import tokenizers

T = TypeVar("T")

_MAX_GROWTH = 1000
_MAX_ADDED = 1000
"""Maximum number of tokens that a post-processor may add to a text. Real ones add one or two."""

# The process that has started the library's threads. They do not exist in a forked child, which would wait
# for them forever. The library itself prevents this, but not if TOKENIZERS_PARALLELISM=true is set.
_threads_of_process: int | None = None


class JsonTokenizer:
    """A ``tokenizer.json``. Reading it never runs code that it contains.

    BOS, EOS and padding tokens are named in ``tokenizer_config.json`` or ``special_tokens_map.json`` next
    to it. Otherwise they are recognized by their usual names. The file's post-processor determines which
    tokens are added before and after a text. As in ``transformers``, it takes precedence over
    ``add_bos_token`` in ``tokenizer_config.json``.
    If a text contains a special token as a string, it becomes the token's id.
    """

    def __init__(self, file: Path, content: bytes, option: str, spec: str) -> None:
        self.spec = spec
        self.option = option
        self._tokenizer, self.prefix_ids, self.suffix_ids = _load(file, content, option)
        # Ids may have gaps, so the largest id determines the size of the vocabulary.
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not 0 < self.vocab_size <= MAX_IDS:
            rule = "has ids of 2**31 and above" if self.vocab_size else "has an empty vocabulary"
            raise ConfigError(Problem(option, str(file), rule=rule, fix="use a trained tokenizer"))

        # Read the special tokens from the file, and BOS, EOS and padding from the files next to it.
        config = read_beside(file.parent, option)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        ends_by_name = {}
        for name in END_TOKENS:
            ends_by_name[name] = config.special_id(
                name, self._tokenizer.token_to_id, special, self.vocab_size, option
            )
        self.bos_id, self.eos_id, self.pad_id = ends_by_name.values()
        known_ends = {name: i for name, i in ends_by_name.items() if i is not None}
        self.special_ids = frozenset(special.values()).union(known_ends.values())
        texts = {name: str(self._tokenizer.id_to_token(i)) for name, i in known_ends.items()}
        self.special_tokens: Mapping[str, str] = {**texts, **config.named()}
        self.chat_template = config.chat_template
        self.tool_template = config.tool_template
        _warn_of_idle_switch(
            config.switches.get("add_bos_token"), self.prefix_ids, self.bos_id, str(file)
        )

        # The files next to it change tokens only through these ids.
        # Chat templates have a separate fingerprint.
        ends = f"{self.bos_id} {self.eos_id}".encode()
        ends += ends_facts(self.prefix_ids, self.suffix_ids, self.bos_id, self.eos_id)
        content_hash = hashlib.sha256(content).digest()
        self.fingerprint = hashlib.sha256(content_hash + ends).hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the ids of a text, without BOS and EOS."""
        native_memory.require_for_texts([text])
        with self._panics():
            return np.array(
                self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32
            )

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text. Uses the library's threads."""
        # Use the method without offsets, which is faster. Versions before 0.20.1 do not have it.
        method = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        return self._encode_many(texts, method, _ids_of)

    def encode_spans(
        self, texts: Sequence[str]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Return the ids of each text, and their character ranges (tokens, 2)."""
        return self._encode_many(texts, self._tokenizer.encode_batch, _ids_and_spans_of)

    def _encode_many(
        self, texts: Sequence[str], batch: Callable[..., Any], convert: Callable[[Any], T]
    ) -> list[T]:
        """Encode texts with the library's threads, and convert each encoding.

        If a parent process has used these threads before a fork, encode one text after the other instead.
        """
        # Under a ulimit of memory, divide a batch that is too large. The encodings of a part are converted and
        # freed before the next part.
        if len(texts) > 1 and not native_memory.suffices_for_texts(texts):
            middle = len(texts) // 2
            first_half = self._encode_many(texts[:middle], batch, convert)
            return first_half + self._encode_many(texts[middle:], batch, convert)
        native_memory.require_for_texts(texts)
        return [convert(encoding) for encoding in self._encodings(texts, batch)]

    def _encodings(self, texts: Sequence[str], batch: Callable[..., Any]) -> list[Any]:
        """Return the library's encodings of texts."""
        global _threads_of_process
        with self._panics():
            if _threads_of_process not in (None, os.getpid()):
                return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
            if _threads_of_process is None:
                # The library panics if it cannot start its threads.
                purpose = "the threads of the tokenizer"
                limits.require_threads(threads(), purpose, "RAYON_NUM_THREADS")
            _threads_of_process = os.getpid()
            encoded: list[Any] = batch(list(texts), add_special_tokens=False)
            return encoded

    @contextlib.contextmanager
    def _panics(self) -> Iterator[None]:
        """Context manager that converts a panic of the library, which is not an Exception, to ConfigError.

        For example, the library panics if a pattern takes too long.
        """
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise ConfigError(
                Problem(
                    self.option,
                    self.spec,
                    rule=f"cannot encode a text ({str(error)[:200]})",
                    fix="use a tokenizer with patterns that terminate",
                )
            ) from None

    def decode(
        self, ids: Sequence[int] | npt.NDArray[np.integer], keep_special: bool = False
    ) -> str:
        """Return the text of ids, with special tokens only if ``keep_special``."""
        return str(
            self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not keep_special)
        )


def _ids_of(encoding: Any) -> npt.NDArray[np.int32]:
    return np.array(encoding.ids, dtype=np.int32)


def _ids_and_spans_of(encoding: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return _ids_of(encoding), spans


def _load(
    file: Path, content: bytes, option: str
) -> tuple[tokenizers.Tokenizer, tuple[int, ...], tuple[int, ...]]:
    """Return the tokenizer without its post-processor, and the ids that the post-processor adds before
    and after a text.
    """
    tokenizers = libraries.load(
        "tokenizers", option, str(file), "tokenizers", otherwise='use "bytes"'
    )
    # Reject too many special tokens before the library allocates memory for them.
    if content.count(b'"SpecialToken"') > 2 * _MAX_ADDED:
        raise _adds_too_many(file, option)
    _check_growth(content, file, option)
    native_memory.require_for_file(len(content))
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # For any problem with the file, the library raises a plain Exception or panics.
    except BaseException as error:
        if isinstance(error, MemoryError):
            raise
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            Problem(
                option,
                str(file),
                rule=f"cannot be read as a tokenizer ({reason})",
                fix="replace the file by a complete tokenizer.json",
            )
        ) from error
    # Disable truncation and padding, which the file may configure, because documents must stay complete.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.num_special_tokens_to_add(False) > _MAX_ADDED:
        raise _adds_too_many(file, option)
    prefix_ids, suffix_ids = _ends(tokenizer)
    # Remove the post-processor. BOS and EOS are added elsewhere. It may also exclude spaces from offsets,
    # which would leave gaps between tokens.
    tokenizer.post_processor = None  # type: ignore[assignment]
    return tokenizer, prefix_ids, suffix_ids


def _check_growth(content: bytes, file: Path, option: str) -> None:
    """Reject a normalizer that could make a text many times longer."""
    try:
        spec = checked_json.parse(content, memory_bytes=checked_json.LARGE_MEMORY_BYTES)
    except checked_json.TooLargeError as error:
        fix = "use a tokenizer as it was published"
        raise ConfigError(Problem(option, str(file), f"is too large: {error}", fix)) from None
    except ValueError:
        # The tokenizers library also parses the file, and reports the error.
        return
    # Rules apply one after the other, and each may multiply the length of a text. So limit the product.
    growth = 1.0
    rules = [spec.get("normalizer")] if isinstance(spec, dict) else []
    while rules:
        rule = rules.pop()
        if not isinstance(rule, dict):
            continue
        kind = rule.get("type")
        replacement = rule.get("content")
        inner = rule.get("normalizers")
        if kind == "Sequence" and isinstance(inner, list):
            rules += inner
        elif kind == "Replace" and isinstance(replacement, str):
            pattern = rule.get("pattern")
            literal = pattern.get("String") if isinstance(pattern, dict) else None
            # A regular expression may match at every character, so it may insert the replacement everywhere.
            factor = len(replacement) + 1.0
            if isinstance(literal, str) and literal:
                factor = len(replacement) / len(literal)
            growth *= max(1.0, factor)
        elif kind == "Prepend" and isinstance(rule.get("prepend"), str):
            growth *= 1 + len(rule["prepend"]) / _MAX_GROWTH
    if growth > _MAX_GROWTH:
        raise ConfigError(
            Problem(
                option,
                str(file),
                rule=f"has a normalizer that may make a text more than {_MAX_GROWTH} times longer",
                fix="use a tokenizer as it was published",
            )
        )


def _adds_too_many(file: Path, option: str) -> ConfigError:
    rule = f"has a post-processor that adds more than {_MAX_ADDED} tokens to each text"
    return ConfigError(Problem(option, str(file), rule, "use a tokenizer as it was published"))


def _ends(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor adds before and after a text."""
    if tokenizer.post_processor is None or not tokenizer.num_special_tokens_to_add(False):
        return (), ()
    # Encode a text, and return the ids before and after its tokens. The text needs at least one token, so
    # try a letter, a digit, and entries of the vocabulary.
    for text in ("a", "0", *sorted(tokenizer.get_vocab(with_added_tokens=False))[:100]):
        encoded = tokenizer.encode(text)
        # Ids that the post-processor adds belong to no sequence.
        places = [
            place for place, sequence in enumerate(encoded.sequence_ids) if sequence is not None
        ]
        if places:
            before = encoded.ids[: places[0]]
            after = encoded.ids[places[-1] + 1 :]
            return tuple(before), tuple(after)
    return (), ()


_warned_of: set[str] = set()


def _warn_of_idle_switch(
    switch: bool | None, prefix_ids: tuple[int, ...], bos_id: int | None, file: str
) -> None:
    """Warn once per process if tokenizer_config.json contradicts the file's post-processor."""
    if switch is None or bos_id is None or switch == (bos_id in prefix_ids) or file in _warned_of:
        return
    _warned_of.add(file)
    action, fix = ("adds BOS", "false") if prefix_ids else ("does not add BOS", "true")
    logger.warning(
        f"{file}: its post-processor {action}, but tokenizer_config.json sets "
        f"add_bos_token={str(switch).lower()}; the post-processor takes precedence, "
        f"as in transformers, unless you set data.add_bos = {fix}"
    )
