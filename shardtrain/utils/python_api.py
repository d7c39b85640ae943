"""Errors of the Python API: arguments checked against their annotations, and parameters named instead of flags.

The functions of ``shardtrain.api`` run the code of the command line, whose messages name flags such as
``--config``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from shardtrain.utils.errors import COMMAND_LINE, ConfigError, Problem, ShardtrainError

F = TypeVar("F", bound=Callable[..., Any])
PARAMETERS = {"from": "path"}
"""Flags whose parameter has another name."""
OPTIONS = {
    "path": "job.config_file",
    "runs": "RUN_FOLDER",
    "config": "job.config_file",
    "tokenizer": "model.hf_assets_path",
    "batch_size": "validation.local_batch_size",
    "seq_len": "validation.seq_len",
}
"""Options that a parameter sets.

An error about such an option names the parameter if the value came from it.
"""
_VALUE = r'[ =](?:\d[\w.]*|"[^"]*"|[^\s,;:)]*/[^\s,;:)]*|[\w.-]+\.toml)|=(?!true|false)[a-z]\w*'
"""Pattern of a value that differs from ordinary text: a number, a quoted text, a path, or a value
after "=".
"""
_FLAG = rf"(?<![\w/-])--(?P<flag>[a-z_][\w.]*\w)(?P<value>{_VALUE})?"


def python_function(function: F) -> F:
    """Decorate a function of the API. Check its arguments, and name parameters in its errors.

    Raises:
        ConfigError: arguments have a wrong type. The error contains all of them.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        bound = inspect.signature(function).bind(*arguments, **named)
        hints = typing.get_type_hints(function)
        # Report all wrong arguments together, as for a configuration.
        problems = []
        for name, value in bound.arguments.items():
            if name in hints and not fits(value, hints[name]):
                rule = f"must be {describe(hints[name])}"
                fix = f"pass one, not {article(type(value).__name__)}"
                problems.append(Problem(name, value, rule, fix))
        if problems:
            raise ConfigError(problems)
        # Messages of the command line name flags, which a Python caller does not have.
        try:
            return function(*arguments, **named)
        except ShardtrainError as error:
            raise translated(error, bound.arguments) from error

    return typing.cast(F, call)


P = ParamSpec("P")
Options = TypeVar("Options")
Returned = TypeVar("Returned")


def accepts_fields(
    options: Callable[P, Options],
) -> Callable[[Callable[..., Returned]], Callable[..., Returned]]:
    """Decorate a function whose third parameter is a dataclass: callers pass the fields of the dataclass instead.

    A field that is added to the options of a verb is therefore a parameter of the Python function, too.
    """

    def decorate(function: Callable[..., Returned]) -> Callable[..., Returned]:
        # The third parameter receives the dataclass.
        first, second, _, *others = inspect.signature(function).parameters.values()
        fields = list(inspect.signature(options).parameters.values())
        positional = [field for field in fields if field.kind is not inspect.Parameter.KEYWORD_ONLY]
        keyword_only = [field for field in fields if field.kind is inspect.Parameter.KEYWORD_ONLY]
        returned = inspect.signature(function).return_annotation
        parameters = [first, second, *positional, *others, *keyword_only]
        signature = inspect.Signature(parameters, return_annotation=returned)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Returned:
            given = signature.bind(*arguments, **named).arguments
            # Separate the fields of the dataclass from the function's own arguments.
            values = {field.name: given.pop(field.name) for field in fields if field.name in given}
            # The options are the third parameter, so pass the first two by position, too.
            (_, first_value), (_, second_value), *rest = given.items()
            return function(first_value, second_value, options(**values), **dict(rest))  # type: ignore[call-arg]

        hints = typing.get_type_hints(function)
        call.__annotations__ = {**hints, **typing.get_type_hints(options)}
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def fits(value: Any, hint: Any) -> bool:
    """True if a value has the annotated type.

    An int is a float, a bool is not an int, a str is not a sequence.
    """
    origin = typing.get_origin(hint)
    # An annotation that is not a class cannot be checked.
    if hint is Any or isinstance(hint, str):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in typing.get_args(hint))
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is not None and issubclass(origin, Sequence):
        (item,) = typing.get_args(hint)
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(fits(one, item) for one in value)
        )
    # bool is a subclass of int in Python.
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint or type(None))


def describe(hint: Any) -> str:
    """Describe an annotation for a message.

    >>> describe(str | int | None), describe(Sequence[str]), describe(Mapping[str, int])
    ('a str, an int or None', 'a list of str', 'a dict')
    """
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        parts = [describe(part) for part in typing.get_args(hint)]
        return f"{', '.join(parts[:-1])} or {parts[-1]}"
    if origin is not None and issubclass(origin, Mapping):
        return "a dict"
    if origin is not None:
        return f"a list of {describe(typing.get_args(hint)[0]).split(' ', 1)[1]}"
    return article(hint.__name__)


def article(name: str) -> str:
    """Put an article before a type's name.

    >>> article("int"), article("str"), article("NoneType")
    ('an int', 'a str', 'None')
    """
    if name == "NoneType":
        return "None"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def translated(error: ShardtrainError, arguments: Mapping[str, Any]) -> ShardtrainError:
    """Return the same error with parameters instead of flags. ``arguments`` are those of the call."""
    values = [str(value) for value in arguments.values() if isinstance(value, str | Path)]
    # Only errors of the configuration have options.
    if not isinstance(error, ConfigError):
        return type(error)(_parameters(str(error), values))
    # Map option and value to the parameter.
    parameters = {}
    for name, value in arguments.items():
        if name in OPTIONS:
            parameters[OPTIONS[name], str(value)] = name
    problems: list[Problem | str] = []
    for problem in error.problems:
        if isinstance(problem, str):
            for (option, value), name in parameters.items():
                problem = problem.replace(f'{option}="{value}"', f'{name}="{value}"')
            problems.append(_parameters(problem, values))
            continue
        option = problem.option.removeprefix("--")
        where = "" if problem.where == COMMAND_LINE else problem.where
        name = parameters.get((option, str(problem.value)), option)
        # A flag has the name of a parameter.
        if problem.option.startswith("--"):
            name = PARAMETERS.get(option, option)
        rule = _parameters(problem.rule, values)
        fix = _parameters(problem.fix, values)
        problems.append(dataclasses.replace(problem, option=name, rule=rule, fix=fix, where=where))
    return type(error)(problems)


def _parameters(text: str, values: Sequence[str] = ()) -> str:
    """Replace flags in a text: ``add --config a.toml`` becomes ``add config="a.toml"``.

    Quoted text and ``values``, which are those of the call, are not flags and stay as they are.

    >>> _parameters('name one with --tokenizer, a path or "bytes"'), _parameters("use --temperature 0.7")
    ('name one with tokenizer, a path or "bytes"', 'use temperature=0.7')
    """

    def parameter(match: re.Match[str]) -> str:
        flag = match["flag"]
        if flag is None:
            return match[0]
        name = PARAMETERS.get(flag, flag)
        if match["value"] is None:
            return name
        # The first character separates the flag from its value.
        value = match["value"][1:]
        is_literal = value.startswith('"') or value[0].isdigit()
        return f"{name}={value}" if is_literal else f'{name}="{value}"'

    # Alternatives match from left to right, so quoted texts and values are skipped first.
    patterns = ['"[^"]*"', *(re.escape(value) for value in values if "--" in value), _FLAG]
    return re.sub("|".join(patterns), parameter, text.replace(f"{COMMAND_LINE}: ", ""))
