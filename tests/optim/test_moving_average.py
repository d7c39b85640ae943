"""Averages of weights: the numbers of PyTorch's AveragedModel, without a process group."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardtrain.optim.moving_average import MovingAverage

DECAY = 0.9


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)


def train(model: nn.Module) -> None:
    """Change each trained weight, as an update would."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype))


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_equal_those_of_pytorch(dtype: torch.dtype) -> None:
    model = layers(dtype)
    average = MovingAverage(dict(model.named_parameters()), DECAY)
    # PyTorch averages float32 copies, because its averages have the dtype of the weights
    wide = layers().requires_grad_(False)
    wide.load_state_dict(model.state_dict())
    expected = AveragedModel(wide, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    expected.update_parameters(wide)
    for _ in range(5):
        train(model)
        wide.load_state_dict(model.state_dict())
        average.update()
        expected.update_parameters(wide)

    for name, tensor in expected.module.named_parameters():
        assert average.averages[name].dtype == torch.float32
        torch.testing.assert_close(average.averages[name], tensor, atol=1e-6, rtol=0)


def test_frozen_weights_have_no_average() -> None:
    model = layers()
    model[0].requires_grad_(False)
    average = MovingAverage(dict(model.named_parameters()), DECAY)
    assert average.averages.keys() == {"1.weight", "1.bias"}


@pytest.mark.parametrize("applies", [True, False])
def test_device_decides_if_an_update_counts(applies: bool) -> None:
    model = layers()
    on_host = MovingAverage(dict(model.named_parameters()), DECAY)
    on_device = MovingAverage(dict(model.named_parameters()), DECAY)
    train(model)
    if applies:
        on_host.update()
    on_device.update(torch.tensor(applies))

    assert_equal(on_device.averages, on_host.averages)


def test_restart_begins_with_the_current_weights() -> None:
    model = layers()
    average = MovingAverage(dict(model.named_parameters()), DECAY)
    train(model)
    average.restart()
    assert_equal(average.averages, {name: p.detach() for name, p in model.named_parameters()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fails", [False, True])
def test_averages_are_in_the_model_only_inside_the_block(dtype: torch.dtype, fails: bool) -> None:
    model = layers(dtype)
    average = MovingAverage(dict(model.named_parameters()), DECAY)
    train(model)
    average.update()
    weights = copies(model.state_dict())
    averages = copies(average.averages)
    try:
        with average.in_model():
            assert_equal(
                dict(model.state_dict()), {name: a.to(dtype) for name, a in averages.items()}
            )
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails

    assert_equal(dict(model.state_dict()), weights)
    assert_equal(average.averages, averages)
