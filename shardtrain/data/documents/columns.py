"""Columns of a row: reached by name or by a dotted path, and refused with a reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardtrain.utils.log import logger

_MOST_NAMES = 12
_LONGEST_NAME = 40


class Unusable(Exception):
    """A row gives no document; the text of the exception is the reason, and ``harmless`` is that of a ``BadRow``."""

    def __init__(self, reason: str, harmless: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.harmless = harmless


UNUSED_COLUMNS = {
    **dict.fromkeys(("image", "images"), "TRL reads images from it"),
    **dict.fromkeys(
        ("ref_chosen_logps", "ref_rejected_logps", "reference_logps"),
        "TRL reads log-probabilities of the reference from it, which are computed here",
    ),
    **dict.fromkeys(("completion_mask", "assistant_masks"), "TRL reads from it which tokens are learned"),
}
"""Columns of a row that other trainers read and that are not used here."""
UNUSED_KEYS = {
    "weight": "OpenAI leaves turns of weight 0 out of the loss",
    "train": "Axolotl leaves turns out of the loss by it",
}
"""The same for keys of a message."""
_SAYS_NOTHING: tuple[Any, ...] = (None, [], "", 1)
_MISSING = object()


class UnusedNames:
    """Warns once of each name in rows or messages that other trainers give a meaning, and that is not used here."""

    def __init__(self, what: str, meanings: Mapping[str, str]) -> None:
        self._what = what
        self._meanings = dict(meanings)

    def warn(self, objects: Iterable[Any]) -> None:
        """Look for the names in rows or messages. Values that change nothing, such as null, do not count."""
        for one in objects:
            for name in self._meanings.keys() & one.keys() if isinstance(one, Mapping) else ():
                if one[name] not in _SAYS_NOTHING:
                    logger.warning(f"{self._what} {name!r} is not used: {self._meanings.pop(name)}")


def find(row: Mapping[str, Any], path: str) -> Any:
    """Value of a column, or None where the row has no such column or null in it.

    A column whose name has dots in it is found before the object that a dotted path reaches into.
    """
    value = _reach(row, path)
    return None if value is _MISSING else value


def column(row: Mapping[str, Any], path: str) -> Any:
    """Value of a column.

    Raises:
        Unusable: when the row has no such column; the reason names those that it has.
    """
    value = _reach(row, path)
    if value is _MISSING:
        raise Unusable(f"has no column {path!r}; its columns are {_names(row)}")
    return value


def text(row: Mapping[str, Any], path: str) -> str:
    """Text of a column; an empty one is a text too.

    Raises:
        Unusable: when there is none, or no text that UTF-8 can hold.
    """
    value = column(row, path)
    if type(value) is str:
        return check_text(value, f"column {path!r}")
    raise Unusable(f"column {path!r} holds {kind(value)}, not a text")


def label(row: Mapping[str, Any], path: str) -> Any:
    """Label in a column. Floats without a fraction become ints: integer columns that hold nulls arrive as floats.

    Raises:
        Unusable: when the row has no such column.
    """
    value = column(row, path)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_text(value: str, what: str) -> str:
    """Give back a text that UTF-8 can hold.

    Raises:
        Unusable: when it has half of a surrogate pair, as broken JSON escapes leave behind.
    """
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Unusable(f"{what} has a lone surrogate, which is not a character") from None
    return value


def kind(value: Any) -> str:
    """What a value is, in words of JSON: "a list", "null"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth value"
    words = ((str, "a text"), (int | float, "a number"), (list | tuple, "a list"), (Mapping, "an object"))
    return next((word for types, word in words if isinstance(value, types)), f"a {type(value).__name__}")


def _reach(row: Mapping[str, Any], path: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _names(row: Mapping[str, Any]) -> str:
    names = [str(name)[:_LONGEST_NAME] for name in row]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more if names else "none"
