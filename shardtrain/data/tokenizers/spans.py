"""Character ranges of tokens, computed from their lengths in bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def character_spans(text: str, lengths_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the character ranges (n, 2) of consecutive tokens, given their lengths in UTF-8 bytes.

    If a token begins or ends inside a character, its range includes this character.

    >>> character_spans("aé", np.array([1, 1, 1])).tolist()
    [[0, 1], [1, 2], [1, 2]]
    """
    ends = np.cumsum(lengths_bytes)
    starts = ends - lengths_bytes
    return to_characters(text, np.stack((starts, ends), axis=1))


def to_characters(text: str, spans_bytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Convert ranges (n, 2) of UTF-8 bytes to ranges of characters."""
    if text.isascii():
        return spans_bytes
    data = np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)
    # In UTF-8, bytes 10xxxxxx continue a character.
    continues = (data & 0xC0) == 0x80
    # begun[i] is the number of characters that begin before byte i.
    begun = np.concatenate(([0], np.cumsum(~continues)))
    starts = spans_bytes[:, 0]
    ends = spans_bytes[:, 1]
    is_within_character = np.concatenate((continues, [False]))[starts] & (ends > starts)
    return np.stack((begun[starts] - is_within_character, begun[ends]), axis=1)
