"""Rules that keep a run to its own folder, and secrets out of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from shardtrain.config.load import Loaded
from shardtrain.config.options import options
from shardtrain.config.rules.own_files_rules import named_files
from shardtrain.config.rules.values import problem
from shardtrain.config.settings import COMMAND_LINE
from shardtrain.utils.errors import Problem
from shardtrain.utils.redact import redact, redact_all

BELOW_DUMP_FOLDER = (
    "checkpoint.folder",
    "comm.save_traces_folder",
    "job.save_config_file",
    "metrics.save_log_file",
    "metrics.save_tb_folder",
    "profiling.save_memory_snapshot_folder",
    "profiling.save_traces_folder",
)
"""Where a run writes, as paths below ``job.dump_folder``; that folder itself is the user's to choose."""

ALWAYS_BELOW = ("logs", "mlruns", "trackio", "wandb")
"""Folders below ``job.dump_folder`` without an option: output of ranks, and files of metrics libraries."""

ALSO_ELSEWHERE = ("checkpoint.folder",)
"""Checkpoints are often on a filesystem of their own, which an absolute path names."""

ONE_NAME = ("comm.save_traces_file_prefix",)
"""Beginnings of a file's name."""

_MAX_CHARACTERS = 200


def check_paths(loaded: Loaded) -> Iterator[Problem]:
    """Names of files and folders that would lead out of ``job.dump_folder``, or are none."""
    fix = "give a relative path without .., and choose the place by job.dump_folder"
    for option in (*BELOW_DUMP_FOLDER, *ONE_NAME):
        value = loaded.value(option)
        if value is None or (option in ALSO_ELSEWHERE and PurePath(value).is_absolute() and ".." not in value):
            continue
        rule = _path_rule(value, option in ONE_NAME)
        if rule:
            yield problem(loaded, option, rule, fix)
    folder = loaded.config.job.dump_folder
    if not folder.strip():
        yield problem(loaded, "job.dump_folder", "is empty", "name a folder; . is the one that you are in")
    elif "://" in folder:
        rule = "is an address, and a run's own folder is on a disk"
        yield problem(loaded, "job.dump_folder", rule, "name a folder, and give the address to checkpoint.folder")
    if not folder.isprintable():
        yield problem(loaded, "job.dump_folder", "has a character that no name should have", "use printable ones")


def _path_rule(text: str, one_name: bool) -> str | None:
    path = PurePath(text)
    if not text.isprintable() or "\\" in text:
        return "has a character that no name should have"
    if len(text) > _MAX_CHARACTERS:
        return f"is longer than {_MAX_CHARACTERS} characters"
    if path.is_absolute() or text.startswith("~") or ".." in path.parts:
        return "leads out of job.dump_folder"
    if one_name:
        return "is the beginning of one name, and no path" if "/" in text else None
    return "is not a name of a file or folder" if not path.parts else None


def code_of_a_run(loaded: Loaded) -> list[Problem]:
    """Python files that the resolved configuration in a run's folder names: they run only if the user names them too.

    A configuration that a user gives is the user's own word; one that lies in a folder may be anybody's.
    """
    rule = "is code that the folder of a run names, and opening a folder runs none"
    return [
        Problem(option, value, rule, f"if you trust that file, say so: --{option} {value}", loaded.where(option))
        for option, value in named_files(loaded.config)
        if value.endswith(".py") and loaded.origins.get(option) != COMMAND_LINE
    ]


def check_secrets(loaded: Loaded) -> Iterator[Problem]:
    """Options that hold a secret of the environment: they are written to files, logs and W&B."""
    for name in options():
        if loaded.is_set(name) and redact_all(loaded.value(name)) != loaded.value(name):
            rule = "holds a secret, and options are written to files and logs"
            fix = "take it out: libraries read their tokens from the environment themselves"
            yield Problem(name, redact_all(loaded.value(name)), rule, fix, redact(loaded.where(name)))
