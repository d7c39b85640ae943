"""Values that follow from a configuration."""

from __future__ import annotations

import pytest

from shardtrain.config.derived import model_label
from shardtrain.config.schema import Model


@pytest.mark.parametrize(
    ("overrides", "num_params", "label"),
    [
        ({}, None, "qwen2 0.5B"),
        ({}, 494_032_768, "qwen2 0.5B"),
        ({"dim": 64, "num_layers": 2}, 345_280, "qwen2 345.28K"),
        ({"dim": 64, "num_layers": 2}, None, "qwen2"),
    ],
)
def test_a_model_with_overrides_is_labelled_by_its_counted_parameters(
    overrides, num_params, label
) -> None:
    assert model_label(Model("qwen2", "0.5B", overrides=overrides), num_params) == label
