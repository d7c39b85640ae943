"""What ``shardtrain generate`` is asked to do, read from its words. No torch: a wrong word is answered at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardtrain.checkpoint.choice import HELP, step_name
from shardtrain.facts.devices import DEVICE_TYPES
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.utils.arguments import StrictArgumentParser, truth
from shardtrain.utils.errors import ConfigError, Problem

ABOUT = """Continue a prompt, or each row of a JSONL file, with a trained model. One prompt is printed as it comes;
of a file every field is kept and the prediction added, and the output is there when all of it is."""


@dataclass(frozen=True)
class GenerateOptions:
    """The options of ``shardtrain generate``; see ``read`` for their meaning."""

    source: Path
    step: str | None
    config: Path | None
    base: Path | None
    adapter: Path | None
    tokenizer: str | None
    prompt: str | None
    input: Path | None
    output: Path | None
    field: str
    prediction_field: str
    chat: bool
    add_bos: bool | None
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    stop: tuple[str, ...]
    seed: int
    batch_size: int
    dtype: str | None
    device: str | None
    nproc: int
    no_cache: bool


def read(words: list[str]) -> GenerateOptions:
    """Read the words of a command line.

    Raises:
        ConfigError: all problems of the words.
        HelpPrinted: the help was asked for.
    """
    found = _arguments().read(words)
    values = {**vars(found), "stop": tuple(found.stop)}
    request = GenerateOptions(**values)
    check(request)
    return request


def check(request: GenerateOptions, has_source: bool = True) -> None:
    """Raise ConfigError with all that is wrong; without ``has_source`` the prompts come from elsewhere."""
    rules = [rule for rule in _RULES if has_source or rule is not _one_source]
    if problems := [problem for rule in rules if (problem := rule(request))]:
        raise ConfigError(problems)


def _arguments() -> StrictArgumentParser:
    a = StrictArgumentParser(
        "shardtrain generate", ABOUT, 'shardtrain generate outputs --prompt "def "', first="--from"
    )
    a.usage = "shardtrain generate RUN (--prompt TEXT | --input FILE.jsonl --output FILE.jsonl) [OPTION ...]"
    rarer = a.rarer()
    a.add_argument(
        "--from", dest="source", type=Path, required=True, metavar="RUN", help="run folder, checkpoint, or HF_DIR"
    )
    a.add_argument("--step", type=step_name, help=HELP)
    rarer.add_argument("--config", type=Path, help="the run's configuration; found beside the checkpoint unless given")
    rarer.add_argument("--base", type=Path, help="frozen weights of a run with adapters, if they have moved")
    rarer.add_argument("--adapter", type=Path, help="PEFT folder whose adapters are added to the model")
    rarer.add_argument("--tokenizer", help='of a Hugging Face folder without one: a path, or "bytes"')
    a.add_argument("--prompt", help="a text to continue")
    a.add_argument("--input", type=Path, help="JSONL file of prompts")
    a.add_argument("--output", type=Path, help="JSONL file to write, which must not exist")
    rarer.add_argument("--field", default="prompt", help="field of the prompt (prompt); dots reach into objects")
    rarer.add_argument("--prediction_field", default="prediction", help="field that is added (prediction)")
    a.add_argument("--chat", action="store_true", help="render the prompt, a text or messages, with the chat template")
    rarer.add_argument(
        "--add_bos",
        type=truth,
        metavar="{true,false}",
        help="begin texts with bos (as in training)",
    )
    a.add_argument("--max_new_tokens", type=int, default=128, help="at most this many new tokens per prompt (128)")
    a.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token; above 0: sampled (0)")
    rarer.add_argument("--top_k", type=int, default=0, help="sample from so many of the most likely; 0: all (0)")
    a.add_argument(
        "--top_p", type=float, default=1.0, help="sample from the most likely, of this total probability (1)"
    )
    rarer.add_argument("--repetition_penalty", type=float, default=1.0, help="above 1: avoid tokens of before (1)")
    a.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    rarer.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")
    rarer.add_argument("--batch_size", type=int, default=8, help="rows at once (8); changes no result")
    rarer.add_argument("--dtype", choices=COMPUTE_DTYPES, help="type to compute in; the run's own")
    rarer.add_argument("--device", choices=DEVICE_TYPES, help="where; the run's own training.device")
    rarer.add_argument("--nproc", type=int, default=1, help="processes over which each layer is split (1)")
    rarer.add_argument("--no_cache", action="store_true", help="compute keys and values again for each new token")
    return a


def _one_source(r: GenerateOptions) -> Problem | None:
    if (r.prompt is None) == (r.input is None):
        return _problem("--prompt", None, "or --input is needed, and not both", "give one of them")
    if r.input is not None and r.output is None:
        return _problem("--input", str(r.input), "needs a file for its predictions", "give --output out.jsonl")
    if r.prompt is not None and r.output is not None:
        return _problem("--output", str(r.output), "has no effect with --prompt, which is printed", "leave it out")
    return None


def _bos_of_a_chat(r: GenerateOptions) -> Problem | None:
    if r.chat and r.add_bos is not None:
        rule = "has no effect with --chat: a conversation is what the chat template writes"
        return _problem("--add_bos", r.add_bos, rule, "leave it out")
    return None


def _drawing(r: GenerateOptions) -> Problem | None:
    for option, is_set in (("--top_k", r.top_k != 0), ("--top_p", r.top_p != 1), ("--seed", r.seed != 0)):
        if is_set and r.temperature == 0:
            value = getattr(r, option[2:])
            return _problem(option, value, "has no effect at --temperature 0, where nothing is drawn", "set it above 0")
    return None


def _bound(
    option: str, is_good: Callable[[GenerateOptions], bool], rule: str, fix: str
) -> Callable[[GenerateOptions], Problem | None]:
    def check(r: GenerateOptions) -> Problem | None:
        return None if is_good(r) else _problem(option, getattr(r, option[2:]), rule, fix)

    return check


def _problem(option: str, value: object, rule: str, fix: str) -> Problem:
    return Problem(option, value, rule, fix, "command line")


_RULES: tuple[Callable[[GenerateOptions], Problem | None], ...] = (
    _one_source,
    _bos_of_a_chat,
    _drawing,
    _bound("--max_new_tokens", lambda r: r.max_new_tokens >= 1, "must be at least 1", "write it like 128"),
    _bound("--temperature", lambda r: 0 <= r.temperature < 1e6, "must be 0 or above", "use 0, or about 0.7 to 1"),
    _bound("--top_k", lambda r: r.top_k >= 0, "must be 0 or above", "use 0 for all tokens"),
    _bound("--top_p", lambda r: 0 < r.top_p <= 1, "must be above 0, up to 1", "use 1 for all tokens"),
    _bound("--repetition_penalty", lambda r: 0 < r.repetition_penalty < 1e6, "must be above 0", "use about 1 to 1.3"),
    _bound("--seed", lambda r: r.seed >= 0, "must be 0 or above", "use a whole number"),
    _bound("--batch_size", lambda r: r.batch_size >= 1, "must be at least 1", "write it like 8"),
    _bound("--nproc", lambda r: r.nproc >= 1, "must be at least 1", "write it like 2"),
    _bound("--stop", lambda r: all(r.stop), "must be a text", "leave it out"),
    _bound("--field", lambda r: bool(r.field), "must be a name", "name the field of the prompt"),
    _bound("--prediction_field", lambda r: bool(r.prediction_field), "must be a name", "name a new field"),
)
