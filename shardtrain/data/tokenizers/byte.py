"""Byte-level tokenizer without files: one id per byte."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from shardtrain.data.tokenizers.spans import character_spans


class ByteTokenizer:
    """One id per UTF-8 byte, 0..255. The ids 256 (BOS) and 257 (EOS) never result from a text."""

    spec = "bytes"
    vocab_size = 258
    bos_id: int | None = 256
    eos_id: int | None = 257
    pad_id: int | None = None
    prefix_ids: tuple[int, ...] = (256,)
    suffix_ids: tuple[int, ...] = ()
    special_ids = frozenset({256, 257})
    special_tokens: Mapping[str, str] = MappingProxyType({})
    chat_template: str | None = None
    tool_template: str | None = None
    fingerprint = hashlib.sha256(b"shardtrain bytes 1").hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the UTF-8 bytes of a text. A lone surrogate becomes "?", because UTF-8 cannot encode it."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(
            np.int32
        )

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the UTF-8 bytes of each text."""
        return [self.encode(text) for text in texts]

    def encode_spans(
        self, texts: Sequence[str]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Return the UTF-8 bytes of each text, and for each byte the range of its character."""
        batch = self.encode_batch(texts)
        results = []
        for text, ids in zip(texts, batch, strict=True):
            one_byte_each = np.ones(len(ids), np.int64)
            results.append((ids, character_spans(text, one_byte_each)))
        return results

    def decode(
        self, ids: Sequence[int] | npt.NDArray[np.integer], keep_special: bool = False
    ) -> str:
        """Return the text of ids. Bytes that are not UTF-8 become U+FFFD.

        BOS and EOS are omitted or, with ``keep_special``, ``<bos>`` and ``<eos>``.

        Raises:
            ValueError: an id is not in 0..257.
        """
        array = np.asarray(ids, dtype=np.int64)
        if array.size and not (int(array.min()) >= 0 and int(array.max()) < self.vocab_size):
            raise ValueError("token id outside 0..257")
        if not keep_special:
            content = array[array < 256].astype(np.uint8).tobytes()
            return content.decode("utf-8", errors="replace")
        names = {256: b"<bos>", 257: b"<eos>"}
        content = b"".join(names.get(i) or bytes((i,)) for i in array.tolist())
        return content.decode("utf-8", errors="replace")
