"""Read pickles as data, without importing, calling or looking up anything that they name.

A pickle is a program for a stack machine. ``pickletools`` lists its opcodes without executing them.
This module interprets the opcodes that build numbers, strings, tuples, lists and dicts. A class or
function becomes a ``Name``, which must be in the caller's list. A call becomes a ``Made``, with the
name, the arguments and the state that unpickling would set.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from shardtrain.utils.errors import CheckpointError, fix_first


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Made:
    """An object that unpickling would create: ``name(*arguments)`` with ``state`` set on it and
    ``items`` added.
    """

    name: Name
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)


class _Mark:
    pass


_CONSTANTS: dict[str, Any] = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (),
}  # fmt: skip
_VALUES = {
    "BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG", "BINFLOAT", "FLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
"""Opcodes of numbers and texts. LONG4 is not one of them: Python hashes an integer each time that it is a key,
which takes milliseconds for one of a megabyte. LONG1 has at most 255 bytes, and INT and LONG 4,300 digits.
"""
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def parse(
    data: bytes | BytesIO,
    names: Set[str],
    where: str,
    persistent: Callable[[Any], Any] | None = None,
    max_steps: int = 10_000,
) -> Any:
    """Return the value of a pickle without executing anything in it.

    A file object is left just after the pickle. The value may contain the same object many times,
    so code that walks through it needs a limit as well.

    Args:
        names: allowed classes and functions, as "module.name".
        where: the file, which error messages begin with.
        persistent: returns the value of a persistent id. Without it, persistent ids are rejected.
        max_steps: maximum number of opcodes, which limits time (1 us each) and memory (some hundred
            bytes each).

    Raises:
        CheckpointError: another name, an opcode that plain data does not need, or bytes that are
            not a pickle.
    """
    machine = _Machine(names, persistent)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if opcode.name == "STOP":
                return machine.pop()
            if count >= max_steps:
                raise _Refused(
                    f"has more than {max_steps} opcodes, which is too many for its content"
                )
            machine.step(opcode.name, argument)
        raise ValueError("it has no end")
    except _Refused as error:
        raise CheckpointError(
            fix_first(f"{where} {error}", "do not trust this file", "nothing in it was run")
        ) from None
    except (
        ValueError,
        IndexError,
        KeyError,
        TypeError,
        OverflowError,
        UnicodeError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{where} is damaged: {' '.join(str(error).split())[:200]}; use another checkpoint",
        ) from None


class _Refused(Exception):
    pass


class _Machine:
    def __init__(self, names: Set[str], persistent: Callable[[Any], Any] | None) -> None:
        self._names = names
        self._persistent = persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        value = self._stack.pop()
        if isinstance(value, _Mark):
            raise ValueError("a mark is found where a value is needed")
        return value

    def step(self, name: str, argument: Any) -> None:
        push = self._stack.append
        # Constants and empty containers.
        if name in _VALUES:
            push(argument)
        elif name in _CONSTANTS:
            push(_CONSTANTS[name])
        elif name == "MARK":
            push(_Mark())
        elif name == "EMPTY_LIST":
            push([])
        elif name == "EMPTY_DICT":
            push({})
        # Containers made of the values on top of the stack.
        elif name in _TUPLES:
            push(tuple(reversed([self.pop() for _ in range(_TUPLES[name])])))
        elif name == "TUPLE":
            push(tuple(self._since_mark()))
        elif name == "LIST":
            push(self._since_mark())
        elif name == "DICT":
            push(_table(self._since_mark()))
        # Additions to a container below the values.
        elif name in ("APPEND", "APPENDS"):
            values = [self.pop()] if name == "APPEND" else self._since_mark()
            self._container(list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            if name == "SETITEM":
                value = self.pop()
                key = self.pop()
                values = [key, value]
            else:
                values = self._since_mark()
            # An OrderedDict is created before its items are added.
            into = self._stack[-1]
            if isinstance(into, Made):
                into.items.extend(values)
            else:
                self._container(dict).update(_table(values))
        # Values that occur more than once.
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            number = len(self._memo) if name == "MEMOIZE" else argument
            self._memo[number] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            push(self._memo[argument])
        # Objects: record the class name, the constructor arguments and the state.
        # Nothing is called or imported.
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            self._push_name(name, argument)
        elif name in ("REDUCE", "NEWOBJ"):
            arguments = self.pop()
            popped = self.pop()
            if not isinstance(popped, Name) or not isinstance(arguments, tuple):
                raise _Refused("calls something that is not a name")
            push(Made(popped, arguments))
        elif name == "BUILD":
            state = self.pop()
            popped = self._stack[-1]
            if not isinstance(popped, Made):
                raise _Refused("sets the state of plain data")
            popped.state = state
        # A storage of a tensor, by its persistent ID.
        elif name == "BINPERSID" and self._persistent is not None:
            push(self._persistent(self.pop()))
        elif name == "POP":
            self._stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise _Refused(f"has the opcode {name}, which plain data does not need")

    def _push_name(self, kind: str, argument: Any) -> None:
        if kind == "STACK_GLOBAL":
            name = self.pop()
            module = self.pop()
        else:
            module, _, name = str(argument).partition(" ")
        named = None
        if isinstance(module, str) and isinstance(name, str):
            named = Name(module, name)
        if named is None or str(named) not in self._names:
            printable = "".join(c if c.isprintable() else "?" for c in str(named))[:100]
            raise _Refused(f"names {printable}, which is not part of a checkpoint")
        self._stack.append(named)

    def _since_mark(self) -> list[Any]:
        values: list[Any] = []
        while not isinstance(value := self._stack.pop(), _Mark):
            values.append(value)
        return values[::-1]

    def _container(self, kind: type) -> Any:
        value = self._stack[-1]
        if type(value) is not kind:
            raise _Refused(f"adds items to a {type(value).__name__} instead of a {kind.__name__}")
        return value


def _table(values: list[Any]) -> dict[Any, Any]:
    if len(values) % 2:
        raise ValueError("a table has a key without a value")
    keys = values[::2]
    # A Made is hashed by identity. Tuples are not allowed, because hashing nested shared ones may
    # take forever.
    if not all(isinstance(key, str | int | Made) for key in keys):
        raise _Refused("has a table whose keys are not names")
    return dict(zip(keys, values[1::2], strict=True))
