"""Parse the command line of verbs that read no configuration: argparse, with this package's one-line errors.

Verbs that also accept configuration options use ``config.command_line``.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from shardtrain.utils.errors import ConfigError, HelpPrinted
from shardtrain.utils.redact import shown

HELP_WORDS = ("help", "--help", "-h")


def print_requested_help(arguments: Sequence[str], text: str) -> None:
    """Print ``text`` and raise HelpPrinted if the arguments contain ``--help`` or ``-h``."""
    if "--help" in arguments or "-h" in arguments:
        print(text, end="")
        raise HelpPrinted


def truth(text: str) -> bool:
    """Parse "true" or "false" as in TOML, or "True" or "False" as configuration options also accept them."""
    if text not in ("true", "false", "True", "False"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"


def option(
    default: Any,
    help: str,
    *,
    rare: bool = False,
    positional: bool = False,
    **argparse_options: Any,
) -> Any:
    """Declare a field of a dataclass that ``StrictArgumentParser.add_fields`` turns into an option ``--name``.

    Args:
        default: the value if the option is absent; ``...`` if the option is required.
        help: one line for ``--help``.
        rare: list the option last in the help.
        positional: let the dataclass's constructor accept the field as a positional argument.
        argparse_options: passed to ``add_argument``, such as ``metavar``; ``flag`` replaces the name of
            the option.
    """
    # ``add_fields`` reads these facts from the field.
    metadata = {"help": help, "rare": rare, "argparse": argparse_options}
    kw_only = not positional
    if default is ...:
        return dataclasses.field(kw_only=kw_only, metadata=metadata)
    return dataclasses.field(default=default, kw_only=kw_only, metadata=metadata)


def _argument_type(hint: Any) -> dict[str, Any]:
    """Return how argparse reads a field, from its annotation.

    >>> _argument_type(int | None), _argument_type(bool)
    ({'type': <class 'int'>}, {'action': 'store_true'})
    """
    # A boolean is a switch. An optional boolean needs a value, to distinguish unset from false.
    if hint is bool:
        return {"action": "store_true"}
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if bool in kinds:
        return {"type": truth, "metavar": "{true,false}"}
    for kind in (int, float, Path):
        if kind in kinds:
            return {"type": kind}
    return {}


class StrictArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of exiting and accepts no abbreviated options.

    ``example`` is a complete command, shown with each error. ``first`` is the option of a leading
    positional argument: with ``first="--from"``, ``generate RUN`` means ``generate --from RUN``.
    """

    def __init__(self, program: str, description: str, example: str = "", first: str = "") -> None:
        super().__init__(
            prog=program,
            description=description,
            allow_abbrev=False,
            epilog=f"example: {example}" if example else None,
        )
        self._example = example
        self._first = first

    def rarer(self) -> argparse._ArgumentGroup:
        """Add the group of rarely needed options, which the help lists last."""
        return self.add_argument_group("options that few need")

    def add_fields(self, options: type) -> argparse._ArgumentGroup:
        """Add an option for each field of a dataclass declared with ``option``; return the group of rare options."""
        hints = typing.get_type_hints(options)
        rarer = self.rarer()
        for field in dataclasses.fields(options):
            # Other fields are set by the program.
            if "argparse" not in field.metadata:
                continue
            keywords = {**_argument_type(hints[field.name]), **field.metadata["argparse"]}
            flag = keywords.pop("flag", f"--{field.name}")
            is_required = field.default is dataclasses.MISSING
            default = None if is_required else field.default
            group = rarer if field.metadata["rare"] else self
            group.add_argument(
                flag,
                dest=field.name,
                required=is_required,
                default=list(default) if isinstance(default, tuple) else default,
                help=field.metadata["help"],
                **keywords,
            )
        return rarer

    def error(self, message: str) -> NoReturn:
        """Raise the error in one line."""
        # argparse passes only a sentence: extract the unknown option from it to suggest the nearest one.
        # Do not print the option's value or the words after it: they may be secrets.
        unknown = ""
        if message.startswith("unrecognized arguments: "):
            unknown = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
            message = f"{shown('', unknown)} is not an option"
        known = [name for name in self._option_string_actions if name.startswith("--")]
        # A longer name that starts with the option is the most likely one.
        near = [name for name in known if unknown.startswith("--") and name.startswith(unknown)]
        near = near or difflib.get_close_matches(unknown, known, 1, 0.8)
        if near:
            raise ConfigError(f"{self.prog}: {unknown} is not an option; did you mean {near[0]}?")
        fix = (
            f"write it like: {self._example}"
            if self._example
            else f"{self.prog} --help lists the options"
        )
        raise ConfigError(f"{self.prog}: {message}; {fix}")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments.

        Raises:
            ConfigError: an option is unknown, or a value is missing or wrong.
            HelpPrinted: the arguments contain ``--help``, and the help has been printed.
        """
        # Print help before anything else is checked.
        print_requested_help(arguments, self.format_help())
        # The first argument may be a value without its option.
        if (
            self._first
            and arguments
            and not arguments[0].startswith("-")
            and self._first not in arguments
        ):
            arguments = [self._first, *arguments]
        return self.parse_args(list(arguments))
