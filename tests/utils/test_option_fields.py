"""An option is declared once, as a field, and becomes a flag of the command line and a parameter in Python."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass

import pytest

import shardtrain
from shardtrain.tools.evaluate import evaluate_request as evaluate
from shardtrain.tools.generate import generate_request as generate
from shardtrain.utils.arguments import StrictArgumentParser, option
from shardtrain.utils.errors import ConfigError, HelpPrinted
from shardtrain.utils.python_api import accepts_fields, python_function


@dataclass(frozen=True)
class Shared:
    count: int = option(3, "a number", positional=True)
    added: str | None = option(None, "a new field")


@python_function
@accepts_fields(Shared)
def function(model: str, rows: list[str], shared: Shared, extra: int = 0) -> tuple[object, ...]:
    return model, rows, shared, extra


def test_an_added_field_is_a_flag_and_a_parameter() -> None:
    parser = StrictArgumentParser("program", "about")
    parser.add_fields(Shared)
    assert vars(parser.read(["--added", "x"])) == {"count": 3, "added": "x"}
    assert function("m", [], 5, added="x", extra=1) == ("m", [], Shared(5, added="x"), 1)
    assert function(rows=[], model="m") == ("m", [], Shared(), 0)
    with pytest.raises(ConfigError, match="added=7 must be a str or None"):
        function("m", [], added=7)


@pytest.mark.parametrize(
    ("python", "shared", "read"),
    [
        (shardtrain.generate, generate.TextOptions, generate.read),
        (shardtrain.evaluate, evaluate.RowOptions, evaluate.read),
    ],
)
def test_options_of_a_verb_are_those_of_the_python_function(python, shared, read, capsys) -> None:
    with pytest.raises(HelpPrinted):
        read(["--help"])
    text = capsys.readouterr().out
    parameters = inspect.signature(python).parameters
    for field in dataclasses.fields(shared):
        assert f"--{field.name}" in text
        assert parameters[field.name].default == field.default
    assert inspect.signature(python).return_annotation is not inspect.Signature.empty
