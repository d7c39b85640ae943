"""Check the target of an output before work starts: its kind, and that of the folder it is in.

A wrong target is a wrong value of the command line (exit code 2). Without this check, the first write would fail
after the work was done, as if the storage had failed.
"""

from __future__ import annotations

import argparse
import errno
import os
import stat
from pathlib import Path
from typing import Literal

from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ConfigError, Problem

Wanted = Literal["file", "folder"]
TOO_LONG = "has a name that is too long for the file system"
_MODES: dict[Wanted, int] = {"file": stat.S_IFREG, "folder": stat.S_IFDIR}


class WrongTargetError(ValueError):
    """A path cannot be an output. The message is the violated rule, and ``fix`` what to do."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule)
        self.fix = fix


def violated_rule(path: str | os.PathLike[str], wanted: Wanted) -> str:
    """Return why a path cannot be an output, as a predicate, or "" if it can.

    A target that does not exist is valid, and so is a link to a valid one. Errors of storage and permissions
    are left to the write.

    Args:
        wanted: kind of the output.
    """
    try:
        kind = stat.S_IFMT(os.stat(path).st_mode)
    except FileNotFoundError:
        if os.path.islink(path):
            return f"is a link to {os.readlink(path)}, which does not exist"
        return _rule_of_parents(path) or _rule_of_names(path)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            return "is a link that leads to itself"
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            return _rule_of_parents(path)
        if error.errno == errno.ENAMETOOLONG:
            return TOO_LONG
        return ""
    if kind == _MODES[wanted]:
        return ""
    return f"is {bounded_reads.name_of_kind(kind)}, not a {wanted}"


def _rule_of_names(path: str | os.PathLike[str]) -> str:
    """Return ``TOO_LONG`` if a folder or file that does not exist yet could not be created with its name."""
    most_bytes = os.pathconf("/", "PC_NAME_MAX")
    for name in Path(path).parts:
        if len(os.fsencode(name)) > most_bytes:
            return TOO_LONG
    return ""


def require(option: str, path: str | os.PathLike[str], wanted: Wanted) -> None:
    """Raise ConfigError if a path that the command line gives cannot be an output."""
    rule = violated_rule(path, wanted)
    if rule:
        raise ConfigError(
            Problem(option, os.fspath(path), rule, f"name another {wanted}", "command line")
        )


def file_argument(text: str) -> Path:
    """Return the path of an output file: the ``type`` of an argument of argparse."""
    return _argument(text, "file")


def folder_argument(text: str) -> Path:
    """Return the path of an output folder: the ``type`` of an argument of argparse."""
    return _argument(text, "folder")


def file_value(text: str) -> str:
    """Return the path of an output file: the reader of a ``VerbOption``."""
    return _value(text, "file")


def folder_value(text: str) -> str:
    """Return the path of an output folder: the reader of a ``VerbOption``."""
    return _value(text, "folder")


def _argument(text: str, wanted: Wanted) -> Path:
    refuse_dash(text)
    rule = violated_rule(text, wanted)
    if rule:
        raise argparse.ArgumentTypeError(f'"{text}" {rule}; name another {wanted}')
    return Path(text)


def _value(text: str, wanted: Wanted) -> str:
    refuse_dash(text)
    rule = violated_rule(text, wanted)
    if rule:
        raise WrongTargetError(rule, f"name another {wanted}")
    return text


def refuse_dash(text: str) -> None:
    """Raise ConfigError for ``-``, with which other programs mean the standard output."""
    if text == "-":
        raise ConfigError(
            "- is not an output: this command does not write to the standard output; name a file, or ./-"
        )


def _rule_of_parents(path: str | os.PathLike[str]) -> str:
    """Return the violated rule of the nearest parent that exists. It must be a folder, or a link to one."""
    parent = Path(os.path.abspath(path)).parent
    while not os.path.lexists(parent) and parent != parent.parent:
        parent = parent.parent
    if parent.is_dir():
        return ""
    if parent.is_symlink():
        return f"is in {parent}, a link to {os.readlink(parent)}, which is not a folder"
    return f"is in {parent}, which is not a folder"
