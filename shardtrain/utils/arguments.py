"""How a verb that has options of its own alone reads its words: argparse, with errors like all others of this package.

Verbs that have a configuration too read theirs with ``config.command_line``.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from shardtrain.utils.errors import ConfigError, HelpPrinted


def help_if_asked(words: Sequence[str], text: str) -> None:
    """Print a help text if the words ask for it, and raise HelpPrinted."""
    if "--help" in words or "-h" in words:
        print(text, end="")
        raise HelpPrinted


def truth(word: str) -> bool:
    """Read "true" or "false", as TOML spells them."""
    if word not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{word!r} is neither true nor false")
    return word == "true"


class Arguments(argparse.ArgumentParser):
    """argparse that raises ConfigError in place of leaving the process; options cannot be shortened.

    ``example`` is a whole command, shown with each error. ``first`` is the option that a first word without one means,
    so that ``generate RUN`` is ``generate --from RUN``.
    """

    def __init__(self, program: str, description: str, example: str = "", first: str = "") -> None:
        super().__init__(
            prog=program, description=description, allow_abbrev=False, epilog=f"example: {example}" if example else None
        )
        self._example = example
        self._first = first

    def rarer(self) -> argparse._ArgumentGroup:
        """The group of options that few commands need, which the help lists last."""
        return self.add_argument_group("options that few need")

    def error(self, message: str) -> NoReturn:
        """Raise the error in one line."""
        # argparse gives a sentence alone: of an unknown option the word is taken out of it, to name the nearest.
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if "unrecognized" in message else ""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = [name for name in known if unknown.startswith("--") and name.startswith(unknown)]
        near = near or difflib.get_close_matches(unknown, known, 1, 0.8)
        if near:
            raise ConfigError(f"{self.prog}: {unknown} is not an option; did you mean {near[0]}?")
        fix = f"write it like: {self._example}" if self._example else f"{self.prog} --help lists the options"
        raise ConfigError(f"{self.prog}: {message}; {fix}")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the options.

        Raises:
            ConfigError: an option is unknown, or a value is missing or wrong.
            HelpPrinted: the help was asked for.
        """
        help_if_asked(words, self.format_help())
        if self._first and words and not words[0].startswith("-") and self._first not in words:
            words = [self._first, *words]
        return self.parse_args(list(words))
