"""The command line of a verb that reads a configuration: options of the verb's own, a file, and overrides.

``take`` is for every such verb. ``split`` takes what ``train`` has, and verbs that start ranks like it. A verb that
has options of its own alone reads them with ``utils.arguments.Arguments``.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardtrain.config.options import sections
from shardtrain.config.settings import COMMAND_LINE
from shardtrain.utils.arguments import help_if_asked
from shardtrain.utils.errors import ConfigError, Problem


@dataclass(frozen=True)
class VerbOption:
    """An option of a verb's own that has a value."""

    read: Callable[[str], Any] = str
    """Gives the value of a text, or raises ValueError with the rule that it breaks."""
    example: str = "VALUE"
    """Told with an error: ``write it like --nproc 2``."""
    is_list: bool = False
    """Whether it takes all words up to the next option, and may be given again."""
    once: bool = False
    """Whether a second one is an error; else the last one counts."""


@dataclass(frozen=True)
class Taken:
    """A verb's own options by name (without those that were not given), and the words that are left."""

    own: dict[str, Any] = field(default_factory=dict)
    rest: tuple[str, ...] = ()
    help: bool = False

    def places(self, most: int = 1) -> tuple[list[str], tuple[str, ...]]:
        """Words before the first override, such as the configuration file, and the overrides.

        They come first because an override may take several values.

        >>> Taken({}, ("run.toml", "--training.steps", "8")).places()
        (['run.toml'], ('--training.steps', '8'))
        """
        count = 0
        while count < min(most, len(self.rest)) and not self.rest[count].startswith("-"):
            count += 1
        return list(self.rest[:count]), self.rest[count:]

    def configuration(self) -> tuple[str | None, tuple[str, ...]]:
        """The configuration file and the overrides, as ``config.load`` takes them."""
        files, overrides = self.places()
        return files[0] if files else None, overrides


def take(
    words: Sequence[str], options: Mapping[str, VerbOption], flags: Sequence[str] = (), usage: str | None = None
) -> Taken:
    """Take a verb's own ``options`` (``--nproc 2`` or ``--nproc=2``) and ``flags`` out of its words.

    Raises:
        ConfigError: an option has no value, or one that its reader refuses, or is given twice and may not be.
        HelpPrinted: the help was asked for, and ``usage`` is its text.

    >>> take(["run.toml", "--processes", "4", "--training.seq_len", "8"], {"--processes": VerbOption(int)})
    Taken(own={'--processes': 4}, rest=('run.toml', '--training.seq_len', '8'), help=False)
    """
    own: dict[str, Any] = {}
    rest: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if word in ("--help", "-h"):
            if usage is not None:
                help_if_asked([word], usage)
            return Taken(help=True)
        name, equals, value = word.partition("=")
        if word in flags:
            own[word] = True
            continue
        option = options.get(name)
        if option is None:
            # A word for the configuration. One that is spelt like an option of this verb is refused, if it cannot be
            # another's: options of the configuration have a dot, and OWN are those of ``split``
            rest.append(word)
            if name.startswith("--") and "." not in name and name not in OWN:
                near = difflib.get_close_matches(name, [*options, *flags], 1, 0.8)
                if near and name[2:] not in sections():
                    raise _wrong(name, None, "is not an option", f"did you mean {near[0]}?")
            continue
        if option.once and name in own:
            raise _wrong(name, None, "is given twice", "give it once")

        # Its value is what follows "=", or the next word, which may begin with a dash as a negative number does. A list
        # takes all words up to the next option
        texts = [value] if equals else []
        while not equals and remaining and (option.is_list or not texts):
            if remaining[0].startswith("-" if option.is_list else "--"):
                break
            texts.append(remaining.pop(0))
        if not any(texts):
            raise _wrong(name, None, "has no value", f"write it like {name} {option.example}")
        try:
            values = [option.read(text) for text in texts]
        except ValueError as error:
            raise _wrong(name, texts[0], str(error), f"write it like {name} {option.example}") from None
        own[name] = [*own.get(name, []), *values] if option.is_list else values[0]
    return Taken(own, tuple(rest))


def number_of(what: str = "", least: int = 1) -> Callable[[str], int]:
    """A reader of a whole number, with or without underscores; ``what`` names in the error what is counted.

    >>> number_of("processes")("1_000")
    1000
    """

    def read(text: str) -> int:
        digits = text.replace("_", "")
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 19) or int(digits) < least:
            of = f" of {what}" if what else ""
            raise ValueError(f"must be a whole number{of}{f' above {least - 1}' if least else ''}")
        return int(digits)

    return read


def _wrong(name: str, value: str | None, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem(name, value, rule, fix, COMMAND_LINE))


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


OWN = {
    "--nproc": VerbOption(number_of("processes"), "2"),
    "--max_restarts": VerbOption(number_of("restarts", least=0), "3"),
    "--nnodes": VerbOption(example="2, or 1:4 for an elastic run"),
    "--node_rank": VerbOption(number_of("a node", least=0), "0"),
    "--rdzv_endpoint": VerbOption(example="node1:29500"),
    "--job.config_file": VerbOption(example="FILE"),
    "--job.config-file": VerbOption(example="FILE"),
}
"""Options that are not the configuration's. The last two are how torchtitan's commands name the file."""


def two_files(named: str, path: str) -> Problem:
    """Of a command that names one file by ``--job.config_file`` and another by its place."""
    rule = f"is a second file, beside {path}"
    return Problem("job.config_file", named, rule, "give one configuration file, and options after it", COMMAND_LINE)


def with_variable(arguments: CommandLine, environment: Mapping[str, str]) -> CommandLine:
    """Take the file of CONFIG_FILE where the command line names none, as torchtitan's scripts and images do."""
    file = environment.get("CONFIG_FILE")
    is_deepspeed = any(word.partition("=")[0] == "--deepspeed_config" for word in arguments.overrides)
    if not file or arguments.path or is_deepspeed:
        return arguments
    # One line of the whole run: not of each rank that a launcher starts, nor of a process that we started ourselves
    if environment.get("RANK", "0") == "0" and "SHARDTRAIN_PARENT" not in environment:
        shown = "".join(char if char.isprintable() else "?" for char in file)
        print(f"configuration: {shown} (as CONFIG_FILE says)", file=sys.stderr, flush=True)
    return replace(arguments, path=file)


def split(words: Sequence[str]) -> CommandLine:
    """Take the file, the options of ``OWN`` and ``--help`` out of the words; all others are overrides.

    The file comes before the first override, because an override may take several values; or it is that of
    ``--job.config_file``, anywhere.

    Raises:
        ConfigError: one of shardtrain's options has no value, or a wrong one, or two files are named.
    """
    taken = take(words, OWN)
    path, overrides = taken.configuration()
    own = {name[2:]: value for name, value in taken.own.items() if not name.startswith("--job.")}
    for name in ("--job.config_file", "--job.config-file"):
        named = taken.own.get(name)
        if named is not None and path not in (None, named):
            raise ConfigError(two_files(named, str(path)))
        path = named or path
    return CommandLine(path, own.pop("nproc", None), overrides, taken.help, **own)
