"""``shardtrain config``: show, check or explain the configuration."""

from __future__ import annotations

from collections.abc import Callable

from shardtrain import config
from shardtrain.config import presets
from shardtrain.config.command_line import CommandLine, split
from shardtrain.config.load import Loaded
from shardtrain.utils.errors import ConfigError, Problem

Opener = Callable[[CommandLine], tuple[Loaded, CommandLine]]


def main(words: list[str], open_config: Opener | None = None) -> int:
    """Run one action; gives the exit status. ``open_config`` reads files of other systems too, as ``train`` does."""
    action, rest = (words[0], words[1:]) if words else ("", [])
    if action not in ACTIONS:
        names = [*ACTIONS, *_ELSEWHERE]
        near = config.nearest(action, names) if action else None
        fix = (f"did you mean {near}? " if near else "") + f"use one of {', '.join(names)}"
        raise ConfigError(Problem("shardtrain config", action or None, "needs an action", fix, "command line"))

    def open_toml(found: CommandLine) -> tuple[Loaded, CommandLine]:
        return config.load(found.path, found.overrides, preset=presets.FIRST), found

    return ACTIONS[action](rest, open_config or open_toml)


def _show(words: list[str], open_config: Opener) -> int:
    print(config.show(open_config(split(words))[0]))
    return 0


def _help(words: list[str], _open: Opener) -> int:
    name = words[0].lstrip("-") if words else ""
    try:
        print(config.help_text(name))
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from None
    return 0


def _schema(words: list[str], _open: Opener) -> int:
    from shardtrain.config.json_schema import json_schema_text

    if words:
        rule = "takes no argument"
        fix = "shardtrain config schema > shardtrain.schema.json"
        raise ConfigError(Problem("shardtrain config schema", words[0], rule, fix, "command line"))
    print(json_schema_text(), end="")
    return 0


ACTIONS: dict[str, Callable[[list[str], Opener], int]] = {"show": _show, "help": _help, "schema": _schema}
_ELSEWHERE = ("check", "migrate")
"""Actions that need more than the configuration, and have homes of their own."""
