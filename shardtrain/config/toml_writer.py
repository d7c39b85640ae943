"""Write a config as TOML that loads to an equal config, on request with the origin of every value."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shardtrain.config.load import RESOLVED_CONFIG as RESOLVED_CONFIG
from shardtrain.config.load import Loaded, value_of
from shardtrain.config.options import Option, kind_text, options, options_of, sections
from shardtrain.config.schema import Config
from shardtrain.config.settings import Value
from shardtrain.utils.redact import CONTROLS, visible


def toml_value(value: Value) -> str:
    """Write a value as TOML.

    >>> toml_value([1.0, True, 'say "hi"'])
    '[1.0, true, "say \\\\"hi\\\\""]'
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        text = repr(value)
        if any(mark in text for mark in ".ein"):
            return text
        return f"{text}.0"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        # TOML does not allow ASCII controls in text, and a terminal obeys the others.
        escaped = re.sub(
            rf"[\x00-\x1f{CONTROLS}]", lambda match: f"\\u{ord(match[0]):04x}", escaped
        )
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, Mapping):
        pairs = [f"{_key(key)} = {toml_value(item)}" for key, item in value.items()]
        return "{" + ", ".join(pairs) + "}"
    return str(value)


def _key(key: str) -> str:
    plain = key.isascii() and key.replace("_", "a").replace("-", "a").isalnum()
    return key if plain else toml_value(key)


def resolved_toml(config: Config) -> str:
    """Return all options as TOML that loads to an equal config. Unset options are comments."""
    return _render(config, lambda name, value: "")


def set_toml(loaded: Loaded, also: Collection[str] = ()) -> str:
    """Return the options that are set, and the options in ``also``, as TOML that loads to an equal config."""
    return _render(
        loaded.config, lambda name, value: "", lambda name: loaded.is_set(name) or name in also
    )


def show(loaded: Loaded) -> str:
    """Return all options as TOML, each with its origin: ``steps = 50  # run.toml:3``."""

    def comment(name: str, value: Any) -> str:
        # A file may have a newline in its name, and the rest of the name would be an option.
        origin = visible(loaded.origins.get(name, "default"), lines=False)
        return f"  # {origin}"

    return _render(loaded.config, comment)


def _render(
    config: Config,
    comment: Callable[[str, Any], str],
    wanted: Callable[[str], bool] | None = None,
) -> str:
    """Return the sections with their options, or only the ``wanted`` sections.

    Tables come last in their section.
    """
    blocks = []
    schema = type(config)
    for section in sections(schema):
        lines: list[str] = []
        tables: list[str] = []
        for name, option in options(schema).items():
            if name.rpartition(".")[0] != section or (wanted and not wanted(name)):
                continue
            value = value_of(config, name)
            key = name.rpartition(".")[2]
            # Write an empty list of tables as a value, because a table header cannot express it.
            if option.entry and (value or isinstance(value, Mapping)):
                tables += _entries(option, value, comment)
            elif option.is_table:
                tables += ["", f"[{name}]"]
                for inner, item in value.items():
                    tables.append(
                        f"{_key(inner)} = {toml_value(item)}{comment(f'{name}.{inner}', item)}"
                    )
            else:
                lines.append(_line(option, key, value, comment))
        # Tables come last, because a key after a table header would belong to that table.
        if lines or tables:
            blocks.append("\n".join([f"[{section}]", *lines, *tables]))
    return "\n\n".join(blocks) + "\n"


def _line(option: Option, key: str, value: Value, comment: Callable[[str, Any], str]) -> str:
    if value is None:
        return f"# {key}: unset ({kind_text(option.kind)})"
    return f"{key} = {toml_value(value)}{comment(option.name, value)}"


def _entries(option: Option, value: Value, comment: Callable[[str, Any], str]) -> list[str]:
    """Return the lines of a table or a list of tables, with all fields of each entry."""
    assert option.entry is not None
    lines: list[str] = []
    if isinstance(value, list):
        entries = {str(number): entry for number, entry in enumerate(value)}
    else:
        entries = value
        lines += ["", f"[{option.name}]"]
    for name, entry in entries.items():
        header = f"[{option.name}.{_key(name)}]"
        if isinstance(value, list):
            header = f"[[{option.name}]]"
        lines += ["", header]
        for field in options_of(f"{option.name}.{name}", option.entry).values():
            key = field.name.rpartition(".")[2]
            lines.append(_line(field, key, getattr(entry, key), comment))
    return lines
