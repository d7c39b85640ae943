"""Decode new tokens: cut the text at a stop text, and stream the part that can no longer change."""

from __future__ import annotations

from collections.abc import Sequence

from shardtrain.data.tokenizers.open_tokenizer import Tokenizer

_CONTEXT = 4
"""Number of prompt tokens decoded before the new ones.

Tokenizers drop the space before a text's first word.
"""
_INCOMPLETE = "\ufffd"


class Text:
    """Decodes the new tokens of one row, up to its stop text or end token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop_ids: frozenset[int],
        stops: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._stops = [stop for stop in stops if stop]
        self._context = list(prompt[-_CONTEXT:])
        self._before = tokenizer.decode(self._context)
        # Each token except control tokens decodes to at least one byte.
        longest_stop = max((len(stop.encode()) for stop in self._stops), default=0)
        self._window = longest_stop + 2 * _CONTEXT

    def has_ended(self, new: Sequence[int]) -> bool:
        """True if the newest tokens complete a stop text."""
        if not self._stops:
            return False
        end = self._tokenizer.decode(list(new[-self._window :]))
        return any(stop in end for stop in self._stops)

    def of(self, new: Sequence[int]) -> str:
        """Return the text of the new tokens, without the end token or stop text."""
        kept = list(new)
        if kept and kept[-1] in self._stop_ids:
            kept.pop()
        # Decode together with the end of the prompt, because a tokenizer may drop a space at the
        # beginning of a text. If the prompt ends inside a character, the prompt's own text changes. Then
        # decode only the new tokens.
        decoded = self._tokenizer.decode(self._context + kept)
        text = decoded.removeprefix(self._before)
        if not decoded.startswith(self._before):
            text = self._tokenizer.decode(kept)

        # Cut at the first stop text.
        end = len(text)
        for stop in self._stops:
            place = text.find(stop)
            if place >= 0:
                end = min(end, place)
        return text[:end]

    def certain(self, new: Sequence[int]) -> str:
        """Return the part of the text that later tokens cannot change.

        This omits an incomplete character and a partial stop text at the end.
        """
        text = self.of(new).rstrip(_INCOMPLETE)
        for stop in self._stops:
            # Find the longest prefix of the stop text that is a suffix of the text.
            for size in range(len(stop) - 1, 0, -1):
                if text.endswith(stop[:size]):
                    text = text[:-size]
                    break
        return text


class Printer:
    """Splits the text of one row into pieces for streaming."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._printed = ""

    def more(self, new: Sequence[int]) -> str:
        """Return the next printable piece, possibly empty."""
        certain = self._text.certain(new)
        if not certain.startswith(self._printed):
            return ""
        piece = certain[len(self._printed) :]
        self._printed = certain
        return piece

    def rest(self, new: Sequence[int]) -> str:
        """Return the remaining text after the row has ended."""
        text = self._text.of(new)
        if not text.startswith(self._printed):
            return ""
        return text.removeprefix(self._printed)
