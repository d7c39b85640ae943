"""Read columns of a row by name or by a dotted path. If a row cannot be used, report the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardtrain.utils.log import logger

MAX_NAMES = 12
_MAX_NAME_LENGTH = 40


class Unusable(Exception):
    """A row cannot be converted to a document. The text is the reason. ``harmless``: see ``BadRow``."""

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
    **dict.fromkeys(
        ("completion_mask", "assistant_masks"), "TRL reads from it which tokens are learned"
    ),
}
"""Columns that this package ignores, and how other trainers use them."""
UNUSED_KEYS = {
    "weight": "OpenAI excludes turns with weight 0 from the loss",
    "train": "Axolotl uses it to exclude turns from the loss",
}
"""Keys of messages that this package ignores, and how other trainers use them."""
_NO_EFFECT: tuple[Any, ...] = (None, [], "", 1)
_MISSING = object()


class UnusedNames:
    """Warns once about each column or key that other trainers use, but this package ignores."""

    def __init__(self, what: str, meanings: Mapping[str, str]) -> None:
        self._what = what
        self._meanings = dict(meanings)

    def warn(self, objects: Iterable[Any]) -> None:
        """Warn once about each name that is ignored, unless its value is empty, such as null."""
        for item in objects:
            if not isinstance(item, Mapping):
                continue
            # Remove each name that was reported, so it is reported only once.
            for name in self._meanings.keys() & item.keys():
                if item[name] not in _NO_EFFECT:
                    meaning = self._meanings.pop(name)
                    logger.warning(f"{self._what} {name!r} is not used: {meaning}")


def find(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column. None if the row has no such column, or if its value is null.

    If a column's name contains dots, it takes precedence over a path into an object.
    """
    value = _reach(row, path)
    if value is _MISSING:
        return None
    return value


def column(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column.

    Raises:
        Unusable: the row has no such column. The reason lists its columns.
    """
    value = _reach(row, path)
    if value is _MISSING:
        raise Unusable(f"has no column {path!r}; its columns are {_names(row)}")
    return value


def text(row: Mapping[str, Any], path: str) -> str:
    """Return the text of a column, which may be empty.

    Raises:
        Unusable: the value is missing, is not a text, or cannot be encoded in UTF-8.
    """
    value = column(row, path)
    if type(value) is str:
        return check_text(value, f"column {path!r}")
    raise Unusable(f"column {path!r} holds {kind(value)}, not a text")


def label(row: Mapping[str, Any], path: str) -> Any:
    """Return the label in a column.

    Floats without a fraction become ints, because integer columns that contain nulls are read as floats.

    Raises:
        Unusable: the row has no such column.
    """
    value = column(row, path)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def check_text(value: str, what: str) -> str:
    """Return a text unchanged if it can be encoded in UTF-8.

    Raises:
        Unusable: the text contains half of a surrogate pair, for example from a broken JSON escape.
    """
    # Most texts are ASCII, for which the test is much faster than encoding.
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Unusable(f"{what} has a lone surrogate, which is not a character") from None
    return value


def kind(value: Any) -> str:
    """Return the JSON type of a value as a phrase, such as "a list" or "null"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth value"
    kinds = (
        (str, "a text"),
        (int | float, "a number"),
        (list | tuple, "a list"),
        (Mapping, "an object"),
    )
    for types, name in kinds:
        if isinstance(value, types):
            return name
    return f"a {type(value).__name__}"


def _reach(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path, or _MISSING."""
    if path in row:
        return row[path]
    # Follow the path into nested objects.
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _names(row: Mapping[str, Any]) -> str:
    """List at most 12 columns of a row."""
    if not row:
        return "none"
    # A row of untrusted data may have names of any length, and the message must stay readable.
    names = [str(name)[:_MAX_NAME_LENGTH] for name in row]
    text = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        text += f" and {len(names) - MAX_NAMES} more"
    return text
