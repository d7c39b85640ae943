"""Find the line of every key in a TOML text. ``tomllib`` does not report lines."""

from __future__ import annotations

import re
import tomllib

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""+' r"|'''.*?'''+" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE_VALUE = re.compile(r"[^,\]\}\n#]*")

Key = tuple[str, ...]


def key_lines(text: str) -> dict[Key, int]:
    """Return the line number, from 1, of each table and key in a valid TOML text.

    ``a.b = 1`` below ``[s]`` is the key ("s", "a", "b"). The result also contains the tables ("s",)
    and ("s", "a"). The entries of an array have their number as a key: ``a = 1`` below the second
    ``[[s]]`` is ("s", "1", "a").
    """
    return _Scanner(text.replace("\r\n", "\n")).scan()


class _Scanner:
    """Scanner of a TOML text that ``tomllib`` has accepted. It does not report syntax errors."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.counted = 0  # characters up to which line breaks are counted
        self.line = 1
        self.lines: dict[Key, int] = {}
        self.entries: dict[Key, int] = {}  # entries so far of each array of tables

    def scan(self) -> dict[Key, int]:
        """Scan all statements, and return the line of each key."""
        table: Key = ()
        while True:
            self._skip_blank()
            if self.at >= len(self.text):
                return self.lines
            start = self.at
            if self.text[self.at] == "[":
                # A header. Record the line of its first bracket, because the closing
                # brackets may be on another line.
                is_array = self.text.startswith("[[", self.at)
                self.at += 2 if is_array else 1
                table = self._table(self._key(), is_array)
                self._enter(table, start)
                self.at = self._find("]")
                while self.text.startswith("]", self.at):
                    self.at += 1
            else:
                self._pair(table)

    def _table(self, header: Key, is_array: bool) -> Key:
        """Return the key of the table that a header opens. In arrays of tables, include the last entry's number."""
        table: Key = ()
        for place, part in enumerate(header, 1):
            table = (*table, part)
            if is_array and place == len(header):
                self.entries[table] = self.entries.get(table, 0) + 1
            if table in self.entries:
                table = (*table, str(self.entries[table] - 1))
        return table

    def _pair(self, table: Key) -> None:
        """Read ``key = value``."""
        start = self.at
        key = table + self._key()
        self._enter(key, start, len(table))
        self.at = self._find("=") + 1
        self._value(key)

    def _key(self) -> Key:
        """Read a bare, quoted or dotted key."""
        parts: list[str] = []
        while True:
            self._skip_spaces()
            match = _STRING.match(self.text, self.at) or _BARE_KEY.match(self.text, self.at)
            if match is None:
                raise ValueError(f"no key at character {self.at}")
            word = match.group()
            parts.append(tomllib.loads(f"x = {word}")["x"] if word[0] in "\"'" else word)
            self.at = match.end()
            self._skip_spaces()
            if not self.text.startswith(".", self.at):
                return tuple(parts)
            self.at += 1

    def _value(self, key: Key) -> None:
        """Skip a value, and record the keys of inline tables."""
        self._skip_spaces()
        opening = self.text[self.at]
        if opening not in "{[":
            match = _STRING.match(self.text, self.at) or _BARE_VALUE.match(self.text, self.at)
            self.at = match.end() if match else len(self.text)
            return
        # A table or array may contain other values, also over several lines.
        closing = "}" if opening == "{" else "]"
        self.at += 1
        entries = 0
        while True:
            self._skip_blank()
            if self.text.startswith(closing, self.at):
                self.at += 1
                return
            if opening == "{":
                self._pair(key)
            else:
                entry = (*key, str(entries))
                self._enter(entry, self.at, len(key))
                self._value(entry)
                entries += 1
            self._skip_blank()
            if self.text.startswith(",", self.at):
                self.at += 1

    def _enter(self, key: Key, start: int, already: int = 0) -> None:
        """Record the line of a key, and of tables that it opens implicitly."""
        # Keys come in the order of the text. Count only line breaks since the previous key.
        self.line += self.text.count("\n", self.counted, start)
        self.counted = start
        line = self.line
        for length in range(already + 1, len(key) + 1):
            self.lines.setdefault(key[:length], line)

    def _find(self, mark: str) -> int:
        return self.text.index(mark, self.at)

    def _skip_blank(self) -> None:
        match = _BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _skip_spaces(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
