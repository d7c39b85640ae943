"""Sandbox for chat templates: Jinja's own sandbox, with limits on a template's work and memory.

Jinja's sandbox prevents a template from executing Python code: it forbids attributes that begin with an
underscore, and changes of the arguments. But it does not prevent a template from running for hours or filling
the memory. So this sandbox counts every loop iteration, every macro call, and the characters of every text
that operators, methods and filters create.
"""

from __future__ import annotations

import itertools
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

MAX_CHARACTERS = 2**26
"""Maximum number of characters of a single text, and of a rendered conversation."""
MAX_WORK = 2**28
"""Maximum number of characters of all texts that one rendering creates, including intermediate ones.

A loop that extends a text, for example, creates many of them.
"""
MAX_ROUNDS = 300_000
"""Maximum number of loop iterations and macro calls in one rendering."""
MAX_SECONDS = 30
"""Maximum time of one rendering. The template of a real model takes a millisecond."""
_SLOW_FILTER = 32
"""Weight of a character in a filter that may process it many times or replace it with several characters."""
_MAX_DEPTH = 50
_ITEM_CHARACTERS = 64
"""Weight of a list entry: the bytes of a small object and of the reference to it."""
_COMPARISON_CHARACTERS = 256
"""Weight of a comparison of two items, which takes as long as the creation of a text of this size."""
_MAX_INTEGER_BITS = 256
_MAX_WIDTH = 10_000

# The length of the result of these filters and methods depends on an argument, such as a width.
_WIDE_FILTERS = ("center", "indent", "batch", "slice", "truncate", "wordwrap")
_WIDE_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_CONSTANT_FILTERS = frozenset(
    (
        "abs",
        "attr",
        "count",
        "d",
        "default",
        "first",
        "float",
        "int",
        "last",
        "length",
        "random",
        "round",
        "safe",
    )
)
"""Filters whose work does not depend on the size of their input."""
_ITEM_FILTERS = frozenset(
    [
        "batch",
        "items",
        "list",
        "map",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
    ]
)
"""Filters that return items of their input unchanged."""
_LINEAR_FILTERS = frozenset(
    (
        "capitalize",
        "center",
        "e",
        "escape",
        "forceescape",
        "format",
        "join",
        "lower",
        "string",
        "trim",
        "upper",
    )
)
"""Filters that process a text in one pass."""
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "eq": operator.eq,
        "ne": operator.ne,
        "gt": operator.gt,
        "gteq": operator.ge,
        "lt": operator.lt,
        "lteq": operator.le,
        "in": lambda value, container: value in container,
        "notin": lambda value, container: value not in container,
    }
)
"""Comparisons by the names of Jinja's parser."""
_COMPARING_TESTS = (
    *("eq", "==", "equalto", "ne", "!=", "in"),
    *("gt", ">", "greaterthan", "ge", ">=", "lt", "<", "lessthan", "le", "<="),
)
_ADDING_FILTERS = ("sync_do_sum", "do_sum")
"""Filters that add up items. Unless the items are numbers, they copy the sum so far for each item."""
_LONG_NUMBER = re.compile(r"\d{5}")


COMPILE_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors for templates that do not compile, in addition to jinja2.TemplateSyntaxError."""


def why_not_compiled(error: Exception) -> str:
    """Return the reason of one of ``COMPILE_ERRORS``, as a phrase."""
    # Python may fail to compile the code that Jinja generates from the template.
    if isinstance(error, SyntaxError):
        return str(error.msg)
    # Python refuses to convert numbers of more than 4300 digits.
    if isinstance(error, ValueError):
        return "it contains a number with too many digits"
    return "it nests too deeply"


class Work:
    """Counters of one rendering. ``begin`` resets them."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset the counters for a new rendering."""
        self.rounds = self.characters = 0
        self._end = time.monotonic() + MAX_SECONDS

    def count(self, rounds: int = 1) -> str:
        """Count loop iterations or macro calls. Raises OverflowError above the limit."""
        self.rounds += rounds
        if self.rounds > MAX_ROUNDS:
            raise OverflowError(
                f"it runs more than {MAX_ROUNDS} iterations of loops and calls of macros"
            )
        self._check_time()
        return ""

    def _check_time(self) -> None:
        if time.monotonic() > self._end:
            raise OverflowError(f"it takes more than {MAX_SECONDS} s")

    def plan(self, characters: int) -> None:
        """Count characters before they are created. Raises OverflowError above a limit."""
        if characters > MAX_CHARACTERS:
            raise OverflowError(f"it creates a text of more than {MAX_CHARACTERS} characters")
        self.characters += characters
        if self.characters > MAX_WORK:
            raise OverflowError(f"it creates texts of more than {MAX_WORK} characters in total")
        self._check_time()


def sandbox(work: Work, *extensions: Any) -> Any:
    """Return a Jinja environment with Hugging Face's settings that counts a template's work in ``work``."""
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Counts iterations, and counts the results of operators and calls before they are created."""

        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def shardtrain_count(self) -> str:
            return work.count()

        def shardtrain_join(self, *parts: Any) -> str:
            """Implement the operator ``~``."""
            work.plan(sum(deep_size(part) for part in parts))
            texts = [str(part) for part in parts]
            return "".join(texts)

        def shardtrain_compare(self, name: str, left: Any, right: Any) -> Any:
            """Implement the comparison operators."""
            _plan_comparison(work, name in ("in", "notin"), left, right)
            return _OPERATORS[name](left, right)

        def shardtrain_compared(self, value: Any) -> Any:
            """Count a key of a dictionary, or an operand of ``a < b < c``, and return it."""
            return _compared(work, value)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            # Operators that may need much time or memory: "%" formats a text, "+" and "*" create longer
            # texts and lists, and "*" and "**" may create huge integers.
            numbers = isinstance(left, int | float) and isinstance(right, int | float)
            if operator == "%" and not numbers:
                _check_form(str(left), star=True)
                values = right if isinstance(right, tuple) else (right,)
                size_of_values = sum(map(deep_size, values))
                work.plan(_size(left) + size_of_values)
            elif operator == "+" and not numbers:
                work.plan(_size(left) + _size(right))
            elif operator == "*" and not numbers:
                times = next((side for side in (left, right) if isinstance(side, int)), 1)
                work.plan(max(times, 0) * max(_size(left), _size(right)))
            elif numbers and isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() + right.bit_length()
                if operator == "**":
                    bits = left.bit_length() * abs(right)
                if operator in ("*", "**") and bits > _MAX_INTEGER_BITS:
                    raise OverflowError("it makes a number too large")
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            # ``_parse`` inserts a call of this function into each loop and macro.
            # Count an iteration, not the call.
            if function == self.shardtrain_count:
                return work.count()
            if function == self.shardtrain_compared:
                return _compared(work, args[0])
            # For str.join, make a list first, because its size must be known. An iterator could yield the
            # same text any number of times.
            is_method_of_text = isinstance(getattr(function, "__self__", None), str)
            if is_method_of_text and function.__name__ == "join" and args:
                args = (list(args[0]), *args[1:])
            _plan_call(work, function, args, kwargs)
            return super().call(context, function, *args, **kwargs)

        def getitem(self, obj: Any, argument: Any) -> Any:
            # Limit the size of the key, because the error message for a missing item would contain it.
            if not isinstance(argument, str | int):
                deep_size(argument)
            return super().getitem(obj, argument)

        def wrap_str_format(self, value: Any) -> Any:
            """Add a check of widths to the sandbox's own ``format``, which checks only attributes."""
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            def checked(*args: Any, **kwargs: Any) -> str:
                _plan_format(work, str(value.__self__), (*args, *kwargs.values()))
                return str(wrapped(*args, **kwargs))

            return checked

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            # Jinja has no hooks for loops, macros and call blocks. So insert a call that counts at the
            # start of each of them.
            template = super()._parse(source, name, filename)
            counters: tuple[Any, ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
            for kind in counters:
                for node in template.find_all(kind):
                    counted = nodes.Call(
                        nodes.EnvironmentAttribute("shardtrain_count"), [], [], None, None
                    )
                    node.body.insert(0, nodes.Output([counted]).set_lineno(node.lineno))
            _replace_operators(template, nodes)
            _count_operands(template, nodes)
            return template.set_environment(self)

    # These are the settings of Hugging Face's apply_chat_template. Remove lipsum, which can create texts of
    # any length.
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=list(extensions))
    del environment.globals["lipsum"]
    for name, function in environment.filters.items():
        environment.filters[name] = bounded(function, work, _weight(name), name in _WIDE_FILTERS)
    tests: dict[str, Any] = environment.tests
    for name in _COMPARING_TESTS:
        tests[name] = _counted_test(tests[name], work, is_in=name == "in")
    environment.finalize = lambda value: _written(work, value)
    environment.filters["replace"] = lambda text, *words: _replaced(work, _text(work, text), *words)
    environment.filters["join"] = _joined(environment.filters["join"], work)
    environment.filters["format"] = lambda text, *args, **kwargs: _formatted(
        work, _text(work, text), args, kwargs
    )
    return environment


def _replace_operators(node: Any, nodes: Any) -> None:
    """Replace every ``~`` and every comparison by a call that counts.

    Jinja has no hooks for these operators.
    """
    for name in node.fields:
        value = getattr(node, name)
        items = value if isinstance(value, list) else [value]
        for place, item in enumerate(items):
            if not isinstance(item, nodes.Node):
                continue
            _replace_operators(item, nodes)
            if isinstance(item, nodes.Concat):
                function = "shardtrain_join"
                arguments = item.nodes
            elif isinstance(item, nodes.Compare) and len(item.ops) == 1:
                function = "shardtrain_compare"
                arguments = [nodes.Const(item.ops[0].op), item.expr, item.ops[0].expr]
            else:
                continue
            method = nodes.EnvironmentAttribute(function)
            call = nodes.Call(method, arguments, [], None, None).set_lineno(item.lineno)
            if isinstance(value, list):
                value[place] = call
            else:
                setattr(node, name, call)


def _count_operands(template: Any, nodes: Any) -> None:
    """Count the keys of dictionaries, and the operands of comparisons that were not replaced."""

    def counted(operand: Any) -> Any:
        function = nodes.EnvironmentAttribute("shardtrain_compared")
        return nodes.Call(function, [operand], [], None, None).set_lineno(operand.lineno)

    for comparison in list(template.find_all(nodes.Compare)):
        comparison.expr = counted(comparison.expr)
        for operand in comparison.ops:
            operand.expr = counted(operand.expr)
    for pair in list(template.find_all(nodes.Pair)):
        pair.key = counted(pair.key)


def _compared(work: Work, value: Any) -> Any:
    """Count the size of a value before it is compared or hashed. Texts and numbers are compared quickly."""
    if isinstance(value, Sequence | Mapping) and not isinstance(value, str | bytes | range):
        work.plan(deep_size(value))
    return value


def _plan_comparison(work: Work, is_in: bool, left: Any, right: Any) -> None:
    """Count a comparison, or a test whether ``right`` contains ``left``.

    Lists may contain the same list many times, and Python compares and hashes each occurrence. Without a
    limit, 40 rounds of ``x = [x, x]`` make a comparison that takes hours. Only the items that Python
    compares count. A template may compare each of 10,000 messages with the last one, or all messages with
    an empty list.
    """
    if not is_in:
        if left is right and isinstance(left, Sequence | Mapping):
            work.plan(len(left))
        else:
            _plan_equality(work, left, right)
    elif isinstance(right, Mapping):
        _compared(work, left)
    elif isinstance(right, Sequence) and not isinstance(right, str | bytes | range):
        for item in right:
            if _plan_equality(work, item, left):
                break


def _plan_equality(work: Work, left: Any, right: Any, depth: int = 0) -> bool:
    """Count the items that Python compares until the first difference. Return True if there is none.

    Raises:
        OverflowError: there are too many, or they nest too deeply.
    """
    work.plan(_COMPARISON_CHARACTERS)
    if depth > _MAX_DEPTH:
        raise OverflowError(f"it nests deeper than {_MAX_DEPTH}")
    # Python considers an object equal to itself without comparing its items.
    if left is right:
        return True
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if len(left) != len(right):
            return False
        for key, value in left.items():
            if key not in right or not _plan_equality(work, value, right[key], depth + 1):
                return False
        return True
    are_lists = isinstance(left, list) and isinstance(right, list)
    if are_lists or (isinstance(left, tuple) and isinstance(right, tuple)):
        # Lists of different lengths are never equal, but Python compares their items to order them.
        for one, other in zip(left, right, strict=False):
            if not _plan_equality(work, one, other, depth + 1):
                return False
        return len(left) == len(right)
    return bool(left == right)


def _counted_test(test: Callable[..., Any], work: Work, is_in: bool) -> Callable[..., Any]:
    """Wrap a Jinja test such as ``is eq(x)``, and count the comparison."""

    def counted(value: Any, other: Any) -> Any:
        _plan_comparison(work, is_in, value, other)
        return test(value, other)

    return counted


def _size(value: Any) -> int:
    """Return the number of characters that a value counts for, without looking into its items."""
    if isinstance(value, str | bytes):
        return len(value)
    return _ITEM_CHARACTERS * len(value) if isinstance(value, Sequence) else 0


def _weight(name: str) -> int:
    """Return the weight of each character in a filter's input. 0 if its work does not depend on the input."""
    if name in _ITEM_FILTERS:
        return _ITEM_CHARACTERS
    if name in _CONSTANT_FILTERS:
        return 0
    return 1 if name in _LINEAR_FILTERS else _SLOW_FILTER


def deep_size(value: Any, depth: int = 0) -> int:
    """Return an upper bound of the number of characters of a value that is converted to text,
    with all its items.

    A part that occurs twice counts twice.

    Raises:
        OverflowError: the size exceeds the limit of a text, or the value contains itself.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, range):
        return _ITEM_CHARACTERS * len(value)
    if not isinstance(value, Sequence | Mapping):
        return _ITEM_CHARACTERS
    if depth > _MAX_DEPTH:
        raise OverflowError(f"it nests deeper than {_MAX_DEPTH}")
    items: Iterable[Any] = value
    if isinstance(value, Mapping):
        items = itertools.chain.from_iterable(value.items())
    size = _ITEM_CHARACTERS
    for item in items:
        size += deep_size(item, depth + 1)
        if size > MAX_CHARACTERS:
            raise OverflowError(f"it creates a text of more than {MAX_CHARACTERS} characters")
    return size


def _written(work: Work, value: Any) -> Any:
    """Count the characters of a value before Jinja converts it to text. Return the value."""
    work.plan(deep_size(value))
    return value


def _text(work: Work, value: Any) -> str:
    """Convert a value to text, after counting its characters."""
    if not isinstance(value, str):
        work.plan(deep_size(value))
    return str(value)


def _plan_call(work: Work, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a method is called, count the characters of its result and the items that it compares or copies."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    # list.index and list.count compare their argument with the items. Methods such as dict.get and
    # loop.changed compare or hash their arguments, and so does dict(). list.copy and dict.copy copy the
    # items.
    if isinstance(owner, list | tuple) and name in ("index", "count") and args:
        for item in owner:
            if _plan_equality(work, item, args[0]) and name == "index":
                break
    elif isinstance(owner, Sequence | Mapping) and not isinstance(owner, str | bytes):
        if name == "copy":
            work.plan(_ITEM_CHARACTERS * len(owner))
        for value in args:
            _compared(work, value)
    elif function is dict or name == "changed":
        for value in (*args, *kwargs.values()):
            _compared(work, value)
    if not isinstance(owner, str | bytes | int):
        return
    # Methods of texts and numbers return texts, whose size depends on the method.
    if name in _WIDE_METHODS:
        _check_widths((*args, *kwargs.values()))
        expands_tabs = name == "expandtabs" and "\t" in str(owner)
        factor = _MAX_WIDTH if expands_tabs else 1
        work.plan(_size(owner) * factor)
    elif name == "replace" and len(args) >= 2:
        _plan_replace(work, str(owner), *args)
    elif name == "join" and args and isinstance(args[0], Sequence):
        work.plan(sum(_size(item) + _size(owner) for item in args[0]))
    elif name == "translate":
        raise OverflowError("it calls translate, which templates may not")
    elif name in ("split", "rsplit", "splitlines"):
        work.plan(_size(owner) * (_ITEM_CHARACTERS // 4))
    else:
        work.plan(_size(owner))


def _check_widths(values: Sequence[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_WIDTH for value in values):
        raise OverflowError(f"it uses a width of more than {_MAX_WIDTH}")


def _check_form(form: str, star: bool) -> None:
    """Reject format strings whose widths are large numbers or come from an argument.

    They could create texts of any size.
    """
    if _LONG_NUMBER.search(form) or (star and re.search(r"%[-#0 +]*(?:\*|\d*\.\*)", form)):
        raise OverflowError("it formats a value with a width that is too large")


def _plan_format(work: Work, form: str, values: Sequence[Any]) -> None:
    """Before ``str.format`` is called, count an upper bound of the characters of its result."""
    has_nested_fields = re.search(r"\{[^{}]*\{", form.replace("{{", ""))
    if _LONG_NUMBER.search(form) or has_nested_fields:
        raise OverflowError("it formats a value with a width that is too large")
    num_fields = form.count("{")
    longest = max((deep_size(value) + _MAX_WIDTH for value in values), default=0)
    work.plan(len(form) + num_fields * longest)


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
    values = (*args, *kwargs.values())
    work.plan(len(text) + sum(map(deep_size, values)))
    return text % (kwargs or args)


def bounded(
    function: Callable[..., Any], work: Work, weight: int, checks_widths: bool = True
) -> Callable[..., Any]:
    """Wrap a filter, and count its work before it runs.

    The work depends on the full contents of the arguments, because a filter may convert a list to text,
    compare its items, or add them up. Attributes of the function, such as ``pass_environment``, are kept.

    Args:
        function: the filter.
        work: the counters.
        weight: weight of each character of the input.
        checks_widths: True if integer arguments are widths, which are limited.
    """
    num_context_args = 1 if getattr(function, "jinja_pass_arg", None) else 0

    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = (*args[num_context_args:], *kwargs.values())
        if checks_widths:
            _check_widths(arguments)
        has_items = bool(arguments) and isinstance(arguments[0], Sequence | Mapping)
        # The work of a filter that returns items unchanged is the number of items.
        if weight == _ITEM_CHARACTERS:
            num_items = len(arguments[0]) if has_items else 1
            work.plan(weight * num_items)
            return function(*args, **kwargs)
        # The work of any other filter is the size of its arguments.
        size = sum(map(deep_size, arguments)) if weight else 1
        # A width or an indent adds its length to each line.
        if checks_widths:
            lines = 0
            longest = 0
            for number, value in enumerate(arguments):
                if isinstance(value, int):
                    longest = max(longest, abs(value))
                elif isinstance(value, str):
                    lines = max(lines, value.count("\n"))
                    # The first argument is the text itself. Others may be the indent.
                    longest = max(longest, len(value) if number else 0)
            size += (1 + lines) * longest
        # A filter that concatenates items may copy the result for each item.
        num_items = len(arguments[0]) if has_items else 0
        factor = 1
        if function.__name__ in _ADDING_FILTERS and num_items:
            are_numbers = all(isinstance(item, int | float) for item in arguments[0])
            factor = 1 if are_numbers else num_items
        work.plan((weight or 1) * size * factor)
        return function(*args, **kwargs)

    checked.__dict__.update(getattr(function, "__dict__", {}))
    return checked


def _joined(function: Callable[..., Any], work: Work) -> Callable[..., Any]:
    def joined(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        items = list(value)
        size = 0
        for item in items:
            size += _size(item) or _MAX_WIDTH // 100
            size += len(str(d))
        work.plan(size)
        return function(context, items, d, attribute)

    joined.__dict__.update(function.__dict__)
    return joined
