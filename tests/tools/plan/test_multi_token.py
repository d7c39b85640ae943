"""``plan`` counts layers of multi-token prediction on the last pipeline stage."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from tiny import tiny_config

from shardtrain import models
from shardtrain.config.schema import Config
from shardtrain.tools.plan import job_sizes, shapes
from shardtrain.tools.plan.parameter_shards import parameters_of_stage

SHAPE = {
    "vocab_size": 512,
    "dim": 64,
    "num_layers": 4,
    "num_dense_layers": 1,
    "ffn_dim": 128,
    "moe_ffn_dim": 32,
    "num_experts": 8,
}


def config(depths: int, stages: int) -> Config:
    tiny = tiny_config(parallelism={"pipeline_parallel_degree": stages})
    overrides = {**SHAPE, "num_nextn_predict_layers": depths}
    model = replace(tiny.model, name="deepseek_v3", flavor="debugmodel", overrides=overrides)
    return replace(tiny, model=model)


@pytest.mark.parametrize("stages", [1, 2])
def test_each_parameter_is_on_its_stage(stages: int) -> None:
    settings = config(2, stages)
    shape = shapes.read(settings)
    job = job_sizes.of_config(settings, stages, len(shape.layers), 1, shape.has_experts)

    assert job.stages[-1].stop == 6

    counts = []
    for index in range(stages):
        parameters = parameters_of_stage(shape, job, index)
        counts.append(sum(prod(parameter.shape) for parameter in parameters))
    module, fields = models.configured(settings.model)
    model = models.build(module, fields)
    expected = sum(parameter.numel() for parameter in model.parameters())
    if stages > 1:
        expected += model.embed.weight.numel()

    assert sum(counts) == expected
