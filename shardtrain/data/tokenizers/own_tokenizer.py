"""Adapter from a user's small ``class Tokenizer`` to the interface that the data pipeline uses."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain.data.tokenizers.tokenizer_config import MAX_IDS, ends_facts
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem


class OwnTokenizer:
    """A tokenizer in a user's file, which defines ``encode(text)``, ``decode(ids)`` and ``vocab_size``.

    ``bos_id`` and ``eos_id`` are optional. If the class also defines ``spans(text)``, it can encode
    conversations and separators. For each id of ``encode(text)``, ``spans`` returns the index of its first
    character and the index after its last character.
    """

    def __init__(self, path: str, option: str) -> None:
        self.spec = path
        self.option = option
        self._tokenizer: Any = own_file.load(path, own_file.TOKENIZER, option).Tokenizer()
        missing = []
        for name in ("encode", "decode"):
            if not callable(getattr(self._tokenizer, name, None)):
                missing.append(name)
        if missing:
            raise self._problem(
                f"has a class Tokenizer without {' and '.join(missing)}", own_file.TOKENIZER.fix
            )
        self.vocab_size: int = getattr(self._tokenizer, "vocab_size", 0)
        if type(self.vocab_size) is not int or not 0 < self.vocab_size < MAX_IDS:
            rule = "has a class Tokenizer whose vocab_size is not a valid number of ids"
            raise self._problem(rule, "set vocab_size to one more than the largest id")
        end_ids = [self._end(name) for name in ("bos_id", "eos_id", "pad_id")]
        self.bos_id, self.eos_id, self.pad_id = end_ids
        self.special_ids = frozenset(i for i in end_ids if i is not None)
        # The interface of a custom tokenizer has no prefix, special tokens or templates.
        self.prefix_ids: tuple[int, ...] = ()
        self.suffix_ids: tuple[int, ...] = ()
        self.special_tokens: Mapping[str, str] = {}
        self.chat_template: str | None = None
        self.tool_template: str | None = None
        # Cached tokens become invalid if the file or the ids change.
        ends = f"{self.vocab_size} {self.bos_id} {self.eos_id}".encode()
        ends += ends_facts(self.prefix_ids, self.suffix_ids, self.bos_id, self.eos_id)
        content = Path(path).read_bytes()
        content_hash = hashlib.sha256(content).digest()
        self.fingerprint = hashlib.sha256(content_hash + ends).hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the ids of a text, without BOS and EOS.

        Raises ConfigError for an id outside 0..vocab_size-1.
        """
        ids = np.asarray(self._tokenizer.encode(text), dtype=np.int64).reshape(-1)
        if ids.size:
            least = int(ids.min())
            most = int(ids.max())
            if least < 0 or most >= self.vocab_size:
                rule = (
                    f"returns ids from {least} to {most}, but its vocab_size is {self.vocab_size}"
                )
                raise self._problem(rule, "correct encode or vocab_size")
        return ids.astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text."""
        return [self.encode(text) for text in texts]

    def encode_spans(
        self, texts: Sequence[str]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Return the ids of each text, and their character ranges from the file's ``spans``.

        Raises:
            ConfigError: the class has no ``spans``, or the number of ranges differs from the number of ids.
        """
        if not callable(getattr(self._tokenizer, "spans", None)):
            rule = "has a class Tokenizer without spans, which conversations and separators require"
            raise self._problem(
                rule,
                "define spans(text): for each id, the offset of its first character and the offset after its last",
            )
        results = []
        for text in texts:
            ids = self.encode(text)
            spans = np.asarray(self._tokenizer.spans(text), np.int64).reshape(-1, 2)
            if len(ids) != len(spans):
                rule = f"returns {len(ids)} ids but {len(spans)} spans for the same text"
                raise self._problem(rule, "return one span for each id of encode(text)")
            results.append((ids, spans))
        return results

    def decode(
        self, ids: Sequence[int] | npt.NDArray[np.integer], keep_special: bool = False
    ) -> str:
        """Return the text of ids.

        BOS, EOS and padding are omitted or, with ``keep_special``, ``<bos>``, ``<eos>`` and ``<pad>``.
        """
        plain: list[int] = np.asarray(ids, dtype=np.int64).tolist()
        if not keep_special:
            ordinary = [i for i in plain if i not in self.special_ids]
            return str(self._tokenizer.decode(ordinary))
        # Decode consecutive ordinary ids together, because a character may consist of several tokens.
        names = {self.pad_id: "<pad>", self.bos_id: "<bos>", self.eos_id: "<eos>"}
        pieces = []
        for name, run in groupby(plain, key=names.get):
            run_ids = list(run)
            if name is None:
                pieces.append(str(self._tokenizer.decode(run_ids)))
            else:
                pieces.append(name * len(run_ids))
        return "".join(pieces)

    def _end(self, name: str) -> int | None:
        """Return the value of an attribute that must be an id or None."""
        value = getattr(self._tokenizer, name, None)
        if value is not None and (type(value) is not int or not 0 <= value < self.vocab_size):
            rule = f"has {name}={value!r}, which is not an id"
            raise self._problem(rule, f"use one in 0..{self.vocab_size - 1}, or None")
        return value

    def _problem(self, rule: str, fix: str) -> ConfigError:
        return ConfigError(Problem(self.option, self.spec, rule, fix))
