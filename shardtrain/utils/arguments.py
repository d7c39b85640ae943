"""Options that argparse reads, with errors like all others of this package."""

from __future__ import annotations

import argparse
from typing import NoReturn

from shardtrain.utils.errors import ConfigError


def truth(word: str) -> bool:
    """Read "true" or "false", as TOML spells them."""
    if word not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{word!r} is neither true nor false")
    return word == "true"


class Arguments(argparse.ArgumentParser):
    """argparse that raises ConfigError in place of leaving the process; options cannot be shortened."""

    def __init__(self, program: str, description: str) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise the error in one line."""
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help tells the options")

    def read(self, words: list[str]) -> argparse.Namespace | None:
        """Options, or None where the help was asked for and has been printed.

        Raises:
            ConfigError: at an unknown option, a missing or a wrong value.
        """
        if "--help" in words or "-h" in words:
            self.print_help()
            return None
        return self.parse_args(words)
