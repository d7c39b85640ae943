"""The loss scale halves on overflow, doubles after consecutive finite steps, and stays in the range of float16."""

from __future__ import annotations

import math

import pytest

from shardtrain.optim import LossScaler
from shardtrain.optim.grad_scaler import LARGEST, SMALLEST
from shardtrain.utils.errors import CheckpointError, ConfigError


def test_overflow_skips_the_update_and_halves_the_scale():
    scaler = LossScaler(1024.0, growth_interval=3)
    assert scaler.update(finite=False) is False
    assert scaler.scale == 512.0
    assert scaler.update(finite=True) is True
    assert scaler.scale == 512.0


def test_scale_doubles_only_after_consecutive_finite_steps():
    scaler = LossScaler(8.0, growth_interval=3)
    scales = []
    for finite in (True, True, False, True, True, True, True, True, True):
        scaler.update(finite)
        scales.append(scaler.scale)

    assert scales == [8, 8, 4, 4, 4, 8, 8, 8, 16]


def test_scale_stays_within_its_bounds():
    scaler = LossScaler(1.0, growth_interval=1)
    for _ in range(100):
        scaler.update(finite=False)
    assert scaler.scale == SMALLEST == 2**-14

    for _ in range(100):
        scaler.update(finite=True)
    assert scaler.scale == LARGEST


def test_loaded_state_continues_the_count_of_finite_steps():
    outcomes = [True, False, True, True, True, True]
    straight = LossScaler(2.0**16, growth_interval=4)
    first = LossScaler(2.0**16, growth_interval=4)
    second = LossScaler(2.0**16, growth_interval=4)
    for finite in outcomes:
        straight.update(finite)
    for finite in outcomes[:4]:
        first.update(finite)
    second.load(first.state())
    for finite in outcomes[4:]:
        second.update(finite)

    assert second.state() == straight.state() == {"scale": 2.0**16, "finite_steps": 0}


def test_scale_grows_with_a_shorter_interval_after_loading():
    scaler = LossScaler(4.0, growth_interval=2)
    scaler.load({"scale": 4.0, "finite_steps": 100})
    scaler.update(finite=True)
    assert scaler.scale == 8.0


@pytest.mark.parametrize("initial", [0.0, -1.0, math.inf, math.nan, 2.0**25])
def test_initial_scale_out_of_range_is_rejected(initial):
    with pytest.raises(ConfigError, match=r"training.initial_loss_scale"):
        LossScaler(initial, 2000)


def test_interval_below_one_is_rejected():
    with pytest.raises(ConfigError, match=r"training.loss_scale_growth_interval=0"):
        LossScaler(2.0, 0)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": 2.0},
        {"scale": math.nan, "finite_steps": 0},
        {"scale": 2.0, "finite_steps": -1},
    ],
)
def test_invalid_state_is_rejected(state):
    with pytest.raises(CheckpointError, match="loss scaler"):
        LossScaler(2.0, 5).load(state)
