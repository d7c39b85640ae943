"""Parameter groups: every parameter is in exactly one group, and unused patterns are reported."""

from __future__ import annotations

import pytest
from torch import nn

from shardtrain.config.schema import Optimizer
from shardtrain.facts.optimizers import OPTIMIZERS
from shardtrain.optim import build, parameter_groups
from shardtrain.utils.log import kept_warnings


@pytest.fixture
def model():
    layer = nn.ModuleDict({"attn": nn.Linear(2, 2), "attn_norm": nn.LayerNorm(2)})
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(3, 2),
            "layers": nn.ModuleDict({"0": layer}),
            "norm": nn.LayerNorm(2),
        }
    )


def decay_by_name(model, groups):
    """Return the weight decay of each parameter, which must be in exactly one group."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    decay = {}
    for group in groups:
        for parameter in group["params"]:
            name = name_of[parameter]
            assert name not in decay
            decay[name] = group["weight_decay"]
    assert len(decay) == len(name_of)
    return decay


def test_patterns_match_across_dots_and_split_the_parameters(model):
    groups = parameter_groups(model.named_parameters(), ["*norm*", "*.bias"], 0.1)
    decays = decay_by_name(model, groups)
    assert {name for name, decay in decays.items() if decay == 0.1} == {
        "embed.weight",
        "layers.0.attn.weight",
    }
    assert len(groups) == 2


def test_without_patterns_all_parameters_decay(model):
    groups = parameter_groups(model.named_parameters(), [], 0.1)
    assert set(decay_by_name(model, groups).values()) == {0.1}


def test_overlapping_patterns_assign_each_parameter_once(model):
    groups = parameter_groups(model.named_parameters(), ["*", "*norm*"], 0.1)
    assert set(decay_by_name(model, groups).values()) == {0.0}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pattern_without_a_match_is_logged_once(model, name):
    config = Optimizer(name=name, no_weight_decay=["*norm*", "*.gamma"], weight_decay=0.1)
    named = list(model.named_parameters())
    with kept_warnings() as lines:
        optimizer = build(named, config)

    assert len(lines) == 1
    assert lines[0].startswith('optimizer.no_weight_decay="*.gamma" matches no parameter')

    decays = decay_by_name(model, optimizer.param_groups)
    assert {name for name, decay in decays.items() if decay == 0.0} == {
        name for name, _ in named if "norm" in name
    }


def test_pattern_may_match_only_another_pipeline_stage(model):
    names = [name for name, _ in model.named_parameters()]
    stage = [
        (name, parameter) for name, parameter in model.named_parameters() if name.startswith("norm")
    ]
    with kept_warnings() as lines:
        optimizer = build(
            stage, Optimizer(no_weight_decay=["embed*"], weight_decay=0.1), all_names=names
        )

    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [
        (2, 0.1)
    ]
    assert not lines
