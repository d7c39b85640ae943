"""Convert TOML values and command-line text to the types of the schema."""

from __future__ import annotations

import math
import re
import tomllib
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from shardtrain.config.options import nearest
from shardtrain.config.settings import Kind, Value


class Unfit(ValueError):
    """Error for a value that does not fit its option, with the violated rule and the fix."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(f"{rule}; {fix}")
        self.rule = rule
        self.fix = fix


def coerce(value: Value, kind: Kind) -> Value:
    """Convert a TOML value to the type ``kind``.

    Integers may be written as 1e6, and floats as integers. A boolean is never a number.

    Raises:
        Unfit: the value does not fit the type.
    """
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Literal:
        # In Python, 1 == True, so compare the types too.
        if any(value == item and type(value) is type(item) for item in args):
            return value
        choices = ", ".join(f'"{item}"' for item in args)
        near = nearest(_SHORT.get(str(value), str(value)), map(str, args))
        fix = f'use "{args[0]}"'
        if near:
            fix = f'did you mean "{near}"?'
        raise Unfit(f"must be one of {choices}", fix)
    if origin in (Union, types.UnionType):
        return _union(value, args)
    if origin is list:
        if not isinstance(value, list):
            fix = "write it in [ ]"
            if isinstance(value, str) and args[0] is str:
                fix = f'write ["{value}"]'
            raise Unfit("must be a list", fix)
        return [coerce(item, args[0]) for item in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise Unfit("must be a table", "write { key = value }")
        return {key: coerce(item, args[1]) for key, item in value.items()}
    return _SCALARS[kind](value)


def from_text(text: str, kind: Kind) -> Value:
    """Convert the text of one command-line value to the type ``kind``. Raises Unfit."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin in (Union, types.UnionType) and type(None) in args:
        # TOML has no null, so the command line has a name for it.
        if text.lower() in ("none", "null"):
            return None
        return from_text(text, next(arg for arg in args if arg is not type(None)))
    # A list is written with commas, or as TOML. Commas cannot express nested lists.
    if origin is list and not text.lstrip().startswith("["):
        if args[0] is str or get_origin(args[0]) is Literal:
            return [coerce(part.strip(), args[0]) for part in text.split(",") if part.strip()]
        example = """'[["a", "b"], ["c"]]'"""
        if get_args(args[0]) == (int,):
            example = "'[[0, 32], [1000, 64]]'"
        raise Unfit("must be a list of lists", f"write it as TOML: {example}")
    if kind is str:
        return text
    if origin is Literal and all(isinstance(arg, str) for arg in args):
        return coerce(text, kind)
    # TOML has only lower-case booleans. Accept "True", as Python prints it.
    if kind is bool:
        return coerce({"true": True, "false": False}.get(text.lower(), text), bool)
    return coerce(_toml_value(text, text), kind)


def from_texts(texts: Sequence[str], kind: Kind) -> Value:
    """Convert the one or more command-line values of an option to the type ``kind``. Raises Unfit."""
    if len(texts) == 1:
        return from_text(texts[0], kind)
    # Only list options take several values. Each value may itself be a list, as in --x 1,2 3.
    items = []
    for text in texts:
        items += from_text(text, kind)
    return items


def plain(text: str) -> Value:
    """Convert text of unknown type to a number or a boolean if it looks like one, else return the text."""
    value = _toml_value(text, text)
    return value if isinstance(value, bool | int | float) else text


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: for invalid TOML, and for a huge integer, which float() and str() would reject later.
    """
    table = tomllib.loads(text)
    for value in _values(table):
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ValueError(f"a number has more than {_MOST_BITS} bits")
    return table


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for inner in value:
        yield from _values(inner)


def _toml_value(text: str, otherwise: Value) -> Value:
    """Parse text as one TOML value, or return ``otherwise``. "1e6" and "5." are numbers."""
    if re.fullmatch(r"[+-]?\d+\.", text):
        text += "0"
    # A line break could add further keys to the table.
    if "\n" in text:
        return otherwise
    try:
        table = parse_toml(f"value = {text}")
    except ValueError:
        return otherwise
    if table.keys() != {"value"}:
        return otherwise
    return table["value"]


_MOST_BITS = 1000
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Short dtype names of other programs."""


def _union(value: Value, kinds: tuple[Any, ...]) -> Value:
    """Convert a value to an optional type. A value that already has one of several types stays unchanged."""
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if type(value) in kinds:
        return value
    if len(kinds) == 1:
        return coerce(value, kinds[0])
    raise Unfit("must be a number, true, false or text", "write a plain value")


def _integer(value: Value) -> int:
    """Convert a value to an integer. Accepts 1e6, rejects true and "3"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        # Seeds may use all 64 bits.
        if not -(2**63) <= value < 2**64:
            raise Unfit("must be an integer of 64 bits", "write a smaller number")
        return value
    if isinstance(value, float) and math.isfinite(value):
        raise Unfit("must be an integer", f"write {math.floor(value)} or {math.ceil(value)}")
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{20,}", value):
        raise Unfit("must be an integer of 64 bits", "write a smaller number")
    raise Unfit("must be an integer", _unquoted(value, int) or "write a whole number")


def _number(value: Value) -> float:
    """Convert a number to float. Accepts integers, rejects nan and booleans."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if math.isnan(value):
            raise Unfit("must be a number", "nan is not one")
        return float(value)
    raise Unfit("must be a number", _unquoted(value, float) or "write a number such as 0.1 or 3e-4")


def _boolean(value: Value) -> bool:
    """Return a boolean. Rejects 0, 1 and text."""
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    fix = "write true or false"
    if text in ("yes", "on", "1", "true"):
        fix = "write true"
    elif text in ("no", "off", "0", "false"):
        fix = "write false"
    raise Unfit("must be true or false", fix)


def _text(value: Value) -> str:
    """Return text. Rejects numbers without quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        raise Unfit("must be text", f'write it in quotes: "{str(value).lower()}"')
    raise Unfit("must be text", "write it in quotes")


def _unquoted(value: Value, kind: type) -> str | None:
    """Return the fix for a quoted number, or None if the text is not a TOML number of this type."""
    if not isinstance(value, str):
        return None
    number = _toml_value(value, "")
    is_float = type(number) is float and math.isfinite(number)
    if type(number) is int or (kind is float and is_float):
        return f"write it without quotes: {value}"
    return None


_SCALARS = {int: _integer, float: _number, bool: _boolean, str: _text}
PLAIN_KINDS: dict[str, Any] = {kind.__name__: kind for kind in _SCALARS}
"""Types of plain values by the name that an annotation in a user's file has."""
