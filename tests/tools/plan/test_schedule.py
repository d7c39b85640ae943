"""Simulated pipelines: bubbles match the formulas, and no schedule deadlocks."""

from __future__ import annotations

import pytest

from shardtrain.tools.plan import schedule


def seconds_of_stages(num_stages, **seconds_of_kinds):
    """Return the seconds of each kind of computation (F, B, I, W) per stage, equal for all stages."""
    seconds = {}
    for stage in range(num_stages):
        for kind, time in seconds_of_kinds.items():
            seconds[kind, stage] = time
    return seconds


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("degree", "count"), [(2, 2), (4, 8), (8, 32)])
def test_the_bubble_of_one_stage_per_rank_matches_the_formula(name, degree, count):
    orders = schedule.orders(name, degree, degree, count)
    seconds = seconds_of_stages(degree, F=1.0, B=2.0)
    line = schedule.simulate(orders, seconds, 0.0)

    assert line.seconds == pytest.approx(3 * (count + degree - 1))
    assert line.bubble == pytest.approx((degree - 1) / (count + degree - 1))


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_every_schedule_of_pytorch_runs_to_its_end_and_computes_each_part_once(name):
    degree = 4
    count = 8
    orders = schedule.orders(name, degree, 2 * degree, count)
    seconds = seconds_of_stages(2 * degree, F=1.0, B=2.0, I=1.0, W=1.0)
    line = schedule.simulate(orders, seconds, 0.0)

    assert line.busy_seconds == pytest.approx([3.0 * 2 * count] * degree)

    # GPipe splits the same model into half as many stages, so each takes twice as long.
    orders_of_gpipe = schedule.orders("GPipe", degree, degree, count)
    seconds_of_gpipe = seconds_of_stages(degree, F=2.0, B=4.0, I=2.0, W=2.0)
    gpipe = schedule.simulate(orders_of_gpipe, seconds_of_gpipe, 0.0)
    assert line.seconds < gpipe.seconds


def test_sends_take_time_once_per_direction():
    seconds = seconds_of_stages(2, F=1.0, B=1.0)
    orders = schedule.orders("1F1B", 2, 2, 1)
    # 2 forward passes (1 s), 2 backward passes (1 s), and a send in each direction (0.5 s)
    assert schedule.simulate(orders, seconds, 0.5).seconds == pytest.approx(5.0)
