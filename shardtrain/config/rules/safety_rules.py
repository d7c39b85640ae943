"""Rules that keep a run to its own folder, and secrets out of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from shardtrain.config import json_schema
from shardtrain.config.load import Loaded
from shardtrain.config.options import options
from shardtrain.config.rules.own_files_rules import named_files
from shardtrain.config.rules.values import problem
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.utils.errors import COMMAND_LINE, Problem
from shardtrain.utils.redact import redact, redact_all

BELOW_DUMP_FOLDER = {
    "checkpoint.folder": "checkpoint.enable",
    "comm.save_traces_folder": "comm.trace_buf_size",
    "job.save_config_file": "job.save_config_file",
    "metrics.save_log_file": "metrics.save_log_file",
    "metrics.save_tb_folder": "metrics.enable_tensorboard",
    "profiling.save_memory_snapshot_folder": "profiling.enable_memory_snapshot",
    "profiling.save_traces_folder": "profiling.enable_profiling",
}
"""Options with paths that a run writes to, and the option that enables each. The paths must be below
``job.dump_folder``, which may be any folder."""

FOLDERS_OF_LIBRARIES = {
    "mlruns": "metrics.enable_mlflow",
    "trackio": "metrics.enable_trackio",
    "wandb": "metrics.enable_wandb",
}
"""Folders below ``job.dump_folder`` in which metrics libraries write, and the option that enables each."""

FILES_OF_A_RUN = (
    "exit.json",
    "goodput.jsonl",
    "metrics.jsonl",
    "samples.jsonl",
    "validation.jsonl",
    RESOLVED_CONFIG,
    json_schema.FILE,
)
"""Files in ``job.dump_folder`` that no option names."""

ALSO_ELSEWHERE = ("checkpoint.folder",)
"""Options that may also be absolute paths, because checkpoints are often on a separate filesystem."""

ONE_NAME = ("comm.save_traces_file_prefix",)
"""Options that are the beginning of a file name."""

_MAX_CHARACTERS = 200


def check_paths(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems with paths outside of ``job.dump_folder`` and with invalid names."""
    fix = "use a relative path without .., and set job.dump_folder to its parent"
    for option in (*BELOW_DUMP_FOLDER, *ONE_NAME):
        value = loaded.value(option)
        # An unset option has no path.
        if value is None:
            continue
        is_absolute = PurePath(value).is_absolute() and ".." not in value
        # An absolute path may be anywhere, but must not contain "..".
        if is_absolute and option in ALSO_ELSEWHERE:
            continue
        rule = _path_rule(value, option in ONE_NAME)
        if rule:
            yield problem(loaded, option, rule, fix)
    folder = loaded.config.job.dump_folder
    if not folder.strip():
        yield problem(
            loaded,
            "job.dump_folder",
            rule="is empty",
            fix="name a folder; . is the one that you are in",
        )
    # The lock and the logs of a run require a filesystem.
    elif "://" in folder:
        yield problem(
            loaded,
            "job.dump_folder",
            rule="must be a folder on a disk, not an address",
            fix="use a folder, and set checkpoint.folder to the address",
        )
    if not folder.isprintable():
        yield problem(
            loaded,
            "job.dump_folder",
            rule="must contain only printable characters",
            fix="remove the others",
        )


def _path_rule(text: str, one_name: bool) -> str | None:
    """Return the rule that a path violates, or None. With ``one_name`` it must be the beginning of a file name."""
    # The same names must be valid on every system that reads the folder.
    path = PurePath(text)
    if not text.isprintable() or "\\" in text:
        return "has a character that no name should have"
    if len(text) > _MAX_CHARACTERS:
        return f"is longer than {_MAX_CHARACTERS} characters"
    if path.is_absolute() or text.startswith("~") or ".." in path.parts:
        return "leads out of job.dump_folder"
    if one_name and "/" in text:
        return "is the beginning of one name, and no path"
    if not one_name and not path.parts:
        return "is not a name of a file or folder"
    return None


def code_of_a_run(loaded: Loaded) -> list[Problem]:
    """Return a problem for each Python file that only the resolved configuration in a run's folder names.

    Anybody may have written the folder, so its files run only if the user names them on the command line too.
    """
    rule = "is code that only the folder of a run names, and opening a folder never runs code"
    problems = []
    for option, value in named_files(loaded.config):
        # A file on the command line is the user's choice.
        if value.endswith(".py") and loaded.origins.get(option) != COMMAND_LINE:
            problems.append(
                Problem(
                    option,
                    value,
                    rule=rule,
                    fix=f"if you trust that file, add --{option} {value}",
                    where=loaded.where(option),
                )
            )
    return problems


def check_secrets(loaded: Loaded) -> Iterator[Problem]:
    """Yield options that contain a secret of the environment, because options are written to files,
    logs and W&B.
    """
    for name in options(type(loaded.config)):
        # Neither the value nor the location may repeat the secret.
        if loaded.is_set(name) and redact_all(loaded.value(name)) != loaded.value(name):
            yield Problem(
                name,
                redact_all(loaded.value(name)),
                rule="holds a secret, and options are written to files and logs",
                fix="take it out: libraries read their tokens from the environment themselves",
                where=redact(loaded.where(name)),
            )
