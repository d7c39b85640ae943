"""What ``shardtrain evaluate`` is asked to do, read from its words. No torch: a wrong word is answered at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardtrain.facts.file_kinds import dataset_of, known_endings
from shardtrain.utils.arguments import Arguments, truth
from shardtrain.utils.errors import ConfigError, Problem

ABOUT = """Measure a model: the loss of each set of text that --data names, or of the run's own [validation] set, and
tasks of the lm-eval library. What was found is printed as one JSON object."""


@dataclass(frozen=True)
class Request:
    """The options of ``shardtrain evaluate``; see ``read`` for their meaning."""

    source: Path
    config: Path | None
    tokenizer: str | None
    data: dict[str, Path]
    text_field: str | None
    add_bos: bool | None
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


def read(words: list[str]) -> Request | None:
    """Read the words, or print the help and give None.

    Raises:
        ConfigError: with all that is wrong.
    """
    found = _arguments().read(words)
    if found is None:
        return None
    sets, problems = _sets(found.data)
    tasks = tuple(name.strip() for name in (found.tasks or "").split(",") if name.strip())
    request = Request(**{**vars(found), "data": sets, "tasks": tasks})
    problems += _wrong_values(request)
    for option in ("include_path", "num_fewshot", "limit"):
        if getattr(request, option) is not None and not tasks:
            problems.append(_problem(f"--{option}", getattr(request, option), "has no effect without --tasks"))
    if request.add_bos is not None and sets and not tasks and all(path.is_dir() for path in sets.values()):
        problems.append(_problem("--add_bos", request.add_bos, "has no effect on folders of prepared tokens"))
    for option in ("text_field", "seq_len"):
        if getattr(request, option) is not None and not sets:
            problems.append(_problem(f"--{option}", getattr(request, option), "has no effect without --data"))
    if problems:
        raise ConfigError(problems)
    return request


def _arguments() -> Arguments:
    a = Arguments(
        "shardtrain evaluate", ABOUT, "shardtrain evaluate outputs --data held_out=FILE.jsonl", first="--from"
    )
    a.usage = "shardtrain evaluate RUN [--data NAME=FILE ...] [--tasks A,B] [OPTION ...]"
    rarer = a.rarer()
    a.add_argument("--from", dest="source", type=Path, required=True, metavar="RUN", help="run, checkpoint or HF_DIR")
    rarer.add_argument("--config", type=Path, help="the run's configuration; found beside the checkpoint unless given")
    rarer.add_argument("--tokenizer", help='of a Hugging Face folder without one: a path, or "bytes"')
    a.add_argument("--data", action="append", default=[], metavar="NAME=FILE", help="a set of text; may be repeated")
    rarer.add_argument("--text_field", help="field of the text in --data (data.text_field of the run)")
    rarer.add_argument(
        "--add_bos",
        type=truth,
        metavar="{true,false}",
        help="begin texts with bos (as in training)",
    )
    a.add_argument("--seq_len", type=int, help="tokens per sequence in --data (the run's, at most 2048)")
    a.add_argument("--tasks", metavar="A,B", help="tasks of lm-eval (the eval extra)")
    rarer.add_argument("--include_path", type=Path, help="folder of your own task files, whose code is run")
    a.add_argument("--num_fewshot", type=int, help="examples before each question of a task (the task's own)")
    rarer.add_argument("--limit", type=int, help="questions per task (all)")
    a.add_argument("--batch_size", type=int, default=8, help="rows at once (8); changes no result")
    a.add_argument("--output", type=Path, help="JSON file to write too, which must not exist")
    rarer.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="type to compute in; the run's own")
    rarer.add_argument("--device", choices=("auto", "cpu", "cuda", "xpu"), help="where; the run's own training.device")
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


def _wrong_values(r: Request) -> list[Problem]:
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
