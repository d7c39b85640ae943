"""Tokenizer in a sentencepiece ``.model`` file, executed by the ``sentencepiece`` library."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain.data.tokenizers.spans import to_characters
from shardtrain.data.tokenizers.split import Splitter
from shardtrain.data.tokenizers.threads import threads
from shardtrain.data.tokenizers.tokenizer_config import TokenizerConfig, ends_facts, read_beside
from shardtrain.utils import libraries
from shardtrain.utils.errors import ConfigError, Problem

# The protobuf message ModelProto.normalizer_spec (field 3) { add_dummy_prefix (field 3): false }. A
# protobuf parser merges repeated messages, and the last value counts. If these bytes are appended to a
# model, they change only this setting.
_NO_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer:
    """A sentencepiece model, with the tokens that a ``tokenizer_config.json`` next to it adds.

    As in the library, ``<s>`` in a text is ordinary text. It is a special token only in conversations
    (``encode_spans``). Many models add a space before a text, but not after a special token inside a text.
    """

    def __init__(self, file: Path, content: bytes, option: str, spec: str) -> None:
        self.spec = spec
        self.option = option
        # Load the model, and a copy that adds no space, for text after a special token.
        self._model = _load(file, content, option)
        self._model_without_prefix = _load(file, content + _NO_PREFIX, option)

        # Added tokens have ids after the model's own ids. Special added tokens are recognized only in
        # conversations, and all other added tokens in every text.
        config = read_beside(file.parent, option)
        pieces: int = self._model.get_piece_size()
        self._added = self._added_tokens(config, pieces, file)
        self.vocab_size = max(pieces, max(self._added, default=-1) + 1)
        special: dict[str, int] = {}
        for i in range(pieces):
            if self._model.is_control(i):
                special[self._model.id_to_piece(i)] = i
        added: dict[str, int] = {}
        always: dict[str, int] = {}
        for i, text in config.added.items():
            added[text.content] = i
            if text.special:
                special[text.content] = i
            else:
                always[text.content] = i
        self._always = Splitter(always)
        self._all = Splitter({**added, **special})
        self._texts = {i: text for text, i in special.items()} | self._added

        # Find BOS, EOS and padding in the files next to the model, or else in the model.
        self.bos_id = self._end(config, "bos", special)
        self.eos_id = self._end(config, "eos", special)
        self.pad_id = self._end(config, "pad", special)
        self.prefix_ids, self.suffix_ids = config.ends(self.bos_id, self.eos_id)
        ends = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
        ids = {name: i for name, i in ends.items() if i is not None}
        self.special_ids = frozenset(special.values()).union(ids.values())
        texts = {}
        for name, i in ids.items():
            texts[name] = self._texts.get(i) or str(self._model.id_to_piece(i))
        self.special_tokens: Mapping[str, str] = {**texts, **config.named()}
        self.chat_template = config.chat_template
        self.tool_template = config.tool_template
        # The fingerprint covers everything that determines the ids of a text.
        added_tokens = sorted(config.added.items())
        facts = f"sentencepiece {self.bos_id} {self.eos_id} {added_tokens}".encode()
        facts += ends_facts(self.prefix_ids, self.suffix_ids, self.bos_id, self.eos_id)
        content_hash = hashlib.sha256(content).digest()
        self.fingerprint = hashlib.sha256(content_hash + facts).hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the ids of a text, without BOS and EOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text."""
        # Added tokens divide a text, so each text is encoded in parts.
        if self._always:
            return [self._with_spans(text, self._always)[0] for text in texts]
        if not texts:
            return []
        batch = self._model.encode(list(texts), num_threads=threads())
        return [np.array(ids, dtype=np.int32) for ids in batch]

    def encode_spans(
        self, texts: Sequence[str]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Return the ids of each text, and their character ranges.

        Special tokens that occur in a text as strings become their ids.
        """
        return [self._with_spans(text, self._all) for text in texts]

    def decode(
        self, ids: Sequence[int] | npt.NDArray[np.integer], keep_special: bool = False
    ) -> str:
        """Return the text of ids, with special tokens only if ``keep_special``.

        Raises:
            ValueError: an id is not in 0..vocab_size-1.
        """
        parts: list[str] = []
        pieces_to_decode: list[int] = []
        # Collect consecutive pieces of the model, which decodes them together. Any other token ends such a
        # sequence, and None ends the last sequence.
        for i in [*(int(i) for i in ids), None]:
            if i is not None and not 0 <= i < self.vocab_size:
                raise ValueError(f"token id outside 0..{self.vocab_size - 1}")
            if i is not None and i not in self._texts:
                pieces_to_decode.append(i)
                continue
            if pieces_to_decode:
                # The model removes the space that it adds before a text, which is only at the beginning.
                model = self._model_without_prefix if parts else self._model
                parts.append(model.decode(pieces_to_decode))
                pieces_to_decode = []
            if i is None:
                continue
            # A skipped token appends "", so later pieces do not count as the beginning of the text.
            text = self._texts[i]
            if i in self.special_ids and not keep_special:
                text = ""
            parts.append(text)
        return "".join(parts)

    def _added_tokens(self, config: TokenizerConfig, pieces: int, file: Path) -> dict[int, str]:
        """Return the added tokens that are not in the model's vocabulary.

        Raises:
            ConfigError: an added token contradicts the model.
        """
        for i, token in config.added.items():
            if i < pieces and self._model.id_to_piece(i) != token.content:
                piece = self._model.id_to_piece(i)
                raise ConfigError(
                    Problem(
                        self.option,
                        str(file),
                        rule=f"has the piece {piece!r} at id {i}, but tokenizer_config.json has {token.content!r}",
                        fix="use files that belong together",
                    )
                )
            # The model needs a row of its embedding for each id up to the largest.
            if i >= pieces + 2**20:
                raise ConfigError(
                    Problem(
                        self.option,
                        str(file),
                        rule=f"has {pieces} pieces, but tokenizer_config.json adds a token with id {i}",
                        fix="use files that belong together",
                    )
                )
        return {i: token.content for i, token in config.added.items() if i >= pieces}

    def _end(self, config: TokenizerConfig, name: str, special: dict[str, int]) -> int | None:
        """Return the id of "bos", "eos" or "pad", from the files next to the model or else from the model."""
        key = f"{name}_token"
        if key in config.tokens or f"{key}_id" in config.token_ids:

            def find(text: str) -> int | None:
                return self._find(text, special)

            return config.special_id(key, find, special, self.vocab_size, self.option)
        model_id = int(getattr(self._model, f"{name}_id")())
        if model_id < 0:
            return None
        return model_id

    def _find(self, text: str, special: dict[str, int]) -> int | None:
        """Return the id of a token, or None."""
        if text in special:
            return special[text]
        for i, content in self._added.items():
            if content == text:
                return i
        # If the text is not a piece, the library returns the id of the unknown token.
        piece_id = int(self._model.piece_to_id(text))
        if self._model.id_to_piece(piece_id) != text:
            return None
        return piece_id

    def _with_spans(
        self, text: str, splitter: Splitter
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the ids of a text, and their character ranges. ``splitter`` finds added tokens in the text."""
        ids: list[int] = []
        spans = [np.zeros((0, 2), dtype=np.int64)]
        start = 0
        for piece, special in splitter.pieces(text):
            if special is None:
                model = self._model_without_prefix if start else self._model
                message = model.encode(piece, out_type="serialized_proto")
                piece_ids, where = _read_pieces(message)
                ids += piece_ids
                spans.append(to_characters(piece, where) + start)
            else:
                ids.append(special)
                spans.append(np.array([[start, start + len(piece)]], dtype=np.int64))
            start += len(piece)
        return np.array(ids, dtype=np.int32), np.concatenate(spans)


def _load(file: Path, content: bytes, option: str) -> Any:
    sentencepiece = libraries.load(
        "sentencepiece", option, str(file), otherwise="use a tokenizer.json"
    )
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
        if processor.get_piece_size() > 0:
            return processor
    # The library raises different exceptions for files in other formats.
    except Exception as error:
        raise ConfigError(
            Problem(
                option,
                str(file),
                rule="is neither a tokenizer.json nor tiktoken's ranks nor a sentencepiece model",
                fix="copy or download it again",
            )
        ) from error
    raise ConfigError(
        Problem(
            option,
            str(file),
            rule="has an empty vocabulary",
            fix="use a trained tokenizer",
        )
    )


def _read_pieces(message: bytes) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Parse a serialized SentencePieceText. Return the ids and the byte ranges of its pieces.

    The library's own classes for this change between versions. A piece is field 2 of the message. Fields 2,
    4 and 5 of a piece are its id, its begin and its end. A field that is 0 may be missing.
    """
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for number, value in _fields(message):
        if number != 2 or not isinstance(value, bytes):
            continue
        fields = {key: field for key, field in _fields(value) if isinstance(field, int)}
        ids.append(fields.get(2, 0))
        begin = fields.get(4, 0)
        end = fields.get(5, 0)
        spans.append((begin, end))
    # Without pieces, the array must still have two columns.
    return ids, np.array(spans, dtype=np.int64).reshape(-1, 2)


def _fields(message: bytes) -> list[tuple[int, int | bytes]]:
    """Return (field number, value) pairs of a protobuf message. Texts and inner messages are bytes."""
    fields: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(message):
        # A key contains the number of the field and its wire type: 0 is an integer, and 2 is a length with
        # bytes.
        key, at = _varint(message, at)
        number = key >> 3
        wire_type = key & 7
        value, at = _varint(message, at)
        if wire_type == 2:
            fields.append((number, message[at : at + value]))
            at += value
        elif wire_type == 0:
            fields.append((number, value))
        else:
            raise ValueError("the sentencepiece library returned a message in an unknown format")
    return fields


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer at a position, and the position after it."""
    value = 0
    shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        # The highest bit is 0 in the last byte.
        if byte < 0x80:
            return value, at
        shift += 7
