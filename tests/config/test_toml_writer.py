from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardtrain.config import (
    Config,
    ConfigError,
    check,
    help_text,
    load,
    notes,
    resolved_toml,
    show,
)
from shardtrain.config.options import options, sections
from shardtrain.config.options_page import options_page
from shardtrain.config.toml_writer import toml_value

TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8)


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an annotation in the schema."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Literal:
        return st.sampled_from(args)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        fields = {field.name: strategy(hints[field.name]) for field in dataclasses.fields(kind)}
        return st.builds(kind, **fields)
    if origin is list:
        return st.lists(strategy(args[0]), max_size=2)
    if origin is dict:
        keys = st.text(
            st.characters(blacklist_categories=("Cs",), blacklist_characters="."),
            min_size=1,
            max_size=5,
        )
        return st.dictionaries(keys, strategy(args[1]), max_size=2)
    if args:
        return st.one_of([st.none() if arg is type(None) else strategy(arg) for arg in args])
    return {
        int: st.integers(-(2**63), 2**63 - 1),  # range of integers in TOML
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: TEXT,
    }[kind]


def configs() -> st.SearchStrategy[Config]:
    """Return a strategy for configs in which a few options have arbitrary values of their type."""
    # Exclude the option that must name an existing file.
    drawn = [option for option in options().values() if option.name != "job.custom_config_module"]
    pairs = st.one_of([st.tuples(st.just(option.name), strategy(option.kind)) for option in drawn])
    return st.lists(pairs, max_size=12).map(lambda chosen: build("", dict(chosen)))


def build(section: str, values: dict[str, Any]) -> Any:
    given_fields = {}
    for field in dataclasses.fields(sections()[section]):
        name = f"{section}.{field.name}".lstrip(".")
        if name in sections():
            given_fields[field.name] = build(name, values)
        elif name in values:
            given_fields[field.name] = values[name]
    return sections()[section](**given_fields)


@given(config=configs())
@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_resolved_config_reloads_to_an_identical_one(
    config: Config, tmp_path_factory: Any
) -> None:
    # loading changes an empty folder, the old way to disable checkpoints
    assume(config.checkpoint.folder)
    file = tmp_path_factory.getbasetemp() / "resolved.toml"
    file.write_bytes(resolved_toml(config).encode())
    assert load(file).config == config


TABLES = ("data.sources", "data.stages", "model.overrides")


@given(values=st.fixed_dictionaries({name: strategy(options()[name].kind) for name in TABLES}))
@settings(max_examples=40, derandomize=True, suppress_health_check=list(HealthCheck))
def test_tables_of_any_names_and_values_reload_with_a_line_for_each_key(
    values: dict[str, Any], tmp_path_factory: Any
) -> None:
    config = build("", values)
    file = tmp_path_factory.getbasetemp() / "tables.toml"
    file.write_bytes(resolved_toml(config).encode())
    loaded = load(file)

    assert loaded.config == config

    tables = tuple(f"{table}." for table in TABLES)
    for name, origin in loaded.origins.items():
        if name.startswith(tables):
            assert origin.startswith("tables.toml:")

    file.write_bytes(show(loaded).encode())
    assert load(file).config == config


@given(
    value=st.recursive(
        st.one_of(strategy(int), strategy(float), st.booleans(), TEXT), st.lists, max_leaves=4
    )
)
@settings(max_examples=100, derandomize=True)
def test_a_value_written_as_toml_reads_back_with_its_type(value: Any) -> None:
    again = tomllib.loads(f"x = {toml_value(value)}")["x"]
    assert again == value
    assert type(again) is type(value)


def test_the_resolved_default_config_is_the_default_and_names_unset_options() -> None:
    text = resolved_toml(Config())
    assert "# epochs: unset (integer or unset)" in text

    table = tomllib.loads(text)
    unset = {name for name, option in options().items() if option.default is None}
    for name in options():
        at: Any = table
        for part in name.split("."):
            at = at.get(part) if isinstance(at, dict) else None
        assert (at is None) == (name in unset), name


def test_a_resolved_config_passes_the_check_that_its_config_passes(tmp_path: Path) -> None:
    config = load(Path(__file__).parents[2] / "configs" / "debug.toml").config
    (tmp_path / "resolved.toml").write_text(resolved_toml(config))
    assert check(load(tmp_path / "resolved.toml")) == []


def test_show_names_the_origin_of_every_value_and_is_valid_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\nbatch_size = 4\nsteps = 50\n[model.overrides]\ndim = 64\n")
    loaded = load(file, ["--optimizer.lr", "3e-4"])
    text = show(loaded)

    assert "steps = 50  # run.toml:3\n" in text
    assert "local_batch_size = 4  # run.toml:2\n" in text
    assert "lr = 0.0003  # command line\n" in text
    assert "beta1 = 0.9  # default\n" in text
    assert "dim = 64  # run.toml:5\n" in text

    (tmp_path / "again.toml").write_text(text)
    assert load(tmp_path / "again.toml").config == loaded.config


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("[training]\nsteps = 5\n[lr_scheduler]\nwarmup_steps = 9", "ends before the peak rate"),
        (
            "[training]\nsteps = 10\n[lr_scheduler]\nwarmup_steps = 9\ndecay_ratio = 0.5",
            "right after the warmup",
        ),
        (
            "[training]\nsteps = 400\n[lr_scheduler]\ntotal_steps = 300",
            "the remaining steps use the last rate",
        ),
        ("[checkpoint]\nenable_ft_dataloader_checkpoints = true", "no replica groups"),
        (
            "[quantize.linear.float8]\nemulate = true",
            '"quantize.linear.float8" in model.converters',
        ),
    ],
)
def test_questionable_schedules_are_notes(tmp_path: Path, text: str, fragment: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    loaded = load(file)

    assert not check(loaded)

    (note,) = notes(loaded)
    assert fragment in note


def test_every_option_has_help_that_its_section_shows() -> None:
    for name, option in options().items():
        assert option.help, name
        assert help_text(name).startswith(f"--{name}  (")
    assert (
        "--training.steps  (integer; default 10000)\n    Optimizer steps of the run."
        in help_text("training")
    )
    assert "[training]" in help_text()
    assert "[quantize.linear.float8]" in help_text()
    with pytest.raises(ConfigError, match="trainin is neither a section nor an option"):
        help_text("trainin")


def test_the_page_of_options_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "options.md"
    assert page.read_text(encoding="utf-8") == options_page(), (
        "run python -m shardtrain.config.options_page"
    )
