"""Command lines of verbs that read a configuration: the verb's options, a file, and overrides.

Every such verb uses ``take``. ``split`` parses the command line of ``train`` and of similar verbs that start
ranks. Verbs without a configuration use ``utils.arguments.Arguments`` instead.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardtrain.config.options import sections
from shardtrain.utils.arguments import print_requested_help
from shardtrain.utils.errors import COMMAND_LINE, ConfigError, Problem
from shardtrain.utils.output_target import WrongTargetError
from shardtrain.utils.variables import is_whole_number


@dataclass(frozen=True)
class VerbOption:
    """An option of a verb that has a value.

    Attributes:
        read: Converts text to the value. Raises ValueError with the violated rule.
        example: Value in error messages: ``write it like --nproc 2``.
        is_list: True if the option takes all arguments up to the next option, and may be repeated.
        once: True if repeating the option is an error. Otherwise the last value counts.
    """

    read: Callable[[str], Any] = str
    example: str = "VALUE"
    is_list: bool = False
    once: bool = False


@dataclass(frozen=True)
class Taken:
    """Options of a verb that were given, by name, and the remaining arguments."""

    verb_options: dict[str, Any] = field(default_factory=dict)
    rest: tuple[str, ...] = ()
    help: bool = False

    def places(self, most: int = 1) -> tuple[list[str], tuple[str, ...]]:
        """Split the remaining arguments into at most ``most`` positional ones and the overrides.

        Positional arguments, such as the configuration file, come first, because an override may take several
        values.

        >>> Taken({}, ("run.toml", "--training.steps", "8")).places()
        (['run.toml'], ('--training.steps', '8'))
        """
        count = 0
        while count < min(most, len(self.rest)) and not self.rest[count].startswith("-"):
            count += 1
        return list(self.rest[:count]), self.rest[count:]

    def configuration(self) -> tuple[str | None, tuple[str, ...]]:
        """Return the configuration file and the overrides, the arguments of ``config.load``."""
        files, overrides = self.places()
        return files[0] if files else None, overrides


def take(
    arguments: Sequence[str],
    options: Mapping[str, VerbOption],
    flags: Sequence[str] = (),
    usage: str | None = None,
) -> Taken:
    """Extract a verb's ``options`` (``--nproc 2`` or ``--nproc=2``) and ``flags`` from its arguments.

    Raises:
        ConfigError: an option has no value, an invalid value, or is repeated although it may not be.
        HelpPrinted: the arguments contain --help, and ``usage`` was printed.

    >>> take(["run.toml", "--processes", "4", "--training.seq_len", "8"], {"--processes": VerbOption(int)})
    Taken(verb_options={'--processes': 4}, rest=('run.toml', '--training.seq_len', '8'), help=False)
    """
    own_options: dict[str, Any] = {}
    rest: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if argument in ("--help", "-h"):
            if usage is not None:
                print_requested_help([argument], usage)
            return Taken(help=True)
        name, equals, value = argument.partition("=")
        if argument in flags:
            own_options[argument] = True
            continue
        option = options.get(name)
        if option is None:
            # An argument for the configuration. Reject a likely misspelling of an option of this verb, unless
            # it may be an option of the configuration (with a dot) or one in OWN.
            rest.append(argument)
            if name.startswith("--") and "." not in name and name not in OWN:
                near = difflib.get_close_matches(name, [*options, *flags], 1, 0.8)
                if near and name[2:] not in sections():
                    raise _wrong(name, None, "is not an option", f"did you mean {near[0]}?")
            continue
        if option.once and name in own_options:
            raise _wrong(name, None, "is given twice", "give it once")

        # The value follows "=", or is the next argument, which may begin with one dash like a
        # negative number. A list takes all arguments up to the next option.
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
            fix = f"write it like {name} {option.example}"
            if isinstance(error, WrongTargetError):
                fix = error.fix
            raise _wrong(name, texts[0], str(error), fix) from None
        own_options[name] = [*own_options.get(name, []), *values] if option.is_list else values[0]
    return Taken(own_options, tuple(rest))


def number_of(what: str = "", least: int = 1) -> Callable[[str], int]:
    """Return a parser of integers of at least ``least``, with optional underscores.

    Its error message contains ``what``, the counted things.

    >>> number_of("processes")("1_000")
    1000
    """

    def read(text: str) -> int:
        digits = text.replace("_", "")
        if not is_whole_number(digits) or int(digits) < least:
            of = f" of {what}" if what else ""
            raise ValueError(f"must be a whole number{of}{f' above {least - 1}' if least else ''}")
        return int(digits)

    return read


def _wrong(name: str, value: str | None, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem(name, value, rule, fix, COMMAND_LINE))


@dataclass(frozen=True)
class CommandLine:
    """Parsed arguments after a verb: the configuration file, the options in ``OWN``, and overrides."""

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
"""Options that do not belong to the configuration. The last two name the file in torchtitan's commands."""


def two_files(named: str, path: str) -> Problem:
    """Return the problem of a command with both ``--job.config_file`` and a different positional file."""
    return Problem(
        "job.config_file",
        named,
        rule=f"is a second configuration file, in addition to {path}",
        fix="use one configuration file, followed by options",
        where=COMMAND_LINE,
    )


def with_variable(arguments: CommandLine, environment: Mapping[str, str]) -> CommandLine:
    """Use the file in CONFIG_FILE, which torchtitan's scripts set, if the command line names no file."""
    file = environment.get("CONFIG_FILE")
    is_deepspeed = any(
        argument.partition("=")[0] == "--deepspeed_config" for argument in arguments.overrides
    )
    if not file or arguments.path or is_deepspeed:
        return arguments
    # Print the line once per run: only on rank 0, and not in processes that this command started.
    if environment.get("RANK", "0") == "0" and "SHARDTRAIN_PARENT" not in environment:
        shown = "".join(char if char.isprintable() else "?" for char in file)
        print(f"configuration: {shown} (from CONFIG_FILE)", file=sys.stderr, flush=True)
    return replace(arguments, path=file)


def split(arguments: Sequence[str]) -> CommandLine:
    """Parse the file, the options in ``OWN`` and ``--help``. All other arguments are overrides.

    The file must precede the first override, because an override may take several values.
    ``--job.config_file`` can name the file at any position.

    Raises:
        ConfigError: an option in ``OWN`` has no value or an invalid value, or two files are named.
    """
    taken = take(arguments, OWN)
    path, overrides = taken.configuration()
    own_options = {
        name[2:]: value
        for name, value in taken.verb_options.items()
        if not name.startswith("--job.")
    }
    for name in ("--job.config_file", "--job.config-file"):
        named = taken.verb_options.get(name)
        if named is not None and path not in (None, named):
            raise ConfigError(two_files(named, str(path)))
        path = named or path
    return CommandLine(path, own_options.pop("nproc", None), overrides, taken.help, **own_options)
