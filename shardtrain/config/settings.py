"""A setting of the file or the command line, before conversion to its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Value: TypeAlias = Any
"""A value of any TOML type."""
Kind: TypeAlias = Any
"""A type as the schema's annotations write it: ``int``, ``list[str]``, ``int | None``, ``Literal[...]``."""

DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """A dotted option with its value and origin.

    ``value`` is a TOML value from a file. From the command line it is a tuple of strings, and ``is_text`` is
    true.
    """

    option: str
    value: Any
    where: str
    is_text: bool = False

    @property
    def shown(self) -> Value:
        """Value for error messages."""
        if not self.is_text:
            return self.value
        if len(self.value) == 1:
            return self.value[0]
        return list(self.value)
