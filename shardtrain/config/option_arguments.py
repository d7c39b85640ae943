"""Parse ``--section.key value`` arguments into settings. ``load`` converts their values together with the file's."""

from __future__ import annotations

import itertools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from shardtrain.config import nested, presets
from shardtrain.config.coerce import Unfit
from shardtrain.config.options import Option, options, sections, suggestion
from shardtrain.config.schema import Config
from shardtrain.config.settings import Kind, Setting
from shardtrain.utils.errors import COMMAND_LINE, Problem

CONFIG_FILE = "job.config_file"


@dataclass
class Arguments:
    """Settings of the command line, and problems with its arguments."""

    settings: list[Setting] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_arguments(
    arguments: Sequence[str], older: Mapping[str, Any], schema: type[Config] = Config
) -> Arguments:
    """Parse arguments into settings of ``schema``. ``older`` maps the names of older options to their types.

    An argument is ``--x.y=v`` or ``--x.y v``. Booleans can also be ``--x.y`` and ``--x.no_y``.
    Lists take several values. Dashes in names become underscores.
    """
    kinds = {name: option.kind for name, option in options(schema).items()} | dict(older)
    read = Arguments()
    seen = set[str]()
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        if not argument.startswith("--") or argument == "--":
            # The argument is neither an option nor a value. Report all files of an expanded pattern
            # as one problem, and an option with a single dash together with its value.
            before = ""
            if at:
                before = arguments[at - 1]
            read.problems.append(_stray(argument, before, kinds))
            files = _expanded(arguments, at)
            if len(files) > 1:
                read.problems[-1] = _pattern(arguments[at - 2], files)
                at += len(files) - 2
            at += 1
            is_option = argument.startswith("-") and len(argument) > 2 and "=" not in argument
            if is_option and at < len(arguments) and not arguments[at].startswith("-"):
                at += 1
            continue

        # Split the name from an attached value, and find the option that it sets.
        name, equals, attached = argument[2:].partition("=")
        name = nested.underscored(name)
        at += 1
        values: list[str] = []
        if equals:
            values = [attached]
        name, negated = _negation(name, kinds)
        option = _option_of(name, kinds, schema)
        kind = _kind(name, option, kinds)
        if not equals and not negated:
            # A list takes all arguments up to the next option. A boolean only takes valid values:
            # a file may follow.
            limit = _most_values(kind)
            while (
                at < len(arguments) and not arguments[at].startswith("--") and len(values) < limit
            ):
                if _is_bool(kind) and arguments[at].lower() not in ("true", "false", "none"):
                    break
                values.append(arguments[at])
                at += 1
        _add(read, seen, name, option, kind, values, negated, schema)
    return read


def _expanded(arguments: Sequence[str], at: int) -> list[str]:
    """Return the files of a pattern that the shell expanded, if ``arguments[at]`` is the second of them. Else []."""
    # The first file became the value of the option, so the option is two arguments before.
    if at < 2 or not arguments[at - 2].startswith("--") or "=" in arguments[at - 2]:
        return []
    suffix = Path(arguments[at - 1]).suffix
    if not suffix or suffix == ".toml":
        return []
    return list(
        itertools.takewhile(lambda argument: Path(argument).suffix == suffix, arguments[at - 1 :])
    )


def _pattern(option: str, files: Sequence[str]) -> Problem:
    """Return the problem of an option with one path that received the files of an expanded pattern."""
    folder = Path(files[0]).parent
    suffix = Path(files[0]).suffix
    return Problem(
        option,
        files[0],
        rule=f"is followed by {len(files) - 1} more files, as the shell writes a pattern without quotes",
        fix=f'write {option} "{folder / f"*{suffix}"}"',
        where=COMMAND_LINE,
    )


def _stray(argument: str, before: str, kinds: Mapping[str, Any]) -> Problem:
    """Return the problem of an argument that is neither an option nor a value, with the probable fix."""
    if before.startswith("--") and (argument.endswith(".toml") or argument in presets.names()):
        return Problem(
            "argument",
            argument,
            rule="follows an option, but the configuration must come first",
            fix=f"write {argument} before all options",
            where=COMMAND_LINE,
        )
    if argument.endswith(".toml"):
        return Problem(
            "argument",
            argument,
            rule="is a second file",
            fix="use one configuration file, followed by options",
            where="",
        )
    rule = "belongs to no option"
    fix = "write options as --section.key VALUE"
    meant = nested.underscored(argument.lstrip("-").partition("=")[0])
    previous = nested.underscored(before[2:])
    if meant in kinds:
        fix = f"write --{argument.lstrip('-')}"
    elif argument in presets.names():
        rule = "is a second configuration"
        fix = "name one file, and options after it"
    elif before.startswith("--") and _is_bool(kinds.get(previous)):
        rule = f"is neither true nor false, for --{previous}"
        fix = f"write --{previous} or --{previous} false"
    return Problem("argument", argument, rule, fix, COMMAND_LINE)


def _add(
    read: Arguments,
    seen: set[str],
    name: str,
    option: str | None,
    kind: Kind,
    values: list[str],
    negated: bool,
    schema: type[Config],
) -> None:
    """Add an argument to ``read`` as a setting or as a problem."""
    shown: str | list[str] | None = values or None
    if len(values) == 1:
        shown = values[0]

    def wrong(rule: str, fix: str) -> None:
        read.problems.append(Problem(f"--{name}", shown, rule, fix, COMMAND_LINE))

    if option is None:
        # A section's name is often meant as its switch, and --data as a path of the user's file.
        if name in sections(schema):
            turned_on = ""
            if f"{name}.enable" in options(schema) and not values:
                turned_on = f"--{name}.enable, or "
            fix = f"write {turned_on}--{name}.KEY VALUE"
            if name == "data" and values:
                fix = (
                    f"a file of yours is --training.dataset text --training.dataset_path {shown}; "
                    + fix
                )
            wrong("is a section, not an option", fix)
        else:
            fix = suggestion(name, schema=schema)
            # Habits of other programs.
            if name in ("config", "config_file", "cfg", "file"):
                fix = f"the configuration is the first argument: shardtrain train {shown or 'CONFIG.toml'}"
            elif name.startswith(("resume", "continue")):
                fix = "a run continues where it stopped: repeat its command with the same job.dump_folder"
            wrong("is not an option", fix)
        return
    if name in seen:
        return wrong("is given twice", "give it once")
    seen.add(name)
    if negated:
        # no_y without a value, or with "true", sets y to false.
        is_true = bool(values) and values[0].lower() != "true"
        values = [str(is_true).lower()]
    elif not values and _is_bool(kind):
        values = ["true"]
    elif not values:
        return wrong("has no value", f"write --{name} VALUE")
    read.settings.append(Setting(name, tuple(values), COMMAND_LINE, is_text=True))


def _negation(name: str, kinds: Mapping[str, Any]) -> tuple[str, bool]:
    """Replace ``x.no_y`` with ``x.y`` if y is a boolean option and no_y is not an option.
    Return True if replaced.
    """
    section, _, key = name.rpartition(".")
    positive = f"{section}.{key[3:]}"
    if key.startswith("no_") and name not in kinds and _is_bool(kinds.get(positive)):
        return positive, True
    return name, False


def _option_of(name: str, kinds: Mapping[str, Any], schema: type[Config]) -> str | None:
    """Return the option that a dotted name sets: itself, or the table that contains it."""
    if name in kinds:
        return name
    table, _, _ = name.rpartition(".")
    option = options(schema).get(table)
    if isinstance(option, Option) and option.is_table:
        return table
    return next(
        (o.name for o in options().values() if o.entry and name.startswith(f"{o.name}.")), None
    )


def _kind(name: str, option: str | None, kinds: Mapping[str, Any]) -> Kind:
    """Return the type of an argument, or None for a key of a table. The type determines how many values it takes."""
    if option == name:
        return kinds[name]
    try:
        place = nested.find(name)
    except Unfit:
        # nested.take reports the problem.
        return None
    if place is None or place.field is None:
        return None
    return place.kind


def _is_bool(kind: Kind) -> bool:
    """True for a boolean option, including one that can be unset."""
    return kind is bool or set(get_args(kind)) == {bool, type(None)}


def _most_values(kind: Kind) -> int:
    """Return the maximum number of values for an option of this type."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    return 1_000_000 if get_origin(kind) is list else 1
