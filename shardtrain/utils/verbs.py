"""Tables of verbs: the help of a command, the selection of a verb, and the error for an unknown verb."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardtrain.utils import garbage_collection
from shardtrain.utils.arguments import HELP_WORDS
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat

BEYOND_THE_CORE = ("shardtrain.tools", "shardtrain.compat", "shardtrain.launch.platforms")
"""Parts of the package that a core installation does not contain."""


def import_part(name: str) -> Any:
    """Import a module by name.

    Raises:
        ConfigError: the module belongs to a part of the package that is not installed.
    """
    try:
        with garbage_collection.importing(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Any other missing module is a fault of the installation, and its own message is better.
        if error.name not in BEYOND_THE_CORE:
            raise
        fix = "install the complete package: pip install shardtrain"
        raise ConfigError(
            f"this command needs {error.name}, which is not installed; {fix}"
        ) from error


@dataclass(frozen=True)
class CommandVerb:
    """One verb of a command.

    Attributes:
        target: "module" or "module:function", relative to ``shardtrain``, imported when the verb runs; or a
            function. Without ":", the function is ``main``. It receives the arguments after the verb and
            returns the exit status.
        rows: usage and description of each line of the help. A description may have several lines.
        needs_torch: the verb imports torch when it runs. No verb does for ``--help``.
        is_long: print a progress line every few seconds, because the verb reads or writes entire models.
        has_help: the target prints its own page for ``--help``; otherwise the command's page is printed.
    """

    target: str | Callable[[list[str]], int]
    rows: tuple[tuple[str, str], ...] = ()
    needs_torch: bool = False
    is_long: bool = False
    has_help: bool = True

    def __call__(self, arguments: list[str]) -> int:
        """Run the verb and return its exit status."""
        # A function needs no import.
        if callable(self.target):
            return self.target(arguments)
        module, _, function = self.target.partition(":")
        return int(getattr(import_part(f"shardtrain.{module}"), function or "main")(arguments))


@dataclass(frozen=True)
class Command:
    """A command with verbs.

    Attributes:
        column: the column of the help in which descriptions begin.
        notes: text below the verbs.
        other_names: names of a verb in other programs, and its name here.
        example: an example of the command, shown if it has no verb.
    """

    program: str
    verbs: Mapping[str, CommandVerb]
    column: int
    notes: str = ""
    other_names: Mapping[str, str] = field(default_factory=dict)
    example: str = ""

    @property
    def names(self) -> list[str]:
        """Names of the verbs, except those that begin with a hyphen."""
        return [name for name in self.verbs if not name.startswith("-")]

    def usage(self) -> str:
        """Return the page that ``--help`` prints."""
        lines = [f"usage: {self.program} VERB ...", ""]
        for verb in self.verbs.values():
            for usage, description in verb.rows:
                first, *others = description.split("\n")
                head = f"  {usage}"
                # A long usage has its own line, and the description starts below it.
                if len(head) < self.column:
                    lines.append(f"{head:<{self.column}}{first}")
                else:
                    lines += [head, " " * self.column + first]
                lines += [" " * self.column + line for line in others]
        return "\n".join([*lines, "", self.notes])

    def run(self, arguments: Sequence[str]) -> int:
        """Run the verb that ``arguments`` begin with, or print the help. Return the exit status.

        Raises:
            ConfigError: the verb is missing or unknown. The message suggests a similar one.
        """
        name, rest = self.choose(arguments)
        verb = self.verbs.get(name)
        # Without a verb, the argument was a help option.
        if verb is None or (not verb.has_help and {"--help", "-h"} & {*rest}):
            print(self.usage(), end="")
            return 0
        if not verb.is_long:
            return verb(rest)
        # Verbs that take long print a line every few seconds.
        with heartbeat(f"{self.program} {name}"):
            return verb(rest)

    def choose(self, arguments: Sequence[str]) -> tuple[str, list[str]]:
        """Split the verb or help option from the arguments after it. Raises ConfigError like ``run``."""
        if not arguments:
            fix = f"use one of {', '.join(self.names)}; {self.program} --help describes each"
            if self.example:
                fix = fix.replace(";", f", as in {self.example};")
            raise ConfigError(Problem(self.program, None, "needs a verb", fix, "command line"))
        name, *rest = arguments
        if name not in self.verbs and name not in HELP_WORDS:
            # A name in another program is a better suggestion than a similar spelling.
            near = difflib.get_close_matches(name, self.names, 1)
            near = [self.other_names[name]] if name in self.other_names else near
            fix = f"verbs are {', '.join(self.names)}"
            if near:
                fix = f"did you mean {near[0]}?"
            elif name.startswith("-") and self.example:
                fix = f"the verb comes first, as in {self.example}"
            raise ConfigError(Problem(self.program, name, "is not a verb", fix, "command line"))
        return name, rest
