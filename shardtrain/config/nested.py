"""Options that contain tables: ``[data.sources.NAME]`` and ``[[data.stages]]``.

Each key of an entry is a separate setting with a dotted name and its own line in the file. In a
list, the number of the entry is part of the name: ``data.sources.web.weight``,
``data.stages.0.until_tokens``. While a configuration is loaded, the value of an option is ``{entry:
{field: value}}``. ``build`` then creates the dataclasses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from shardtrain.config.coerce import Unfit, coerce, from_texts, parse_toml
from shardtrain.config.options import Option, nearest, options, options_of
from shardtrain.config.settings import Kind, Setting, Value
from shardtrain.utils.variables import is_whole_number

Path = tuple[str, ...]
Entries = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class NestedOption:
    """Parts of a dotted name in an option that contains tables. Missing parts are None.

    Attributes:
        option: The option, such as data.sources.
        entry: Name or number of the entry.
        field: Field of the entry.
        key: Key in a field that is a table.
    """

    option: Option
    entry: str | None
    field: Option | None
    key: str | None

    @property
    def kind(self) -> Kind:
        """Type of the value: the type of the option, of the field, or of a key in the field."""
        if self.field is None:
            return self.option.kind
        if self.key is not None:
            return get_args(self.field.kind)[1]
        return self.field.kind


def find(name: str) -> NestedOption | None:
    """Return the parts of a dotted name in an option that contains tables, or None for other names.

    Raises:
        Unfit: the entries of the option have no such key.
    """
    containing = [other for other in _names() if f"{name}.".startswith(f"{other}.")]
    if not containing:
        return None
    option = options()[containing[0]]
    assert option.entry is not None
    entry, _, rest = name[len(option.name) + 1 :].partition(".")
    if not rest:
        return NestedOption(option, entry or None, None, None)
    prefix = f"{option.name}.{entry}"
    fields = options_of(prefix, option.entry)
    field_name, _, key = rest.partition(".")
    field = fields.get(f"{prefix}.{field_name}")
    # Only a field that is a table has keys, and they have no further parts.
    if field is None or (key and (not field.is_table or "." in key)):
        keys = [other.rpartition(".")[2] for other in fields]
        near = None
        if field is None:
            near = nearest(field_name, keys)
        fix = f"keys are {', '.join(keys)}"
        if near:
            fix = f"did you mean {prefix}.{near}?"
        raise Unfit("is not an option", fix)
    return NestedOption(option, entry, field, key or None)


def holds(path: Path) -> bool:
    """True if the path of a key in the file is in an option that contains tables."""
    return any(".".join(path[:length]) in _names() for length in range(1, len(path) + 1))


def names_list(option: str) -> bool:
    """True if an option is a list of tables. A later list replaces an earlier list completely."""
    return option in _names() and get_origin(options()[option].kind) is list


@functools.cache
def _names() -> list[str]:
    return [name for name, option in options().items() if option.entry]


def spread(path: Path, value: Value, where: Callable[[Path], str]) -> Iterator[Setting]:
    """Split a TOML value of an option that contains tables into a setting for each entry and each key."""
    name = ".".join(path)
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        empty: Value = []
        entries = {str(number): item for number, item in enumerate(value)}
    elif isinstance(value, dict):
        empty = {}
        entries = value
    else:
        yield Setting(name, value, where(path))
        return
    # The empty table or list is followed by separate settings for its entries.
    yield Setting(name, empty, where(path))
    for key, item in entries.items():
        below = (*path, key)
        if isinstance(item, dict):
            yield from spread(below, item, where)
        else:
            yield Setting(".".join(below), item, where(below))


def spread_text(setting: Setting) -> list[Setting]:
    """Split a command-line value that is an entire option or entry in TOML syntax.
    Return other settings unchanged.
    """
    try:
        place = find(setting.option)
    except Unfit:
        return [setting]
    # A plain field or a key of a table holds one value, which needs no splitting.
    if place is None or place.key is not None:
        return [setting]
    if place.field is not None and not place.field.is_table:
        return [setting]

    # Text that is not TOML does not change. ``take`` reports it.
    try:
        value = setting.value
        if len(setting.value) == 1:
            value = parse_toml(f"value = {setting.value[0]}")["value"]
    except (ValueError, KeyError):
        value = setting.value[0]
    return list(spread(tuple(setting.option.split(".")), value, lambda _: setting.where))


def take(place: NestedOption, setting: Setting, entries: Entries) -> None:
    """Add the value of a setting to ``entries``. Raise Unfit if it is invalid."""
    is_list = get_origin(place.option.kind) is list
    # ``spread`` writes an empty value for the option, and then settings for its entries.
    if place.entry is None:
        if is_list and setting.value != []:
            fix = f"write [[{place.option.name}]] above the keys of each"
            raise Unfit("must be a list of tables", fix)
        if not is_list and setting.value != {}:
            fix = f"write [{place.option.name}.NAME] above the keys of each"
            raise Unfit("must be a table of tables", fix)
        return

    # Entries of a list are numbered without gaps.
    if is_list and (not is_whole_number(place.entry) or int(place.entry) > len(entries)):
        raise Unfit("is not the number of an entry", f"use 0 to {len(entries)}")
    if place.entry == "":
        raise Unfit("has an entry without a name", "name it")
    if place.field is None and setting.value != {}:
        raise Unfit("must be a table", f"write {setting.option}.KEY = VALUE")
    fields = entries.setdefault(place.entry, {})
    if place.field is None:
        return
    name = place.field.name.rpartition(".")[2]
    convert = from_texts if setting.is_text else coerce
    value = convert(setting.value, place.kind)
    # A table collects the keys of several settings.
    if place.key is not None:
        value = {place.key: value}
    if place.field.is_table:
        value = {**fields.get(name, {}), **value}
    fields[name] = value


def build(option: Option, entries: Mapping[str, Mapping[str, Any]]) -> Value:
    """Create the dataclasses of an option: a dict by name, or a list."""
    assert option.entry is not None
    built = {name: option.entry(**fields) for name, fields in entries.items()}
    if get_origin(option.kind) is dict:
        return built
    return [built[str(number)] for number in range(len(built))]


def underscored(name: str) -> str:
    """Write dashes of a command-line name as underscores, as the keys of the schema are;
    names of users stay.
    """
    plain = name.replace("-", "_")
    option = next((o for o in _names() if plain.startswith(f"{o}.")), None)
    if option is None:
        return plain
    # In data.my-sources.WEB-1.text-field.KEY the entry and the key are the user's,
    # and the field is the schema's.
    entry, dot, rest = name[len(option) + 1 :].partition(".")
    field, dot_2, key = rest.partition(".")
    return f"{option}.{entry}{dot}{field.replace('-', '_')}{dot_2}{key}"
