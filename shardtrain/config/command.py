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
        fix = f"use one of {', '.join(ACTIONS)}"
        raise ConfigError(Problem("shardtrain config", action or None, "needs an action", fix, "command line"))
    return ACTIONS[action](rest)


def _show(words: list[str]) -> int:
    found = split(words)
    print(config.show(config.load(found.path, found.overrides, preset=presets.FIRST)))
    return 0


def _check(words: list[str]) -> int:
    """Print errors, then notes; only errors make the status 2. This machine counts with ``--nproc`` alone."""
    found = split(words)
    loaded = config.load(found.path, found.overrides, preset=presets.FIRST)
    extra = config.machine_notes(loaded, found.nproc, None, None) if found.nproc else ()
    report, code = config.check_report(loaded, extra)
    print(report)
    return code


def _help(words: list[str]) -> int:
    name = words[0].lstrip("-") if words else ""
    try:
        print(config.help_text(name))
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from None
    return 0


ACTIONS: dict[str, Callable[[list[str]], int]] = {"show": _show, "check": _check, "help": _help}
