"""Where tokens are in their text: from lengths in bytes to characters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def character_spans(text: str, lengths_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """First character, and the one after the last, of tokens that lie end to end and have these lengths in
    UTF-8.

    A token that begins or ends within a character has the whole of it.

    >>> character_spans("aé", np.array([1, 1, 1])).tolist()
    [[0, 1], [1, 2], [1, 2]]
    """
    ends = np.cumsum(lengths_bytes)
    return to_characters(text, np.stack((ends - lengths_bytes, ends), axis=1))


def to_characters(text: str, spans_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same spans [n, 2], counted in characters in place of bytes of UTF-8."""
    if text.isascii():
        return spans_bytes
    data = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
    # characters that have begun before byte i; the bytes 10xxxxxx continue one
    begun = np.concatenate(([0], np.cumsum((data & 0xC0) != 0x80)))
    starts = spans_bytes[:, 0]
    ends = spans_bytes[:, 1]
    inside = np.concatenate(((data & 0xC0) == 0x80, [False]))[starts] & (ends > starts)
    return np.stack((begun[starts] - inside, begun[ends]), axis=1)
