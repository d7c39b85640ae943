"""Reading of untrusted JSON and YAML files with limits on their size. Records the line of each key."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import ConfigError, Problem

MAX_BYTES = 2**20
MAX_VALUES = 5_000
MAX_DEPTH = 30
_TOO_DEEP = f"must nest values at most {MAX_DEPTH} deep"
Key = tuple[str, ...]


@dataclass(frozen=True)
class ForeignDocument:
    """Content of a file.

    Attributes:
        path: The file.
        values: Nested tables.
        lines: Line number of each key. A key is the path of names from the top.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[Key, int]

    def where(self, key: Key) -> str:
        """Return file and line of a key, such as ``llama.json:12``."""
        line = self.lines.get(key)
        return f"{self.path.name}:{line}" if line else self.path.name


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        ConfigError: it cannot be read, is larger than ``MAX_BYTES``, or is not UTF-8.
    """
    try:
        content = bounded_reads.start(path, MAX_BYTES + 1)
    except OSError as error:
        raise bounded_reads.unreadable(
            "the file", path, error, "use a configuration file"
        ) from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            Problem(
                "the file",
                str(path),
                rule=f"must be a configuration of at most {MAX_BYTES} bytes",
                fix="use a configuration file",
            )
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(
            Problem(
                "the file",
                str(path),
                rule="is not UTF-8 text",
                fix="save it as UTF-8",
            )
        ) from None


def facts_of_folder(folder: str | None) -> dict[str, Any]:
    """Return the fields of config.json in a model folder. {} if the file is missing or invalid."""
    try:
        facts = checked_json.parse(
            bounded_reads.read_all(Path(folder or "").expanduser() / "config.json", MAX_BYTES)
        )
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def read(path: Path) -> ForeignDocument:
    """Read a JSON or YAML file. The suffix or the first character determines the format.

    Raises:
        ConfigError: the file is invalid.
    """
    text = read_text(path)
    as_json = path.suffix.lower() == ".json" or text.lstrip()[:1] == "{"
    reader = _Json(path, text) if as_json else _Yaml(path, text)
    values = reader.read()
    if not isinstance(values, dict):
        raise _wrong(path, 1, "must contain a table of options", "use a configuration file")
    return ForeignDocument(path, values, reader.lines)


def _wrong(path: Path, line: int, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem("the file", None, rule, fix, f"{path.name}:{line}"))


class _Json:
    """Strict JSON parser that records the line of each key. The ``json`` module parses scalars."""

    _BLANK = re.compile(r"[ \t\r\n]*")
    _SCALAR = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.at = 0
        self.lines: dict[Key, int] = {}
        self.count = 0

    def read(self) -> Any:
        value = self._value((), 0)
        self._skip()
        if self.at < len(self.text):
            raise self._error("must not have text after the closing bracket")
        return value

    def _value(self, key: Key, depth: int) -> Any:
        self._skip()
        self.count += 1
        if depth > MAX_DEPTH or self.count > MAX_VALUES:
            raise self._error(
                f"must have at most {MAX_VALUES} values, nested at most {MAX_DEPTH} deep"
            )
        start = self.text[self.at : self.at + 1]
        if start == "{":
            return self._table(key, depth)
        if start == "[":
            return self._list(key, depth)
        if start == '"':
            return self._string()
        match = self._SCALAR.match(self.text, self.at)
        if not match or len(match[0]) > 100:
            raise self._error("is not valid JSON here")
        self.at = match.end()
        try:
            return checked_json.parse(match[0])
        except ValueError as error:
            raise self._error(f"is not valid JSON here ({error})") from None

    def _table(self, key: Key, depth: int) -> dict[str, Any]:
        table: dict[str, Any] = {}
        self.at += 1
        while not self._next("}", bool(table)):
            if self.text[self.at : self.at + 1] != '"':
                raise self._error("is not valid JSON: a key must be in double quotes")
            line = self._line()
            name = self._string()
            if name in table:
                raise _wrong(self.path, line, f'must not set "{name}" twice', "keep only one")
            self._skip()
            if self.text[self.at : self.at + 1] != ":":
                raise self._error("is not valid JSON: a key must be followed by a colon")
            self.at += 1
            self.lines[*key, name] = line
            table[name] = self._value((*key, name), depth + 1)
        return table

    def _list(self, key: Key, depth: int) -> list[Any]:
        values: list[Any] = []
        self.at += 1
        while not self._next("]", bool(values)):
            values.append(self._value((*key, str(len(values))), depth + 1))
        return values

    def _next(self, end: str, comma: bool) -> bool:
        """Skip to the next entry. Return True at the end of the table or list."""
        self._skip()
        if self.text.startswith(end, self.at):
            self.at += 1
            return True
        if comma:
            if not self.text.startswith(",", self.at):
                raise self._error("is not valid JSON: entries must be separated by commas")
            self.at += 1
            self._skip()
        return False

    def _string(self) -> str:
        try:
            text, self.at = json.decoder.scanstring(self.text, self.at + 1)  # type: ignore[attr-defined]
        except ValueError:
            raise self._error("is not valid JSON: a string has no closing quote") from None
        return str(text)

    def _skip(self) -> None:
        match = self._BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _error(self, rule: str) -> ConfigError:
        return _wrong(self.path, self._line(), rule, "correct this line")


class _Yaml:
    """YAML 1.1 parser like ``yaml.safe_load`` that records lines, limits the size, and rejects aliases and merges."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.lines: dict[Key, int] = {}
        self.count = 0

    def read(self) -> Any:
        import yaml

        depth = 0
        try:
            # Check the events first. Stop at the limits, because the time of scanning nested values
            # grows with the square of their depth.
            for event in yaml.parse(self.text, Loader=yaml.SafeLoader):
                self.count += 1
                line = event.start_mark.line + 1 if event.start_mark else 1
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                    event, yaml.CollectionEndEvent
                )
                if depth > MAX_DEPTH + 1:
                    raise _wrong(self.path, line, _TOO_DEEP, "write plain tables")
                if isinstance(event, yaml.AliasEvent):
                    rule = f"must not use aliases (*{event.anchor})"
                    raise _wrong(self.path, line, rule, "write the value instead")
                if self.count > 4 * MAX_VALUES:
                    raise _wrong(
                        self.path,
                        1,
                        "has more values than any configuration needs",
                        "use another file",
                    )
            loader = yaml.SafeLoader(self.text)
            try:
                node = loader.get_single_node()
                return {} if node is None else self._value(loader, node, (), 0)
            finally:
                loader.dispose()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            rule = f"is not valid YAML: {getattr(error, 'problem', None) or 'it cannot be read'}"
            raise _wrong(
                self.path, mark.line + 1 if mark else 1, rule, "correct this line"
            ) from None
        except (RecursionError, ValueError):
            rule = f"{_TOO_DEEP}, and must not contain an invalid value"
            raise _wrong(self.path, 1, rule, "use another file") from None

    def _value(self, loader: Any, node: Any, key: Key, depth: int) -> Any:
        import yaml

        node_line = node.start_mark.line + 1
        if depth > MAX_DEPTH:
            raise _wrong(self.path, node_line, _TOO_DEEP, "write plain tables")
        if isinstance(node, yaml.MappingNode):
            table: dict[str, Any] = {}
            for name_node, value_node in node.value:
                line = name_node.start_mark.line + 1
                if not isinstance(name_node, yaml.ScalarNode):
                    raise _wrong(self.path, line, "must have text as keys", "write a plain name")
                name = name_node.value
                if name in table:
                    raise _wrong(self.path, line, f"must not set {name} twice", "keep only one")
                self.lines[*key, name] = line
                table[name] = self._value(loader, value_node, (*key, name), depth + 1)
            return table
        if isinstance(node, yaml.SequenceNode):
            items = []
            for number, item in enumerate(node.value):
                items.append(self._value(loader, item, (*key, str(number)), depth + 1))
            return items

        # Converting a very long number would take long.
        if len(node.value) > 5_000 and node.tag.endswith((":int", ":float")):
            raise _wrong(
                self.path, node_line, "must not contain a number of over 5000 digits", "correct it"
            )
        value = loader.construct_object(node)
        # An integer can be too large for the float that it is compared with or converted to.
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            raise _wrong(self.path, node_line, "must contain finite numbers", "correct it")

        # YAML also reads dates and binary values. Keep their text.
        is_plain = value is None or isinstance(value, str | int | float | bool)
        return value if is_plain else str(node.value)
