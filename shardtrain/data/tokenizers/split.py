"""Split texts into added tokens and the text between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class Splitter:
    """Finds added tokens in texts. If several begin at the same position, it finds the longest.

    ``ids`` maps the text of each token to its id.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        longest_first = sorted(self._ids, key=lambda text: (-len(text), text))
        # An empty pattern would match everywhere.
        self._pattern = None
        if longest_first:
            self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def __bool__(self) -> bool:
        return self._pattern is not None

    def pieces(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield the non-empty pieces of a text in order, each with its id. Ordinary text has the id None.

        >>> list(Splitter({"<e>": 7}).pieces("hi<e>"))
        [('hi', None), ('<e>', 7)]
        """
        done = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() > done:
                yield text[done : match.start()], None
            yield match[0], self._ids[match[0]]
            done = match.end()
        if done < len(text):
            yield text[done:], None
