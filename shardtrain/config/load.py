"""From a TOML file and arguments to a ``Config``: every problem reported at once, every value's origin remembered."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from shardtrain.config import nested
from shardtrain.config.aliases import ALIASES, old_kinds, rewrite
from shardtrain.config.arguments import CONFIG_FILE, read_arguments
from shardtrain.config.coerce import Unfit, coerce, from_texts, plain
from shardtrain.config.options import nearest, options, sections, suggestion
from shardtrain.config.schema import Config
from shardtrain.config.settings import COMMAND_LINE, DEFAULT, Setting, Value
from shardtrain.config.toml_lines import key_lines
from shardtrain.errors import ConfigError, Problem

MAX_FILE_BYTES = 2**20
"""A larger file is refused before it is parsed."""

MAX_VALUES = 5_000
"""Keys and values in one file: 100 datasets with weights in 20 stages are 2,000."""

_KEY = r"""[ \t]*(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')[ \t]*"""
DEEP_KEY = re.compile(rf"(?:^|[{{,])[ \t]*\[{{0,2}}{_KEY}(?:\.{_KEY}){{16}}", re.MULTILINE)
"""A key of 17 parts; no option has more than 5."""

MAX_PROBLEMS = 100
"""Looking for mistakes ends when this many are found: a file with more is no configuration of ours."""


@dataclass(frozen=True)
class Loaded:
    """A config with the origin of every value.

    ``origins`` maps each dotted option (and each key of a table option, and of each entry of a table of tables) to
    "run.toml:12", "command line" or "default". ``notices`` are lines for the user: older names and what became of them.
    """

    config: Config
    origins: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    path: Path | None = None

    def value(self, option: str) -> Value:
        """Return the value of a dotted option."""
        return value_of(self.config, option)

    def is_set(self, option: str) -> bool:
        """Whether the file or the command line gives this option."""
        return self.origins.get(option, DEFAULT) != DEFAULT

    def where(self, option: str) -> str:
        """Return the origin for an error message: empty for a default."""
        return self.origins[option] if self.is_set(option) else ""


def value_of(config: Config, option: str) -> Value:
    """Return the value of a dotted option of a config, or of an entry: ``data.sources.web.weight``."""
    value: Any = config
    for part in option.split("."):
        if isinstance(value, Mapping):
            value = value[part]
        else:
            value = value[int(part)] if isinstance(value, list) else getattr(value, part)
    return value


def load(path: str | Path | None, arguments: Sequence[str] = ()) -> Loaded:
    """Read a TOML file (or none) and ``--section.key value`` arguments; command line beats file beats default.

    ``--job.config_file F`` takes the place of ``path``. Raises ConfigError with all problems of both at once. Rules
    that join several options are those of ``check``.
    """
    line = read_arguments(arguments, old_kinds())
    problems = list(line.problems)
    named = [s for s in line.settings if s.option == CONFIG_FILE]
    file = Path(named[-1].value[0]) if named else (Path(path) if path is not None else None)
    settings = _read_file(file, problems) if file is not None else []
    return _resolve(settings, line.settings, problems, file)


def _resolve(from_file: list[Setting], from_line: list[Setting], problems: list[Problem], file: Path | None) -> Loaded:
    """Rename, type and merge the settings of the file and of the command line, or raise all problems."""
    both = [_in_force(from_file, from_line), [one for setting in from_line for one in nested.spread_text(setting)]]
    values: dict[str, Any] = {}
    origins: dict[str, str] = dict.fromkeys(options(), DEFAULT)
    rewritten = rewrite([s for group in both for s in group])
    problems += rewritten.problems
    seen: dict[tuple[str, bool], Setting] = {}
    for setting in sorted(rewritten.settings, key=lambda s: s.where == COMMAND_LINE):
        place = (setting.option, setting.where == COMMAND_LINE)
        if place in seen:
            rule = f"is given twice, also at {seen[place].where} under another name"
            problems.append(Problem(setting.option, setting.shown, rule, "keep one", setting.where))
            continue
        seen[place] = setting
        _take(setting, values, origins, problems)
        if len(problems) >= MAX_PROBLEMS:
            problems.append(Problem("the file", None, "has more mistakes than are told", "correct these first"))
            break
    if problems:
        raise ConfigError(problems)
    return Loaded(_build("", values), MappingProxyType(origins), tuple(rewritten.notices), file)


def _in_force(from_file: list[Setting], from_line: list[Setting]) -> list[Setting]:
    """Leave out what the file says about options that the command line sets under the same name."""
    given = {s.option for s in from_line}
    lists = tuple(f"{name}." for name in given if nested.names_list(name))
    return [s for s in from_file if s.option not in given and not s.option.startswith(lists)]


def _take(setting: Setting, values: dict[str, Any], origins: dict[str, str], problems: list[Problem]) -> None:
    """Type one setting and enter it, or enter the problem."""
    name = setting.option
    table, _, key = name.rpartition(".")
    option = options().get(name)
    try:
        place = nested.find(name)
        if place is not None:
            nested.take(place, setting, values.setdefault(place.option.name, {}))
            if place.entry:
                origins.setdefault(f"{place.option.name}.{place.entry}", setting.where)
            if origins[place.option.name] == DEFAULT or setting.where == COMMAND_LINE:
                origins[place.option.name] = setting.where
        elif option is not None:
            kind = option.kind
            value = from_texts(setting.value, kind) if setting.is_text else coerce(setting.value, kind)
            values[name] = {**values.get(name, {}), **value} if option.is_table else value
            if option.is_table:
                origins |= {f"{name}.{inner}": setting.where for inner in value}
        elif table in options() and options()[table].is_table:
            kind = get_args(options()[table].kind)[1]
            value = plain(setting.value[0]) if setting.is_text else setting.value
            values[table] = {**values.get(table, {}), key: coerce(value, kind)}
            origins[table] = setting.where
        else:
            problems.append(_unknown(setting))
            return
    except Unfit as unfit:
        problems.append(Problem(name, setting.shown, unfit.rule, unfit.fix, setting.where))
        return
    origins[name] = setting.where


def _unknown(setting: Setting) -> Problem:
    """Return the problem of a name that no option has."""
    name = setting.option
    if isinstance(setting.value, dict) and not setting.is_text:
        near = nearest(name, [*(s for s in sections() if s), *(o.name for o in options().values() if o.entry)])
        fix = (
            f"did you mean [{near}]?"
            if near
            else "sections are " + ", ".join(s for s in sections() if "." not in s and s)
        )
        return Problem(f"[{name}]", None, "is not a section", fix, setting.where)
    if name in sections():
        return Problem(
            name, setting.shown, "is a section, not an option", f"write [{name}] above its keys", setting.where
        )
    return Problem(name, setting.shown, "is not an option", suggestion(name, ALIASES), setting.where)


def _build(section: str, values: Mapping[str, Any]) -> Value:
    """Build the dataclass of a section from the values that are set; the others keep their defaults."""
    cls = sections()[section]
    prefix = f"{section}." if section else ""
    given: dict[str, Any] = {}
    for name in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        dotted = f"{prefix}{name}"
        if dotted in sections():
            given[name] = _build(dotted, values)
        elif dotted in values:
            value = values[dotted]
            given[name] = nested.build(options()[dotted], value) if options()[dotted].entry else value
    return cls(**given)


def _read_file(file: Path, problems: list[Problem]) -> list[Setting]:
    """Read a TOML file into settings; enters a problem where it cannot be read."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            rule = f"has more than {MAX_FILE_BYTES} bytes, which no configuration has"
            problems.append(Problem(CONFIG_FILE, str(file), rule, "name a configuration file"))
            return []
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        problems.append(Problem(CONFIG_FILE, str(file), "is not UTF-8 text", "save it as UTF-8"))
        return []
    except OSError as error:
        problems.append(_unreadable(file, error))
        return []
    try:
        if DEEP_KEY.search(text):
            raise RecursionError  # before the parser, which takes time and memory by the square of a key's length
        table = tomllib.loads(text)
    except RecursionError:
        problems.append(Problem(CONFIG_FILE, str(file), "nests its values too deeply", "write plain tables and lists"))
        return []
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line = match[1] if match else len(text.rstrip().splitlines())  # without a line it is "at end of document"
        rule = "is not valid TOML: " + re.sub(r" \(at .*\)$", "", str(error))
        problems.append(Problem("the file", None, rule, "correct this line", f"{file.name}:{line}"))
        return []
    except ValueError as error:  # a number of more than 4300 digits
        problems.append(Problem(CONFIG_FILE, str(file), f"cannot be read ({error})", "correct the number"))
        return []
    if num_values(table) > MAX_VALUES:
        rule = f"holds more than {MAX_VALUES} keys and values, which no configuration has"
        problems.append(Problem(CONFIG_FILE, str(file), rule, "name a configuration file"))
        return []
    lines = key_lines(text)
    return list(_flatten(table, (), lines, file.name))


def num_values(value: Any) -> int:
    """Keys and values in nested tables and lists."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(inner) + sum(num_values(item) for item in inner)


def _unreadable(file: Path, error: OSError) -> Problem:
    """Return the problem of a file that cannot be opened, with a file that may have been meant."""
    if file.is_dir():
        return Problem(CONFIG_FILE, str(file), "is a folder", "name the TOML file in it")
    if file.exists():
        return Problem(CONFIG_FILE, str(file), f"cannot be read ({error.strerror})", "allow reading it")
    folder = file.parent
    names = sorted(name for name in os.listdir(folder) if name.endswith(".toml")) if folder.is_dir() else []
    near = nearest(file.name, names)
    if near:
        fix = f"did you mean {folder / near}?"
    elif names:
        fix = f"{folder} has {', '.join(names[:8])}"
    else:
        fix = f"{folder} has no TOML file" if folder.is_dir() else f"there is no folder {folder}"
    return Problem(CONFIG_FILE, str(file), "does not exist", fix)


def _flatten(
    table: Mapping[str, Any], prefix: tuple[str, ...], lines: Mapping[tuple[str, ...], int], file: str
) -> list[Setting]:
    """Turn nested tables into dotted settings; a table that is no section stays one setting."""
    found: list[Setting] = []
    for key, value in table.items():
        path = (*prefix, key)
        name = ".".join(path)
        if nested.holds(path):
            found += nested.spread(path, value, lambda at: f"{file}:{lines[at]}" if at in lines else file)
        elif isinstance(value, dict) and (_is_section(name) or (name in options() and options()[name].is_table)):
            found += _flatten(value, path, lines, file)
        else:
            line = lines.get(path)
            found.append(Setting(name, value, f"{file}:{line}" if line else file))
    return found


def _is_section(name: str) -> bool:
    """Whether a dotted name is a section, of today or of an older file."""
    return name in sections() or any(old.startswith(f"{name}.") for old in ALIASES)
