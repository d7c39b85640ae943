"""The sandbox that chat templates run in: Jinja's own, and bounds on the work and the memory that a template may use.

Jinja's sandbox keeps a template from reaching Python: no attribute that begins with an underscore, no change of what it
was given. It does not keep it from running for hours or filling the memory. Here every round of a loop and every call
of a macro is counted, and so is every text that operators, methods and filters make.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_CHARACTERS = 2**26
"""Characters of one text, and of what a conversation is written as."""
MAX_WORK = 2**28
"""Characters of all texts that one rendering makes on the way: loops that grow a text make many."""
MAX_ROUNDS = 300_000
"""Rounds of loops and calls of macros in one rendering."""
MAX_SECONDS = 30
"""Time of one rendering; a template of a model takes a millisecond."""
_SLOW_FILTER = 32
"""What a character counts as where a filter may look at it many times, or write it as several."""
_MAX_DEPTH = 50
_ITEM_CHARACTERS = 64
"""What an entry of a list counts as: the bytes of a small object and the place that holds it."""
_MAX_INTEGER_BITS = 256
_MAX_WIDTH = 10_000

# filters and methods whose result has the length that an argument says
_WIDE_FILTERS = ("center", "indent", "batch", "slice", "truncate", "wordwrap")
_WIDE_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_AT_ONCE_FILTERS = frozenset(
    ("abs", "attr", "count", "d", "default", "first", "float", "int", "last", "length", "random", "round", "safe")
)
"""Filters whose work does not grow with what they are given."""
_ITEM_FILTERS = frozenset(
    ["batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"]
)
"""Filters that give the items of what they are given, or some of them, as they are."""
_LINEAR_FILTERS = frozenset(
    ("capitalize", "center", "e", "escape", "forceescape", "format", "join", "lower", "string", "trim", "upper")
)
"""Filters that go once through a text."""
_QUADRATIC = ("sync_do_sum", "do_sum")
"""Filters that make a new whole of each item and all before it, where items are not numbers."""
_LONG_NUMBER = re.compile(r"\d{5}")


class Work:
    """What one rendering has done so far; ``begin`` starts from scratch."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the last rendering."""
        self.rounds = self.characters = 0
        self._end = time.monotonic() + MAX_SECONDS

    def count(self, rounds: int = 1) -> str:
        """Count rounds of loops or calls of macros; raises OverflowError when they are too many."""
        self.rounds += rounds
        if self.rounds > MAX_ROUNDS:
            raise OverflowError(f"it makes more than {MAX_ROUNDS} rounds")
        self._check_time()
        return ""

    def _check_time(self) -> None:
        if time.monotonic() > self._end:
            raise OverflowError(f"it takes more than {MAX_SECONDS} s")

    def plan(self, characters: int) -> None:
        """Count characters that are about to be made; raises OverflowError before they are."""
        if characters > MAX_CHARACTERS:
            raise OverflowError(f"it makes a text of more than {MAX_CHARACTERS} characters")
        self.characters += characters
        if self.characters > MAX_WORK:
            raise OverflowError(f"it makes texts of more than {MAX_WORK} characters in all")
        self._check_time()


def sandbox(work: Work, *extensions: Any) -> Any:
    """An environment with Hugging Face's settings, in which a template's work is counted."""
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Counts rounds, and the size of what operators and calls make, before they make it."""

        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def shardtrain_count(self) -> str:
            return work.count()

        def shardtrain_join(self, *parts: Any) -> str:
            """What ``~`` does."""
            work.plan(sum(deep_size(part) for part in parts))
            texts = [str(part) for part in parts]
            return "".join(texts)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            # "%" formats a text, "+" and "*" make longer texts and lists; large integers take time and memory too.
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "%" and not numbers:
                _check_form(str(left), star=True)
                work.plan(_size(left) + sum(map(deep_size, right if isinstance(right, tuple) else (right,))))
            elif operator == "+" and not numbers:
                work.plan(_size(left) + _size(right))
            elif operator == "*" and not numbers:
                times = next((side for side in (left, right) if isinstance(side, int)), 1)
                work.plan(max(times, 0) * max(_size(left), _size(right)))
            elif numbers and isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
                if operator in ("*", "**") and bits > _MAX_INTEGER_BITS:
                    raise OverflowError("it makes a number too large")
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            # Not counted itself: it is put into each loop and macro, see ``_parse``.
            if function == self.shardtrain_count:
                return work.count()
            # What is joined is made a list first: an iterator could give one text any number of times.
            if isinstance(getattr(function, "__self__", None), str) and function.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
            _plan_call(work, function, args, kwargs)
            return super().call(context, function, *args, **kwargs)

        def getitem(self, obj: Any, argument: Any) -> Any:
            # The message about an item that is missing would hold the key, whatever its size.
            if not isinstance(argument, str | int):
                deep_size(argument)
            return super().getitem(obj, argument)

        def wrap_str_format(self, value: Any) -> Any:
            """The sandbox's own ``format``, which looks at what attributes a form asks for, after a look at widths."""
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            def checked(*args: Any, **kwargs: Any) -> str:
                _plan_format(work, str(value.__self__), (*args, *kwargs.values()))
                return str(wrapped(*args, **kwargs))

            return checked

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            # A call that counts begins the body of each loop, macro and call block: Jinja offers no hook for these.
            template = super()._parse(source, name, filename)
            counters: tuple[Any, ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
            for kind in counters:
                for node in template.find_all(kind):
                    counted = nodes.Call(nodes.EnvironmentAttribute("shardtrain_count"), [], [], None, None)
                    node.body.insert(0, nodes.Output([counted]).set_lineno(node.lineno))
            _replace_joins(template, nodes)
            return template.set_environment(self)

    # The settings of Hugging Face's apply_chat_template. lipsum makes texts of any length, at random.
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=list(extensions))
    del environment.globals["lipsum"]
    for name, function in environment.filters.items():
        environment.filters[name] = bounded(function, work, _weight(name), name in _WIDE_FILTERS)
    environment.finalize = lambda value: _written(work, value)
    environment.filters["replace"] = lambda text, *words: _replaced(work, _text(work, text), *words)
    environment.filters["join"] = _joined(environment.filters["join"], work)
    environment.filters["format"] = lambda text, *args, **kwargs: _formatted(work, _text(work, text), args, kwargs)
    return environment


def _replace_joins(node: Any, nodes: Any) -> None:
    """Turn every ``~`` into a call that counts; Jinja offers no hook for it."""
    for name in node.fields:
        value = getattr(node, name)
        items = value if isinstance(value, list) else [value]
        for place, item in enumerate(items):
            if not isinstance(item, nodes.Node):
                continue
            _replace_joins(item, nodes)
            if isinstance(item, nodes.Concat):
                join = nodes.EnvironmentAttribute("shardtrain_join")
                call = nodes.Call(join, item.nodes, [], None, None).set_lineno(item.lineno)
                if isinstance(value, list):
                    value[place] = call
                else:
                    setattr(node, name, call)


def _size(value: Any) -> int:
    """Characters that a value counts as."""
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM_CHARACTERS * len(value) if isinstance(value, Sequence) else 0


def _weight(name: str) -> int:
    """What each character counts as that a filter is given; 0 where it does not look at them."""
    if name in _ITEM_FILTERS:
        return _ITEM_CHARACTERS
    if name in _AT_ONCE_FILTERS:
        return 0
    return 1 if name in _LINEAR_FILTERS else _SLOW_FILTER


def deep_size(value: Any, depth: int = 0) -> int:
    """Characters that a value is written as, or fewer where they are too many: what it holds twice counts twice.

    Raises:
        OverflowError: it holds more than a text may have characters, or itself.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, range):
        return _ITEM_CHARACTERS * len(value)
    if not isinstance(value, Sequence | Mapping):
        return _ITEM_CHARACTERS
    if depth > _MAX_DEPTH:
        raise OverflowError(f"it nests deeper than {_MAX_DEPTH}")
    items = value if isinstance(value, Sequence) else [part for item in value.items() for part in item]
    size = _ITEM_CHARACTERS
    for item in items:
        size += deep_size(item, depth + 1)
        if size > MAX_CHARACTERS:
            raise OverflowError(f"it makes a text of more than {MAX_CHARACTERS} characters")
    return size


def _written(work: Work, value: Any) -> Any:
    """What is written of a value: it is counted before Jinja makes a text of it."""
    work.plan(deep_size(value))
    return value


def _text(work: Work, value: Any) -> str:
    """A value as text, which is counted before it is made."""
    if not isinstance(value, str):
        work.plan(deep_size(value))
    return str(value)


def _plan_call(work: Work, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if not isinstance(owner, str | bytes | int):
        return
    if name in _WIDE_METHODS:
        _check_widths((*args, *kwargs.values()))
        work.plan(_size(owner) * (_MAX_WIDTH if name == "expandtabs" and "\t" in str(owner) else 1))
    elif name == "replace" and len(args) >= 2:
        _plan_replace(work, str(owner), *args)
    elif name == "join" and args and isinstance(args[0], Sequence):
        work.plan(sum(_size(item) + _size(owner) for item in args[0]))
    elif name == "translate":
        raise OverflowError("it calls translate, which templates may not")
    else:
        work.plan(_size(owner) * (_ITEM_CHARACTERS // 4 if name in ("split", "rsplit", "splitlines") else 1))


def _check_widths(values: Sequence[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values):
        raise OverflowError(f"it asks for a width of more than {_MAX_WIDTH}")


def _check_form(form: str, star: bool) -> None:
    """Refuse widths that a form takes from elsewhere or that are long: they make texts of any size."""
    if _LONG_NUMBER.search(form) or (star and re.search(r"%[-#0 +]*(?:\*|\d*\.\*)", form)):
        raise OverflowError("it formats to a width that is too large")


def _plan_format(work: Work, form: str, values: Sequence[Any]) -> None:
    if _LONG_NUMBER.search(form) or re.search(r"\{[^{}]*\{", form.replace("{{", "")):
        raise OverflowError("it formats to a width that is too large")
    fields = form.count("{")
    work.plan(len(form) + fields * max((deep_size(value) + _MAX_WIDTH for value in values), default=0))


def _plan_replace(work: Work, text: str, old: Any, new: Any, *_: Any) -> None:
    old = _text(work, old)
    new = _text(work, new)
    times = text.count(old) if old else len(text) + 1
    work.plan(len(text) + times * len(new))


def _replaced(work: Work, text: str, old: Any, new: Any, count: int = -1) -> str:
    _plan_replace(work, text, old, new)
    return text.replace(str(old), str(new), -1 if count is None else count)


def _formatted(work: Work, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    _check_form(text, star=True)
    work.plan(len(text) + sum(map(deep_size, (*args, *kwargs.values()))))
    return text % (kwargs or args)


def bounded(function: Callable[..., Any], work: Work, weight: int, checks_widths: bool = True) -> Callable[..., Any]:
    """A filter whose work is counted before it is done; ``pass_environment`` and the like are kept.

    What any filter does grows with all that its arguments hold, for each time that they hold it: it may write a list
    as text, compare its items, or add them. With ``checks_widths`` its numbers are widths, which are bounded.
    """
    own = 1 if getattr(function, "jinja_pass_arg", None) else 0

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = (*args[own:], *kwargs.values())
        if checks_widths:
            _check_widths(given)
        # A filter that gives items as they are: its work is their number.
        if weight == _ITEM_CHARACTERS:
            work.plan(weight * (len(given[0]) if given and isinstance(given[0], Sequence | Mapping) else 1))
            return function(*args, **kwargs)
        # All others are counted by what they are given, and where a width or an indent says how long lines become, by
        # that for each line; those that add items to a whole, once for each item.
        size = sum(map(deep_size, given)) if weight else 1
        if checks_widths:
            widths = [abs(value) for value in given if isinstance(value, int)]
            lines = max((value.count("\n") for value in given if isinstance(value, str)), default=0)
            indents = [len(value) for value in given[1:] if isinstance(value, str)]
            size += (1 + lines) * max([*widths, *indents], default=0)
        items = len(given[0]) if given and isinstance(given[0], Sequence | Mapping) else 0
        adds = function.__name__ in _QUADRATIC and items and not all(isinstance(item, int | float) for item in given[0])
        work.plan((weight or 1) * size * (items if adds else 1))
        return function(*args, **kwargs)

    checked.__dict__.update(getattr(function, "__dict__", {}))
    return checked


def _joined(function: Callable[..., Any], work: Work) -> Callable[..., Any]:
    def joined(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        items = list(value)
        work.plan(sum((_size(item) or _MAX_WIDTH // 100) + len(str(d)) for item in items))
        return function(context, items, d, attribute)

    joined.__dict__.update(function.__dict__)
    return joined
