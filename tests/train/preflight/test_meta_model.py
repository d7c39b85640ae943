"""Checks on the meta model before ranks start: empty pipeline ranks, and float8 options that match no module."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny import tiny_config

from shardtrain import models, optim
from shardtrain.config import stages
from shardtrain.config.schema import Lora, Parallelism
from shardtrain.distributed.pipeline_parallel import stage
from shardtrain.lora import spec
from shardtrain.train.preflight.meta_model import build
from shardtrain.utils.errors import ConfigError

LAYERS = ["layers.0", "layers.1", "layers.2", "layers.3"]
CUTS = {
    "layers on each rank": ("1F1B", [["embed", *LAYERS[:2]], [*LAYERS[2:], "norm", "head"]]),
    "only an embedding": ("1F1B", [["embed"], [*LAYERS, "norm", "head"]]),
    "only a head": ("1F1B", [["tok_embeddings", *LAYERS], ["norm", "output"]]),
    "both ends on one rank": (
        "ZBVZeroBubble",
        [["embed"], LAYERS[:2], LAYERS[2:], ["norm", "head"]],
    ),
    "ends on two ranks": ("Interleaved1F1B", [["embed"], LAYERS[:2], LAYERS[2:], ["norm", "head"]]),
}


@pytest.mark.parametrize("saved", [(), ("embed",), ("head",), ("embed", "head")])
@pytest.mark.parametrize("name", CUTS)
def test_pipeline_rank_without_parameters_to_train_is_rejected_before_ranks_start(
    name: str, saved: tuple[str, ...]
) -> None:
    """The check agrees with the optimizers that ranks would build."""
    schedule, parts = CUTS[name]
    config = replace(
        tiny_config(),
        parallelism=Parallelism(
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule=schedule,
            module_fqns_per_model_part=[list(part) for part in parts],
        ),
        lora=Lora(
            enable=True,
            random_base=True,
            target_modules=["layers.*.attn.wq"],
            modules_to_save=list(saved),
        ),
    )
    config = replace(
        config, model=replace(config.model, overrides={**config.model.overrides, "num_layers": 4})
    )
    module = models.find(config.model.name)
    shape = models.shape_of(
        module, config.model.flavor, config.model.overrides, config.model.norm_type
    )
    with torch.device("meta"):
        model = models.build(module, shape)
    spec.adapt(model, module, shape, config.lora, False)
    # The parts use names of torchtitan, and the model uses ours.
    torchtitan_names = {"tok_embeddings": "embed", "output": "head"}
    all_modules = []
    modules_of_parts = []
    for part in parts:
        modules = [torchtitan_names.get(name, name) for name in part]
        modules_of_parts.append(modules)
        all_modules += modules
    assert all_modules == ["embed", *LAYERS, "norm", "head"]

    failing_ranks = []
    for rank in range(2):
        parameters_of_rank = []
        for index in stages.stages_of_rank(schedule, rank, 2, len(parts)):
            modules_of_stage = set(modules_of_parts[index])
            part = stage(copy.deepcopy(model), module.LAYOUT, modules_of_stage)
            parameters_of_rank += list(part.named_parameters())
        try:
            optim.build(parameters_of_rank, config.optimizer)
        except ConfigError:
            failing_ranks.append(rank)

    errors, parameters = build(config)
    assert bool(errors) == bool(failing_ranks)
    assert (parameters is None) == bool(failing_ranks)
    if errors:
        message = f"leaves pipeline rank {failing_ranks[0]} without a parameter to train"
        assert message in str(errors[0])


@pytest.mark.parametrize(
    ("layers", "sections", "problem"),
    [
        (2, {"filter_fqns": ["attn"]}, ""),
        (1, {}, "quantize.grouped_mm.float8.fqns=['experts'] names no experts of this model"),
        (
            2,
            {"filter_fqns": ["nothing"]},
            "contains 'nothing', which matches no module of this model",
        ),
        (2, {"filter_fqns": ["layers", "head"]}, "leaves no linear layer to compute in float8"),
    ],
)
def test_float8_options_that_match_no_module_are_rejected_before_ranks_start(
    layers: int, sections: dict[str, list[str]], problem: str
) -> None:
    config = tiny_config(
        model={
            "name": "llama4",
            "flavor": "debugmodel",
            "overrides": {"num_layers": layers, "interleave_moe_layer_step": 2},
            "converters": ["quantize.linear.float8", "quantize.grouped_mm.float8"],
        }
    )
    linear = config.quantize.linear
    linear = replace(linear, float8=replace(linear.float8, emulate=True, **sections))
    experts = config.quantize.grouped_mm
    experts = replace(experts, float8=replace(experts.float8, emulate=True, fqns=["experts"]))
    quantize = replace(config.quantize, linear=linear, grouped_mm=experts)
    errors, _ = build(replace(config, quantize=quantize))

    assert problem in "".join(map(str, errors))
    assert bool(errors) == bool(problem)
