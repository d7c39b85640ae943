"""Options of ``shardtrain generate`` and ``shardtrain.generate``.

This file does not import torch, so wrong options are reported immediately. Each option is one field.
``GenerateOptions`` defines the command line, and ``TextOptions`` the Python function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtrain.checkpoint.choice import EMA_HELP, HELP, step_name
from shardtrain.facts.devices import DEVICE_TYPES
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.utils import output_target
from shardtrain.utils.arguments import StrictArgumentParser, option
from shardtrain.utils.errors import ConfigError, Problem

ABOUT = """Continue a prompt, or each row of a JSONL file, with a trained model. For one prompt, tokens are printed when
they are generated. For a file, the output has all fields of each row and the prediction; it is written at the end."""


@dataclass(frozen=True)
class ModelOptions:
    """Options for the model and its devices, shared by several verbs."""

    source: Path = option(..., "run folder, checkpoint, or HF_DIR", flag="--from", metavar="RUN")
    step: str | None = option(None, HELP, type=step_name)
    use_ema: bool = option(False, EMA_HELP, rare=True)
    config: Path | None = option(
        None, "the run's configuration (found near the checkpoint)", rare=True
    )
    tokenizer: str | None = option(
        None,
        'for a Hugging Face folder without tokenizer: a path, or "bytes"',
        rare=True,
    )
    dtype: str | None = option(
        None,
        "dtype of the computation (the run's)",
        rare=True,
        choices=COMPUTE_DTYPES,
    )
    device: str | None = option(
        None, "device (the run's training.device)", rare=True, choices=DEVICE_TYPES
    )
    nproc: int = option(1, "number of processes; each layer is split over them (1)", rare=True)


@dataclass(frozen=True)
class PromptOptions(ModelOptions):
    """Command-line options for prompts and the output file."""

    base: Path | None = option(
        None, "frozen weights of a run with adapters, if they were moved", rare=True
    )
    adapter: Path | None = option(
        None, "PEFT folder whose adapters are added to the model", rare=True
    )
    prompt: str | None = option(None, "a text to continue")
    image: Sequence[str] = option(
        (), "an image of --prompt; may be repeated", action="append", metavar="FILE", rare=True
    )
    input: Path | None = option(None, "JSONL file of prompts")
    output: Path | None = option(
        None,
        "JSONL file to write, which must not exist",
        type=output_target.file_argument,
    )
    field: str = option(
        "prompt", "field of the prompt (prompt); a.b is field b of the object a", rare=True
    )
    prediction_field: str = option("prediction", "name of the added field (prediction)", rare=True)
    add_bos: bool | None = option(None, "begin texts with bos (as in training)", rare=True)


@dataclass(frozen=True)
class TextOptions:
    """Options for generation, shared by the command line and the Python function."""

    chat: bool = option(False, "render the prompt, a text or messages, with the chat template")
    max_new_tokens: int = option(
        128, "at most this many new tokens per prompt (128)", positional=True
    )
    temperature: float = option(0.0, "0 chooses the most likely token, above 0 samples (0)")
    top_k: int = option(
        0, "sample from this number of the most likely tokens; 0 for all (0)", rare=True
    )
    top_p: float = option(1.0, "sample from the most likely tokens with this total probability (1)")
    repetition_penalty: float = option(
        1.0, "above 1 makes earlier tokens less likely (1)", rare=True
    )
    stop: str | Sequence[str] = option(
        (),
        "end before this text; may be repeated",
        action="append",
        metavar="TEXT",
    )
    seed: int = option(0, "seed of sampling (0)", rare=True)
    batch_size: int = option(8, "rows per batch (8); does not change results", rare=True)
    no_cache: bool = option(False, "recompute keys and values for each new token", rare=True)

    @property
    def stops(self) -> list[str]:
        """Stop texts as a list. A plain str is one text."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


@dataclass(frozen=True)
class GenerateOptions(TextOptions, PromptOptions):
    """The options of ``shardtrain generate``."""


def read(arguments: list[str]) -> GenerateOptions:
    """Parse a command line.

    Raises:
        ConfigError: options are invalid. The error lists all of them.
        HelpPrinted: the command line requests the help.
    """
    parser = StrictArgumentParser(
        "shardtrain generate", ABOUT, 'shardtrain generate outputs --prompt "def "', first="--from"
    )
    parser.usage = "shardtrain generate RUN (--prompt TEXT | --input FILE.jsonl --output FILE.jsonl) [OPTION ...]"
    parser.add_fields(GenerateOptions)
    options = GenerateOptions(**vars(parser.read(arguments)))
    problems = [*_prompt_problems(options), *_text_problems(options)]
    if problems:
        raise ConfigError(problems)
    return options


def check(options: TextOptions) -> None:
    """Raise ConfigError with all problems of the Python function's options."""
    problems = list(_text_problems(options))
    if problems:
        raise ConfigError(problems)


def _prompt_problems(o: GenerateOptions) -> Iterator[Problem]:
    # Exactly one source of prompts. A file of prompts needs a file for the predictions.
    if (o.prompt is None) == (o.input is None):
        yield _problem("--prompt", None, "or --input must be set, but not both", "use one of them")
    elif o.input is not None and o.output is None:
        yield _problem(
            "--input",
            str(o.input),
            "requires a file for the predictions",
            "add --output out.jsonl",
        )
    elif o.prompt is not None and o.output is not None:
        yield _problem(
            "--output",
            str(o.output),
            "has no effect with --prompt, whose continuation is printed",
            "remove it",
        )
    yield from _image_problems(o)
    if o.chat and o.add_bos is not None:
        rule = "has no effect with --chat, because the chat template writes the entire prompt"
        yield _problem("--add_bos", o.add_bos, rule, "remove it")
    if o.nproc < 1:
        yield _problem("--nproc", o.nproc, "must be at least 1", "write it like 2")
    if not o.field:
        yield _problem("--field", o.field, "must be a name", "name the field of the prompt")
    if not o.prediction_field:
        yield _problem(
            "--prediction_field", o.prediction_field, "must be a name", "name a new field"
        )


def _image_problems(o: GenerateOptions) -> Iterator[Problem]:
    if o.image and o.prompt is None:
        yield _problem("--image", ", ".join(o.image), "requires --prompt", "use --prompt")
    if o.image and o.nproc > 1:
        rule = "is not supported with --image: one process computes the model"
        yield _problem("--nproc", o.nproc, rule, "remove it")
    for path in o.image:
        if "://" in path or path.startswith("data:"):
            rule = "is a URL, and images are never downloaded"
            yield _problem("--image", path, rule, "download it and name its file")
        elif not Path(path).is_file():
            yield _problem("--image", path, "is not a file", "name the file of an image")


_ABOVE_0 = math.ulp(0.0)
_BELOW_MILLION = math.nextafter(1e6, 0)
_BOUNDS: tuple[tuple[str, float, float, str, str], ...] = (
    ("max_new_tokens", 1, math.inf, "must be at least 1", "write it like 128"),
    ("temperature", 0, _BELOW_MILLION, "must be 0 or above", "use 0, or about 0.7 to 1"),
    ("top_k", 0, math.inf, "must be 0 or above", "use 0 for all tokens"),
    ("top_p", _ABOVE_0, 1, "must be above 0, up to 1", "use 1 for all tokens"),
    ("repetition_penalty", _ABOVE_0, _BELOW_MILLION, "must be above 0", "use about 1 to 1.3"),
    ("seed", 0, math.inf, "must be 0 or above", "use a whole number"),
    ("batch_size", 1, math.inf, "must be at least 1", "write it like 8"),
)
"""Option, minimum, maximum, rule and fix."""


def _text_problems(o: TextOptions) -> Iterator[Problem]:
    # Report one option of sampling, because one change corrects all of them.
    defaults = {"top_k": 0, "top_p": 1, "seed": 0}
    for name, default in defaults.items():
        value = getattr(o, name)
        if value != default and o.temperature == 0:
            rule = "has no effect at --temperature 0, which does not sample"
            yield _problem(f"--{name}", value, rule, "set a temperature above 0")
            break
    for name, least, most, rule, fix in _BOUNDS:
        value = getattr(o, name)
        if not least <= value <= most:  # also true of NaN
            yield _problem(f"--{name}", value, rule, fix)
    if not all(o.stops):
        yield _problem("--stop", o.stop, "must be a text", "remove it")


def _problem(option: str, value: object, rule: str, fix: str) -> Problem:
    return Problem(option, value, rule, fix, "command line")
