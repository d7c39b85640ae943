"""One setting: what a line of the file or an argument of the command line says, before it has a type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Value: TypeAlias = Any
"""A value of any TOML type."""
Kind: TypeAlias = Any
"""A type as the schema's annotations write it: ``int``, ``list[str]``, ``int | None``, ``Literal[...]``."""

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """A dotted option, the value given to it, and where.

    From the command line ``value`` is a tuple of texts and ``is_text`` holds; from the file it is a TOML value.
    """

    option: str
    value: Any
    where: str
    is_text: bool = False

    @property
    def shown(self) -> Value:
        """The value as an error message shows it."""
        if not self.is_text:
            return self.value
        return self.value[0] if len(self.value) == 1 else list(self.value)
