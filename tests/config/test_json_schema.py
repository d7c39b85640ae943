"""The JSON Schema accepts every valid configuration, and rejects unknown options and wrong values."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shardtrain import cli
from shardtrain.config.json_schema import FILE, json_schema, json_schema_text
from shardtrain.config.options import options

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[2]
OWN = [
    *sorted((ROOT / "configs").glob("*.toml")),
    *sorted((ROOT / "configs/recipes").rglob("*.toml")),
]


@pytest.fixture(scope="module")
def judge() -> Any:
    schema = json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def test_presets_and_recipes_are_accepted(judge: Any) -> None:
    assert len(OWN) > 10
    for path in OWN:
        wrong = [error.message for error in judge.iter_errors(tomllib.loads(path.read_text()))]
        assert wrong == [], path


@pytest.mark.parametrize(
    "text",
    [
        "[training]\nstep = 3",
        '[training]\nsteps = "3"',
        "[training]\nsteps = 1.5",
        "[trainng]\nsteps = 3",
        '[checkpoint]\nasync_mode = "sometimes"',
        "[model]\nconverters = [1]",
        '[data.sources.a]\ndatset = "text"',
        "[launch.slurm]\nnodes_ = 2",
    ],
)
def test_unknown_options_and_values_are_rejected(judge: Any, text: str) -> None:
    assert list(judge.iter_errors(tomllib.loads(text)))


def test_each_option_has_its_place_with_its_text(judge: Any) -> None:
    for name, option in options().items():
        place = judge.schema
        for part in name.split("."):
            place = place["properties"][part]
        assert place["description"] == option.help, name


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(("config", "schema")) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()
    assert cli.main(("config", "schema", "x")) == 2


def test_the_schema_next_to_the_presets_is_up_to_date() -> None:
    file = ROOT / "configs" / FILE
    assert file.read_text(encoding="utf-8") == json_schema_text(), (
        "run python -m shardtrain.config.options_page"
    )


def test_the_first_line_of_each_preset_and_recipe_names_the_schema_for_editors() -> None:
    for path in [*OWN, ROOT / "examples/custom_task/config.toml"]:
        directive, name = path.read_text(encoding="utf-8").splitlines()[0].split(" ")
        assert (
            directive == "#:schema" and (path.parent / name).resolve() == ROOT / "configs" / FILE
        ), path


def test_init_writes_the_schema_that_its_first_line_names(tmp_path: Path) -> None:
    assert cli.main(["init", str(tmp_path / "a.toml"), "debug"]) == 0
    directive, name = (tmp_path / "a.toml").read_text(encoding="utf-8").splitlines()[0].split(" ")
    assert directive == "#:schema"
    assert (tmp_path / name).read_text(encoding="utf-8") == json_schema_text()
