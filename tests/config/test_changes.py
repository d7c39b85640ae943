"""Changed options that stop a resumed run: every option has a class."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

import pytest

from shardtrain.config import Loaded, changes
from shardtrain.config.load import value_of
from shardtrain.config.model_file import read_model_file, shape
from shardtrain.config.options import options
from shardtrain.config.rules import check
from shardtrain.config.schema import Config, LRScheduler, Model, Training

COMPARED = [name for name in options() if changes.class_of(name) != "ignore"]


def changed(config: Config, option: str) -> Config:
    """Return a config with another value of one option. The value need not have the option's type."""
    sections = option.split(".")[:-1]
    key = option.rpartition(".")[2]
    value: Any = value_of(config, option)
    new: Any = {bool: lambda: not value, int: lambda: value + 7, float: lambda: value + 0.5}.get(
        type(value), lambda: "another"
    )()
    nodes = [config]
    for name in sections:
        nodes.append(getattr(nodes[-1], name))
    node: Any = dataclasses.replace(nodes[-1], **{key: new})
    for parent, name in zip(reversed(nodes[:-1]), reversed(sections), strict=True):
        node = dataclasses.replace(parent, **{name: node})
    return node


def differing(
    old: Config, new: Config, excluded: tuple[str, ...] = (), ranks: tuple[int, int] = (2, 2)
) -> list[str]:
    record = json.loads(json.dumps(changes.to_record(old, ranks[0]), allow_nan=False))
    return [change.option for change in changes.find(record, new, ranks[1], excluded)]


def test_every_option_has_a_class_and_the_tables_name_no_other() -> None:
    unknown = [name for name in options() if changes.class_of(name) is None]
    assert not unknown, (
        f"classify {unknown} in config/changes.py: what does a change mean for a resumed run?"
    )
    assert set(changes.OPTIONS) <= set(options())
    assert set(changes.SECTIONS) <= {name.partition(".")[0] for name in options()}
    assert {*changes.OPTIONS.values(), *changes.SECTIONS.values()} == set(get_args(changes.Class))


@pytest.mark.parametrize("option", list(options()))
def test_a_change_is_detected_exactly_if_it_matters(option: str) -> None:
    config = Config()
    # An unset batch size follows from the mesh, and is compared as its resolved number.
    config = dataclasses.replace(
        config, training=dataclasses.replace(config.training, global_batch_size=64)
    )
    expected = [option] if option in COMPARED else []

    assert differing(config, changed(config, option)) == expected
    assert differing(config, config) == []


def test_another_mesh_with_the_same_batch_is_the_same_run() -> None:
    of_mesh = Config()
    fixed = changed(Config(), "training.global_batch_size")
    assert differing(fixed, fixed, ranks=(2, 4)) == []
    assert differing(of_mesh, of_mesh, ranks=(2, 4)) == ["training.global_batch_size"]

    halved = dataclasses.replace(
        of_mesh, training=dataclasses.replace(of_mesh.training, local_batch_size=4)
    )

    assert differing(of_mesh, halved, ranks=(2, 4)) == []


def test_a_part_that_restarts_frees_its_options() -> None:
    config = Config()
    for part, option, others in (
        ("optimizer", "optimizer.beta1", ["lr_scheduler.warmup_steps", "training.max_norm"]),
        ("lr_scheduler", "lr_scheduler.warmup_steps", ["optimizer.beta1", "training.max_norm"]),
        ("train_state", "training.max_norm", ["optimizer.beta1"]),
    ):
        assert differing(config, changed(config, option), (part,)) == []
        for other in others:
            assert differing(config, changed(config, other), (part,)) == [other]
    # Weights are loaded, so the model must be the same.
    assert differing(config, changed(config, "model.norm_type"), tuple(changes.FREED)) == [
        "model.norm_type"
    ]


def test_writing_out_a_default_is_not_a_change() -> None:
    plain = Config(training=Training(steps=60), model=Model(overrides={"num_layers": 2}))
    schedule = dataclasses.replace(plain, lr_scheduler=LRScheduler(total_steps=60))
    assert differing(plain, schedule) == [] == differing(schedule, plain)
    assert differing(
        plain, dataclasses.replace(plain, lr_scheduler=LRScheduler(total_steps=61))
    ) == ["lr_scheduler.total_steps"]

    longer = dataclasses.replace(schedule, training=Training(steps=90))
    # The schedule has its own length, so more steps do not change it.
    assert differing(plain, longer) == []
    assert differing(plain, dataclasses.replace(plain, training=Training(steps=90))) == [
        "training.steps"
    ]

    facts = read_model_file(plain.model.name)
    sizes = shape(facts, plain.model.flavor, plain.model.overrides)
    explicit = dataclasses.replace(
        plain, model=Model(overrides={"num_layers": 2, "vocab_size": sizes["vocab_size"]})
    )

    assert differing(plain, explicit) == [] == differing(explicit, plain)
    assert differing(
        plain, dataclasses.replace(plain, model=Model(overrides={"num_layers": 3}))
    ) == ["model.overrides"]


@pytest.mark.parametrize("record", [None, [], 3, {}, {"no.option": 1}])
def test_options_missing_in_an_older_checkpoint_are_not_compared(record: Any) -> None:
    assert changes.find(record, Config(), 1) == []


def test_infinite_numbers_and_hostile_records_stay_one_line_of_json() -> None:
    config = dataclasses.replace(
        Config(), training=dataclasses.replace(Config().training, max_norm=float("inf"))
    )

    assert differing(config, config) == []

    hostile = {"optimizer.lr": "\n\x1b[31m" + "x" * 9999, "training.max_norm": {"a": [None]}}
    for change in changes.find(hostile, Config(), 1):
        assert str(change).isprintable()
        assert len(str(change)) < 500


def problems(*options: str) -> list[str]:
    checkpoint = dataclasses.replace(Config().checkpoint, enable=True, accept_changes=list(options))
    return [
        str(problem)
        for problem in check(Loaded(dataclasses.replace(Config(), checkpoint=checkpoint)))
    ]


def test_only_acceptable_changes_can_be_listed() -> None:
    assert problems("optimizer.lr", "training.max_norm") == problems("all") == []

    (problem,) = problems("optimizer.lrr")
    assert 'did you mean "optimizer.lr"?' in problem
    assert "is not an option" in problem

    (problem,) = problems("metrics.log_freq")
    assert "may be changed freely" in problem

    (problem,) = problems("debug.seed")
    assert 'exclude_from_loading = ["dataloader"]' in problem
