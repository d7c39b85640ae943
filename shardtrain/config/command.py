"""``shardtrain config``: show, check or explain the configuration."""

from __future__ import annotations

from collections.abc import Callable

from shardtrain import config
from shardtrain.config import presets
from shardtrain.config.command_line import split
from shardtrain.errors import ConfigError, Problem


def main(words: list[str]) -> int:
    """Run one action; gives the exit status."""
    action, rest = (words[0], words[1:]) if words else ("", [])
    if action not in ACTIONS:
        names = [*ACTIONS, *_ELSEWHERE]
        near = config.nearest(action, names) if action else None
        fix = (f"did you mean {near}? " if near else "") + f"use one of {', '.join(names)}"
        raise ConfigError(Problem("shardtrain config", action or None, "needs an action", fix, "command line"))
    return ACTIONS[action](rest)


def _show(words: list[str]) -> int:
    found = split(words)
    print(config.show(config.load(found.path, found.overrides, preset=presets.FIRST)))
    return 0


def _help(words: list[str]) -> int:
    name = words[0].lstrip("-") if words else ""
    try:
        print(config.help_text(name))
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from None
    return 0


ACTIONS: dict[str, Callable[[list[str]], int]] = {"show": _show, "help": _help}
_ELSEWHERE = ("check", "migrate")
"""Actions that need more than the configuration, and have homes of their own."""
