"""Options of ``shardtrain evaluate`` and ``shardtrain.evaluate``.

This file does not import torch, so wrong options are reported immediately. Each option is one field.
``EvaluateOptions`` defines the command line, and ``RowOptions`` the Python function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain import config as configs
from shardtrain.config.options import options as all_options
from shardtrain.facts.file_kinds import dataset_of, known_endings
from shardtrain.tools.generate.generate_request import ModelOptions
from shardtrain.utils import output_target
from shardtrain.utils.arguments import StrictArgumentParser, option
from shardtrain.utils.errors import ConfigError, Problem

ABOUT = """Measure a model: its loss on each dataset of --data, or on the run's own [validation] dataset, and tasks of
the lm-eval library. The results are printed as one JSON object."""
_DATA_OPTIONS = (
    "format", "prompt_field", "completion_field", "messages_field", "tools_field", "chat_template",
    "learn_turn_separator", "turn_end", "add_eos", "packing", "long_documents", "bad_rows", "bad_rows_max_fraction",
)  # fmt: skip
"""Options of [data] that the verb accepts in addition to --text_field and --add_bos."""


@dataclass(frozen=True)
class SetOptions(ModelOptions):
    """Command-line options for the datasets.

    Attributes:
        data_options: [data] options that override the run's, by name without "data.".
    """

    data: Mapping[str, Path] = option(
        (), "a dataset and its name; may be repeated", action="append", metavar="NAME=FILE"
    )
    add_bos: bool | None = option(None, "begin texts with bos (as in training)", rare=True)
    data_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, kw_only=True)


@dataclass(frozen=True)
class RowOptions:
    """Options for reading rows, shared by the command line and the Python function."""

    seq_len: int | None = option(
        2048,
        "tokens per sequence in --data (default: training.seq_len of the run, at most 2048)",
        positional=True,
    )
    text_field: str | None = option(
        None,
        "field of the text in --data (data.text_field of the run)",
        rare=True,
        positional=True,
        metavar="NAME",
    )
    batch_size: int = option(8, "rows per batch (8); does not change results", positional=True)


@dataclass(frozen=True)
class EvaluateOptions(RowOptions, SetOptions):
    """The options of ``shardtrain evaluate``."""

    # None means the sequence length of the run's training, limited to a maximum.
    seq_len: int | None = option(
        None,
        "tokens per sequence in --data (default: training.seq_len of the run, at most 2048)",
        positional=True,
    )
    tasks: tuple[str, ...] = option(
        (), "tasks of lm-eval (requires shardtrain[eval])", metavar="A,B"
    )
    include_path: Path | None = option(
        None, "folder of your own task files; their code is run", rare=True
    )
    num_fewshot: int | None = option(
        None, "examples before each question of a task (the task's own)"
    )
    limit: int | None = option(None, "questions per task (all)", rare=True)
    output: Path | None = option(
        None,
        "JSON file for the results, in addition to stdout; must not exist",
        type=output_target.file_argument,
    )
    nproc: int = option(1, "number of processes; each layer is split over them (1)")


def read(arguments: list[str]) -> EvaluateOptions:
    """Parse a command line.

    Raises:
        ConfigError: options are invalid. The error lists all of them.
        HelpPrinted: the command line requests the help.
    """
    values = vars(_parser().read(arguments))
    # Convert the texts of the command line to the types of the fields.
    values["data"], problems = _sets(values["data"])
    task_names = []
    for name in (values["tasks"] or "").split(","):
        if name.strip():
            task_names.append(name.strip())
    values["tasks"] = tuple(task_names)
    values["data_options"] = _take_data_options(values)
    options = EvaluateOptions(**values)
    # Report all problems together.
    problems += _wrong_values(options)
    problems += _unused_options(options)
    if problems:
        raise ConfigError(problems)
    return options


def _take_data_options(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of [data] from the parsed values, and return their checked values."""
    texts = {}
    for name in list(values):
        if name.startswith("data."):
            texts[name] = values.pop(name)
    texts["data.text_field"] = values["text_field"]
    if values["add_bos"] is not None:
        texts["data.add_bos"] = str(values["add_bos"]).lower()
    # Parse the texts like ``train`` does, so they have the same types and the same errors.
    overrides = [f"--{name}={text}" for name, text in texts.items() if text is not None]
    return data_options(configs.load(None, overrides))


def _unused_options(options: EvaluateOptions) -> list[Problem]:
    """Return a problem for each option that has no effect with the others."""
    # An option without effect is an error, because the user expects one.
    problems = []
    for name in ("include_path", "num_fewshot", "limit"):
        value = getattr(options, name)
        if value is not None and not options.tasks:
            problems.append(_problem(f"--{name}", value, "has no effect without --tasks"))
    data_values = options.data_options
    # Prepared tokens already have or lack a first token.
    has_only_prepared = bool(options.data) and all(path.is_dir() for path in options.data.values())
    if "add_bos" in data_values and has_only_prepared and not options.tasks:
        rule = "has no effect on folders of prepared tokens"
        problems.append(_problem("--add_bos", data_values["add_bos"], rule))
    if options.data:
        return problems
    rule = "has no effect without --data"
    if options.seq_len is not None:
        problems.append(_problem("--seq_len", options.seq_len, rule))
    for name in sorted(data_values.keys() - {"add_bos"}):
        problems.append(_problem(f"--data.{name}", data_values[name], rule))
    return problems


def data_options(loaded: configs.Loaded) -> dict[str, Any]:
    """Return the [data] options that are set, by name without "data.".

    Raise ConfigError if other options are set.
    """
    values = {}
    for name in all_options():
        if not loaded.is_set(name):
            continue
        if not name.startswith("data."):
            raise ConfigError(Problem("options", name, "is not an option of [data]", "remove it"))
        values[name.removeprefix("data.")] = loaded.value(name)
    return values


def _parser() -> StrictArgumentParser:
    parser = StrictArgumentParser(
        "shardtrain evaluate",
        ABOUT,
        "shardtrain evaluate outputs --data held_out=FILE.jsonl",
        first="--from",
    )
    parser.usage = "shardtrain evaluate RUN [--data NAME=FILE ...] [--data.KEY VALUE ...] [--tasks A,B] [OPTION ...]"
    rarer = parser.add_fields(EvaluateOptions)
    for name in _DATA_OPTIONS:
        rarer.add_argument(f"--data.{name}", metavar="VALUE", help=f"data.{name}, as for train")
    return parser


def _sets(argv: list[str]) -> tuple[dict[str, Path], list[Problem]]:
    """Return the datasets of ``--data`` by name, and the problems of wrong values."""
    paths: dict[str, Path] = {}
    problems = []
    for argument in argv:
        name, equals, text = argument.partition("=")
        path = Path(text)
        rule = ""
        if not equals or not name or not text:
            rule = "is not NAME=FILE"
            fix = "write it like --data books=books.jsonl"
        elif name in paths:
            rule = "has the name of another dataset"
            fix = "choose another name"
        elif not path.exists():
            rule = "names a file that does not exist"
            fix = "correct the path"
        elif path.is_file() and dataset_of(text) is None:
            rule = "has an ending of no known format"
            fix = f"use a file with one of the endings {known_endings()}"
        if rule:
            problems.append(_problem("--data", argument, rule, fix))
        paths.setdefault(name, path)
    return paths, problems


def _wrong_values(options: EvaluateOptions) -> list[Problem]:
    problems = []
    minimums = {"batch_size": 1, "nproc": 1, "seq_len": 1, "num_fewshot": 0, "limit": 1}
    for name, least in minimums.items():
        value = getattr(options, name)
        if value is not None and value < least:
            rule = f"must be at least {least}"
            problems.append(_problem(f"--{name}", value, rule, "write it like 8"))
    if options.seq_len is not None and options.seq_len % max(options.nproc, 1):
        rule = f"is not a multiple of --nproc={options.nproc}, because sequences are split over the processes"
        problems.append(_problem("--seq_len", options.seq_len, rule, "use a multiple"))
    return problems


def _problem(option: str, value: object, rule: str, fix: str = "remove it") -> Problem:
    return Problem(option, str(value), rule, fix, "command line")
