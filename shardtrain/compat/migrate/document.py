"""Read untrusted JSON or YAML files with limits on size, and record the line of each key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import ConfigError, Problem

MAX_BYTES = 2**20
MAX_VALUES = 5_000
MAX_DEPTH = 30
Key = tuple[str, ...]


@dataclass(frozen=True)
class ForeignDocument:
    """Content of a file: nested tables, and the line of each key."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[Key, int]

    def where(self, key: Key) -> str:
        """Return the place of a key, such as ``llama.json:12``."""
        line = self.lines.get(key)
        return f"{self.path.name}:{line}" if line else self.path.name


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        ConfigError: it cannot be read, is larger than ``MAX_BYTES``, or is not UTF-8.
    """
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise bounded_reads.unreadable("the file", path, error, "name a file") from None
    if len(content) > MAX_BYTES:
        rule = f"has more than {MAX_BYTES} bytes, which no configuration has"
        raise ConfigError(Problem("the file", str(path), rule, "name a configuration file"))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(Problem("the file", str(path), "is not UTF-8 text", "save it as UTF-8")) from None


def facts_of_folder(folder: str | None) -> dict[str, Any]:
    """Return the fields of config.json in a model folder; {} if there is no such file."""
    try:
        facts = checked_json.parse(bounded_reads.whole(Path(folder or "").expanduser() / "config.json", MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def read(path: Path) -> ForeignDocument:
    """Read a JSON or YAML file. The format is determined by the ending and the first character.

    Raises:
        ConfigError: the file is invalid.
    """
    text = read_text(path)
    as_json = path.suffix.lower() == ".json" or text.lstrip()[:1] == "{"
    reader = _Json(path, text) if as_json else _Yaml(path, text)
    values = reader.read()
    if not isinstance(values, dict):
        raise _wrong(path, 1, "contains no table of options", "name a configuration file")
    return ForeignDocument(path, values, reader.lines)


def _wrong(path: Path, line: int, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem("the file", None, rule, fix, f"{path.name}:{line}"))


class _Json:
    """A strict JSON parser that remembers lines; numbers, texts and words are those of ``json``."""

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
            raise self._error("has text after its end")
        return value

    def _value(self, key: Key, depth: int) -> Any:
        self._skip()
        self.count += 1
        if depth > MAX_DEPTH or self.count > MAX_VALUES:
            raise self._error("holds more values, or deeper ones, than any configuration has")
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
        found: dict[str, Any] = {}
        self.at += 1
        while not self._next("}", bool(found)):
            if self.text[self.at : self.at + 1] != '"':
                raise self._error("is not valid JSON: a key must be in double quotes")
            line = self._line()
            name = self._string()
            if name in found:
                raise _wrong(self.path, line, f'gives "{name}" twice', "keep one")
            self._skip()
            if self.text[self.at : self.at + 1] != ":":
                raise self._error("is not valid JSON: after a key comes a colon")
            self.at += 1
            self.lines[*key, name] = line
            found[name] = self._value((*key, name), depth + 1)
        return found

    def _list(self, key: Key, depth: int) -> list[Any]:
        found: list[Any] = []
        self.at += 1
        while not self._next("]", bool(found)):
            found.append(self._value((*key, str(len(found))), depth + 1))
        return found

    def _next(self, end: str, comma: bool) -> bool:
        """Go to the next entry; whether there is none."""
        self._skip()
        if self.text.startswith(end, self.at):
            self.at += 1
            return True
        if comma:
            if not self.text.startswith(",", self.at):
                raise self._error("is not valid JSON: entries are parted by commas")
            self.at += 1
            self._skip()
        return False

    def _string(self) -> str:
        try:
            text, self.at = json.decoder.scanstring(self.text, self.at + 1)  # type: ignore[attr-defined]
        except ValueError:
            raise self._error("is not valid JSON: this text has no end") from None
        return str(text)

    def _skip(self) -> None:
        match = self._BLANK.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _error(self, rule: str) -> ConfigError:
        return _wrong(self.path, self._line(), rule, "correct this line")


class _Yaml:
    """YAML 1.1 as ``yaml.safe_load`` reads it, of bounded size, with lines, and with neither aliases nor merges."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self.lines: dict[Key, int] = {}
        self.count = 0

    def read(self) -> Any:
        import yaml

        depth = 0
        try:
            for event in yaml.parse(self.text, Loader=yaml.SafeLoader):
                self.count += 1
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if depth > MAX_DEPTH + 1:  # before the next are scanned, which takes a time that grows with the square
                    line = event.start_mark.line + 1 if event.start_mark else 1
                    raise _wrong(self.path, line, "nests its values too deeply", "write plain tables")
                if isinstance(event, yaml.AliasEvent):
                    line = event.start_mark.line + 1 if event.start_mark else 1
                    raise _wrong(self.path, line, f"refers to another place (*{event.anchor})", "write it out")
                if self.count > 4 * MAX_VALUES:
                    raise _wrong(self.path, 1, "holds more values than any configuration has", "name another file")
            loader = yaml.SafeLoader(self.text)
            try:
                node = loader.get_single_node()
                return {} if node is None else self._value(loader, node, (), 0)
            finally:
                loader.dispose()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            rule = f"is not valid YAML: {getattr(error, 'problem', None) or 'it cannot be read'}"
            raise _wrong(self.path, mark.line + 1 if mark else 1, rule, "correct this line") from None
        except (RecursionError, ValueError):
            raise _wrong(
                self.path, 1, "nests its values too deeply, or holds an impossible one", "name another file"
            ) from None

    def _value(self, loader: Any, node: Any, key: Key, depth: int) -> Any:
        import yaml

        if depth > MAX_DEPTH:
            raise _wrong(self.path, node.start_mark.line + 1, "nests its values too deeply", "write plain tables")
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for name_node, value_node in node.value:
                line = name_node.start_mark.line + 1
                if not isinstance(name_node, yaml.ScalarNode):
                    raise _wrong(self.path, line, "has a key that is not text", "write a word")
                name = name_node.value
                if name in found:
                    raise _wrong(self.path, line, f"gives {name} twice", "keep one")
                self.lines[*key, name] = line
                found[name] = self._value(loader, value_node, (*key, name), depth + 1)
            return found
        if isinstance(node, yaml.SequenceNode):
            return [self._value(loader, item, (*key, str(n)), depth + 1) for n, item in enumerate(node.value)]
        if len(node.value) > 5_000 and node.tag.endswith((":int", ":float")):
            raise _wrong(self.path, node.start_mark.line + 1, "holds an impossible number", "correct it")
        value = loader.construct_object(node)
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong(self.path, node.start_mark.line + 1, "holds a number that is not finite", "correct it")
        return value if isinstance(value, str | int | float | bool | None.__class__) else str(node.value)
