"""The words after ``train`` and ``config``: a file, a few shardtrain's options, and overrides of the configuration."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class CommandLine:
    """What follows a verb: the configuration file, shardtrain's options, and overrides of the configuration."""

    path: str | None
    nproc: int | None
    overrides: tuple[str, ...]
    help: bool = False
    max_restarts: int | None = None
    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None


OWN: dict[str, tuple[int | None, str, str]] = {
    "--nproc": (1, "must be a whole number of processes above 0", "write it like --nproc 2"),
    "--max_restarts": (0, "must be a whole number of restarts", "write it like --max_restarts 3"),
    "--nnodes": (None, "must be a number of nodes", "write it like --nnodes 2, or 1:4 for an elastic run"),
    "--node_rank": (0, "must be the number of this node", "count from 0"),
    "--rdzv_endpoint": (None, "must be HOST:PORT", "write it like --rdzv_endpoint node1:29500"),
}
"""Options that are not the configuration's: the least number (None: any text), the rule and the fix."""

CONFIG_FILE_FLAGS = ("--job.config_file", "--job.config-file")
"""How torchtitan's commands name the file."""


def two_files(named: str, path: str) -> Problem:
    """Of a command that names one file by ``--job.config_file`` and another by its place."""
    rule = f"is a second file, beside {path}"
    return Problem("job.config_file", named, rule, "give one configuration file, and options after it", "command line")


def with_variable(arguments: CommandLine, environment: Mapping[str, str]) -> CommandLine:
    """Take the file of CONFIG_FILE where the command line names none, as torchtitan's scripts and images do."""
    file = environment.get("CONFIG_FILE")
    if (
        not file
        or arguments.path
        or any(word.partition("=")[0] == "--deepspeed_config" for word in arguments.overrides)
    ):
        return arguments
    if environment.get("RANK", "0") == "0" and "SHARDTRAIN_PARENT" not in environment:
        shown = "".join(char if char.isprintable() else "?" for char in file)
        print(f"configuration: {shown} (as CONFIG_FILE says)", file=sys.stderr, flush=True)
    return replace(arguments, path=file)


def split(words: Sequence[str]) -> CommandLine:
    """Take the file, the options of ``OWN`` and ``--help`` out of the words; all others are overrides.

    The file stands before the first override, because an override may take several values; or it is that of
    ``--job.config_file``, anywhere.

    Raises:
        ConfigError: one of shardtrain's options has no value, or a wrong one, or two files are named.
    """
    path: str | None = None
    named: str | None = None
    own: dict[str, Any] = {}
    overrides: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            return CommandLine(path, None, (), help=True)
        if name in OWN:
            least, rule, fix = OWN[name]
            text = value if equals else (remaining.pop(0) if remaining else "")
            if not text or (least is not None and not (text.isdecimal() and int(text) >= least)):
                raise ConfigError(Problem(name, text, rule, fix, "command line"))
            own[name[2:]] = text if least is None else int(text)
        elif name in CONFIG_FILE_FLAGS and named is None:
            named = value if equals else (remaining.pop(0) if remaining else "")
            if not named or named.startswith("--"):
                rule, fix = "has no value", f"write {name} FILE"
                raise ConfigError(Problem(name, named or None, rule, fix, "command line"))
        elif path is None and not overrides and not word.startswith("-"):
            path = word
        else:
            overrides.append(word)
    if path is not None and named is not None and path != named:
        raise ConfigError(two_files(named, path))
    path = path if named is None else named
    return CommandLine(path, own.pop("nproc", None), tuple(overrides), **own)
