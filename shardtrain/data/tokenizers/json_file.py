"""A ``tokenizer.json``, run by the ``tokenizers`` library."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardtrain.data.tokenizers.tokenizer_config import ends_facts, read_beside
from shardtrain.utils import libraries
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    import tokenizers

_MOST_IDS = 2**31
_MOST_GROWTH = 1000
_MOST_ADDED = 1000
"""Tokens that a post-processor puts around a text; those in use put one or two there."""

# The library's threads do not exist in a child forked after they were used, where a batch would wait for them for ever
# (it guards against that itself, but not where TOKENIZERS_PARALLELISM=true).
_threads_of_process: int | None = None


class JsonTokenizer:
    """A ``tokenizer.json``; reading it runs no code from it.

    bos, eos and pad come from ``tokenizer_config.json`` or ``special_tokens_map.json`` beside it, and otherwise from
    the special tokens with the usual names. What comes before and after a text is what the file's post-processor puts
    there, as in ``transformers``; ``add_bos_token`` in ``tokenizer_config.json`` changes nothing beside it. Special
    tokens that a text spells out become their ids.
    """

    def __init__(self, file: Path, content: bytes, option: str, spec: str) -> None:
        self.spec = spec
        self.option = option
        self._tokenizer, self.prefix_ids, self.suffix_ids = _load(file, content, option)
        # Ids may have gaps, so the largest id decides the rows that an embedding needs.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size <= _MOST_IDS:
            rule = "has an empty vocabulary" if self.vocab_size == 0 else "has ids of 2**31 and above"
            raise ConfigError(Problem(option, str(file), rule, "use a trained tokenizer"))

        # Special tokens: those of the file, and which of them begin and end a document, by the files beside it.
        beside = read_beside(file.parent, option)
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self.bos_id, self.eos_id, self.pad_id = (
            beside.special_id(name, self._tokenizer.token_to_id, special, self.vocab_size, option)
            for name in ("bos_token", "eos_token", "pad_token")
        )
        usual = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        self.special_ids = frozenset(special.values()).union(i for i in usual.values() if i is not None)
        texts = {name: str(self._tokenizer.id_to_token(i)) for name, i in usual.items() if i is not None}
        self.special_tokens: Mapping[str, str] = {**texts, **beside.named()}
        self.chat_template = beside.chat_template
        self.tool_template = beside.tool_template
        _warn_of_idle_switch(beside.switches.get("add_bos_token"), self.prefix_ids, self.bos_id, str(file))

        # Of the files beside it the ids alone decide tokens: templates have a fingerprint of their own.
        ends = f"{self.bos_id} {self.eos_id}".encode()
        ends += ends_facts(self.prefix_ids, self.suffix_ids, self.bos_id, self.eos_id)
        self.fingerprint = hashlib.sha256(hashlib.sha256(content).digest() + ends).hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Ids of a text, without bos and eos."""
        with self._panics():
            return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Ids of each text; the library's threads share the work."""
        # The fast call does not work out offsets; libraries before 0.20.1 lack it.
        batch = self._encode_many(texts, getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch))
        return [np.array(one.ids, dtype=np.int32) for one in batch]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Ids of each text and the characters that they stand for."""
        batch = self._encode_many(texts, self._tokenizer.encode_batch)
        return [
            (np.array(one.ids, dtype=np.int32), np.array(one.offsets, dtype=np.int64).reshape(-1, 2)) for one in batch
        ]

    def _encode_many(self, texts: Sequence[str], batch: Callable[..., Any]) -> list[Any]:
        global _threads_of_process
        with self._panics():
            if _threads_of_process not in (None, os.getpid()):
                return [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
            _threads_of_process = os.getpid()
            encoded: list[Any] = batch(list(texts), add_special_tokens=False)
            return encoded

    @contextlib.contextmanager
    def _panics(self) -> Iterator[None]:
        """Turn a panic of the library, which is not an Exception, into ConfigError: a pattern that takes too long."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            rule = f"cannot encode a text ({str(error)[:200]})"
            raise ConfigError(Problem(self.option, self.spec, rule, "use a tokenizer whose patterns end")) from None

    def decode(self, ids: Sequence[int] | npt.NDArray[np.integer], keep_special: bool = False) -> str:
        """Text of ids; special tokens are left out unless they are to be kept."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not keep_special))


def _load(file: Path, content: bytes, option: str) -> tuple[tokenizers.Tokenizer, tuple[int, ...], tuple[int, ...]]:
    """The tokenizer without its post-processor, and what that puts before and after a text."""
    tokenizers = libraries.load("tokenizers", option, str(file), "tokenizers", otherwise='use "bytes"')
    if content.count(b'"SpecialToken"') > 2 * _MOST_ADDED:  # before memory is spent on each of them
        raise _adds_too_many(file, option)
    _check_growth(content, file, option)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:  # the library raises Exception itself for every fault of the file, or panics
        if isinstance(error, MemoryError):
            raise
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        rule = f"cannot be read as a tokenizer ({reason})"
        raise ConfigError(Problem(option, str(file), rule, "replace the file by a complete tokenizer.json")) from error
    # A saved file may ask for cut and filled rows; documents must arrive whole.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.num_special_tokens_to_add(False) > _MOST_ADDED:
        raise _adds_too_many(file, option)
    prefix_ids, suffix_ids = _ends(tokenizer)
    # Post-processors add bos and eos, which is done elsewhere, and cut spaces off the offsets, which would leave gaps.
    tokenizer.post_processor = None  # type: ignore[assignment]
    return tokenizer, prefix_ids, suffix_ids


def _check_growth(content: bytes, file: Path, option: str) -> None:
    """Stop where the normalizer would make a text many times longer: its rules are applied one after the other."""
    try:
        spec = json.loads(content)
    except (ValueError, RecursionError):
        return  # the library says what is wrong with it
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
            # A regular expression may match a single character, or between any two.
            grown = len(replacement) + 1.0
            if isinstance(literal, str) and literal:
                grown = len(replacement) / len(literal)
            growth *= max(1.0, grown)
        elif kind == "Prepend" and isinstance(rule.get("prepend"), str):
            growth *= 1 + len(rule["prepend"]) / _MOST_GROWTH
    if growth > _MOST_GROWTH:
        rule = f"has a normalizer that may make a text more than {_MOST_GROWTH} times longer"
        raise ConfigError(Problem(option, str(file), rule, "use a tokenizer as it was published"))


def _adds_too_many(file: Path, option: str) -> ConfigError:
    rule = f"has a post-processor that adds more than {_MOST_ADDED} tokens to each text"
    return ConfigError(Problem(option, str(file), rule, "use a tokenizer as it was published"))


def _ends(tokenizer: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and after a text."""
    if tokenizer.post_processor is None or not tokenizer.num_special_tokens_to_add(False):
        return (), ()
    # Tried on a text that has tokens, since of one without them nothing is before or after: a letter or a digit, or
    # else words of the vocabulary.
    for text in ("a", "0", *sorted(tokenizer.get_vocab(with_added_tokens=False))[:100]):
        encoded = tokenizer.encode(text)
        places = [place for place, sequence in enumerate(encoded.sequence_ids) if sequence is not None]
        if places:
            return tuple(encoded.ids[: places[0]]), tuple(encoded.ids[places[-1] + 1 :])
    return (), ()


_warned_of: set[str] = set()


def _warn_of_idle_switch(switch: bool | None, prefix_ids: tuple[int, ...], bos_id: int | None, file: str) -> None:
    """Warn, once a process, where tokenizer_config.json and the file's post-processor differ."""
    if switch is None or bos_id is None or switch == (bos_id in prefix_ids) or file in _warned_of:
        return
    _warned_of.add(file)
    does, fix = ("puts it there", "false") if prefix_ids else ("does not put it there", "true")
    logger.warning(
        f"{file}: its post-processor {does}, and tokenizer_config.json says add_bos_token={str(switch).lower()}; the "
        f"post-processor decides, as in transformers, unless you set data.add_bos = {fix}"
    )
