"""Command lines of ``shardtrain data``: a verb's own options are taken out, and what is left is for the configuration.

The configuration file stands before the first ``--section.key value``, because an override may take several values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardtrain.utils.errors import ConfigError, Problem

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Words:
    """What was found: the verb's own options by name, the configuration file, and overrides for it."""

    own: dict[str, Any] = field(default_factory=dict)
    config_file: str | None = None
    overrides: list[str] = field(default_factory=list)
    help: bool = False


def take(words: Sequence[str], kinds: Mapping[str, Callable[[str], Any]], flags: Sequence[str] = ()) -> Words:
    """Split words; ``kinds`` maps options with a value (``--output``) to what reads it, ``flags`` have none.

    Raises:
        ConfigError: when an option is given twice, has no value, or one that its reader refuses with ValueError.

    >>> take(["run.toml", "--processes", "4", "--training.seq_len", "8"], {"--processes": int}).overrides
    ['--training.seq_len', '8']
    """
    own: dict[str, Any] = {}
    config_file: str | None = None
    overrides: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            return Words(help=True)
        if name not in kinds and name not in flags:
            if config_file is None and not overrides and not word.startswith("-"):
                config_file = word
            else:
                overrides.append(word)
            continue
        if name in own:
            raise _wrong(name, None, "is given twice", "give it once")
        if name in flags:
            own[name] = True
            continue
        if not equals and (not remaining or remaining[0].startswith("--")):
            raise _wrong(name, None, "has no value", f"write {name} VALUE")
        text = value if equals else remaining.pop(0)
        try:
            own[name] = kinds[name](text)
        except ValueError as error:
            raise _wrong(name, text, str(error), f"write it like {name} 4") from None
    return Words(own, config_file, overrides)


def whole_number(text: str) -> int:
    """Read a whole number above 0, with underscores as one likes.

    >>> whole_number("1_000")
    1000
    """
    digits = text.replace("_", "")
    if not (digits.isascii() and digits.isdecimal()) or int(digits) < 1:
        raise ValueError("must be a whole number above 0")
    return int(digits)


def _wrong(name: str, value: str | None, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem(name, value, rule, fix, COMMAND_LINE))
