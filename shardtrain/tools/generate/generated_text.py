"""New tokens as text: where it ends, and what of it can be printed already."""

from __future__ import annotations

from collections.abc import Sequence

from shardtrain.data.tokenizers.open_tokenizer import Tokenizer

_CONTEXT = 4
"""Tokens of the prompt that the new ones are decoded with: tokenizers drop the space before a text's first word."""
_INCOMPLETE = "\ufffd"


class Text:
    """The text of a row's new tokens, up to what ends it."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop_ids: frozenset[int], stops: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._stops = [stop for stop in stops if stop]
        self._context = list(prompt[-_CONTEXT:])
        self._before = tokenizer.decode(self._context)
        # each token but a control one is a byte of text or more
        self._window = max((len(stop.encode()) for stop in self._stops), default=0) + 2 * _CONTEXT

    def has_ended(self, new: Sequence[int]) -> bool:
        """Whether the newest tokens have brought a text that ends the row."""
        return any(stop in self._tokenizer.decode(list(new[-self._window :])) for stop in self._stops)

    def of(self, new: Sequence[int]) -> str:
        """The text of the new tokens, without what ended it."""
        kept = list(new[:-1]) if new and new[-1] in self._stop_ids else list(new)
        # Decoded behind the end of the prompt, since a tokenizer may drop a space at the beginning of a text. Where the
        # prompt ends within a character its own text changes, and the new tokens are decoded alone.
        whole = self._tokenizer.decode([*self._context, *kept])
        text = whole.removeprefix(self._before) if whole.startswith(self._before) else self._tokenizer.decode(kept)
        places = [text.find(stop) for stop in self._stops if stop in text]
        return text[: min(places)] if places else text

    def certain(self, new: Sequence[int]) -> str:
        """What of the text no later token can change: without half a character, or the beginning of a stop text."""
        text = self.of(new).rstrip(_INCOMPLETE)
        for stop in self._stops:
            begun = next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
            text = text[: len(text) - begun]
        return text


class Printer:
    """Gives the text of one row piece by piece; the pieces together are its text."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._printed = ""

    def more(self, new: Sequence[int]) -> str:
        """What can be printed now."""
        certain = self._text.certain(new)
        if not certain.startswith(self._printed):
            return ""
        piece = certain[len(self._printed) :]
        self._printed = certain
        return piece

    def rest(self, new: Sequence[int]) -> str:
        """What is left when the row has ended."""
        whole = self._text.of(new)
        return whole[len(self._printed) :] if whole.startswith(self._printed) else ""
