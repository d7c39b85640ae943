"""Read the command line of ``shardtrain evaluate``. No torch, so that a wrong word is reported at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain import config as configs
from shardtrain.checkpoint.choice import HELP, step_name
from shardtrain.config.options import options
from shardtrain.facts.devices import DEVICE_TYPES
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.facts.file_kinds import dataset_of, known_endings
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.errors import ConfigError, Problem

ABOUT = """Measure a model: the loss of each set of rows that --data names, or of the run's own [validation] set, and
tasks of the lm-eval library. The results are printed as one JSON object."""
_DATA_OPTIONS = (
    "format", "prompt_field", "completion_field", "messages_field", "tools_field", "chat_template",
    "learn_turn_separator", "turn_end", "add_eos", "packing", "long_documents", "bad_rows", "bad_rows_max_fraction",
)  # fmt: skip
"""Options of [data] that --data accepts, next to --text_field and --add_bos."""


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of ``shardtrain evaluate``; see ``read`` for their meaning."""

    source: Path
    step: str | None
    config: Path | None
    tokenizer: str | None
    data: dict[str, Path]
    data_options: dict[str, Any]
    """Options of [data] that replace those of the run, by their names without "data."."""
    seq_len: int | None
    tasks: tuple[str, ...]
    include_path: Path | None
    num_fewshot: int | None
    limit: int | None
    batch_size: int
    output: Path | None
    dtype: str | None
    device: str | None
    nproc: int


def read(words: list[str]) -> EvaluateOptions:
    """Read the words of a command line.

    Raises:
        ConfigError: all problems of the words.
        HelpPrinted: the help was asked for.
    """
    found = _arguments().read(words)
    sets, problems = _sets(found.data)
    tasks = tuple(name.strip() for name in (found.tasks or "").split(",") if name.strip())
    values = vars(found)
    of_data = {name: values.pop(name) for name in list(values) if name.startswith("data.")}
    overrides = [f"--{name}={value}" for name, value in of_data.items() if value is not None]
    given = data_options(configs.load(None, overrides))
    request = EvaluateOptions(**{**values, "data": sets, "tasks": tasks, "data_options": given})
    problems += _wrong_values(request)
    for option in ("include_path", "num_fewshot", "limit"):
        if getattr(request, option) is not None and not tasks:
            problems.append(_problem(f"--{option}", getattr(request, option), "has no effect without --tasks"))
    if "add_bos" in given and sets and not tasks and all(path.is_dir() for path in sets.values()):
        problems.append(_problem("--add_bos", given["add_bos"], "has no effect on folders of prepared tokens"))
    if request.seq_len is not None and not sets:
        problems.append(_problem("--seq_len", request.seq_len, "has no effect without --data"))
    for name in sorted(given.keys() - {"add_bos"}):
        if not sets:
            problems.append(_problem(f"--data.{name}", given[name], "has no effect without --data"))
    if problems:
        raise ConfigError(problems)
    return request


def data_options(loaded: configs.Loaded) -> dict[str, Any]:
    """Return the options of [data] that were given, by their names without "data.". Raises ConfigError for others."""
    names = [name for name in options() if loaded.is_set(name)]
    others = [name for name in names if not name.startswith("data.")]
    if others:
        raise ConfigError(Problem("options", others[0], "is not an option of [data]", "leave it out"))
    return {name.removeprefix("data."): loaded.value(name) for name in names}


def _arguments() -> StrictArgumentParser:
    a = StrictArgumentParser(
        "shardtrain evaluate", ABOUT, "shardtrain evaluate outputs --data held_out=FILE.jsonl", first="--from"
    )
    a.usage = "shardtrain evaluate RUN [--data NAME=FILE ...] [--data.KEY VALUE ...] [--tasks A,B] [OPTION ...]"
    rarer = a.rarer()
    a.add_argument("--from", dest="source", type=Path, required=True, metavar="RUN", help="run, checkpoint or HF_DIR")
    a.add_argument("--step", type=step_name, help=HELP)
    rarer.add_argument("--config", type=Path, help="the run's configuration; found beside the checkpoint unless given")
    rarer.add_argument("--tokenizer", help='of a Hugging Face folder without one: a path, or "bytes"')
    a.add_argument("--data", action="append", default=[], metavar="NAME=FILE", help="a set of rows; may be repeated")
    bos = "begin texts with bos (as in training)"
    rarer.add_argument("--add_bos", dest="data.add_bos", metavar="{true,false}", help=bos)
    field = "field of the text in --data (data.text_field of the run)"
    rarer.add_argument("--text_field", dest="data.text_field", metavar="NAME", help=field)
    for name in _DATA_OPTIONS:
        rarer.add_argument(f"--data.{name}", metavar="VALUE", help=f"data.{name}, as for train")
    a.add_argument("--seq_len", type=int, help="tokens per sequence in --data (the run's, at most 2048)")
    a.add_argument("--tasks", metavar="A,B", help="tasks of lm-eval (the eval extra)")
    rarer.add_argument("--include_path", type=Path, help="folder of your own task files, whose code is run")
    a.add_argument("--num_fewshot", type=int, help="examples before each question of a task (the task's own)")
    rarer.add_argument("--limit", type=int, help="questions per task (all)")
    a.add_argument("--batch_size", type=int, default=8, help="rows at once (8); changes no result")
    a.add_argument("--output", type=Path, help="JSON file to write too, which must not exist")
    rarer.add_argument("--dtype", choices=COMPUTE_DTYPES, help="type to compute in; the run's own")
    rarer.add_argument("--device", choices=DEVICE_TYPES, help="where; the run's own training.device")
    a.add_argument("--nproc", type=int, default=1, help="processes over which each layer is split (1)")
    return a


def _sets(words: list[str]) -> tuple[dict[str, Path], list[Problem]]:
    found: dict[str, Path] = {}
    problems = []
    for word in words:
        name, mark, path = word.partition("=")
        if not mark or not name or not path:
            problems.append(_problem("--data", word, "is not NAME=FILE", "write it like --data books=books.jsonl"))
        elif name in found:
            problems.append(_problem("--data", word, "has a name that another set has", "choose another"))
        elif not Path(path).exists():
            problems.append(_problem("--data", word, "names no file that exists", "correct the path"))
        elif Path(path).is_file() and dataset_of(path) is None:
            fix = f"name a file that ends with {known_endings()}"
            problems.append(_problem("--data", word, "has an ending that no dataset reads", fix))
        found.setdefault(name, Path(path))
    return found, problems


def _wrong_values(r: EvaluateOptions) -> list[Problem]:
    problems = []
    for option, least in (("batch_size", 1), ("nproc", 1), ("seq_len", 1), ("num_fewshot", 0), ("limit", 1)):
        value = getattr(r, option)
        if value is not None and value < least:
            problems.append(
                _problem(f"--{option}", value, f"must be at least {least}", f"write it like {max(least, 8)}")
            )
    if r.seq_len is not None and r.seq_len % max(r.nproc, 1):
        rule = f"is not a multiple of --nproc={r.nproc}, over which sequences are split"
        problems.append(_problem("--seq_len", r.seq_len, rule, "use a multiple"))
    return problems


def _problem(option: str, value: object, rule: str, fix: str = "leave it out") -> Problem:
    return Problem(option, str(value), rule, fix, "command line")
