"""Simulated pipelines: bubbles match the formulas, and no schedule deadlocks."""

from __future__ import annotations

import pytest

from shardtrain.tools.plan import schedule


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("degree", "count"), [(2, 2), (4, 8), (8, 32)])
def test_the_bubble_of_one_stage_per_rank_matches_the_formula(name, degree, count):
    seconds = {
        (kind, stage): time for stage in range(degree) for kind, time in (("F", 1.0), ("B", 2.0))
    }
    line = schedule.simulate(schedule.orders(name, degree, degree, count), seconds, 0.0)
    assert line.seconds == pytest.approx(3 * (count + degree - 1))
    assert line.bubble == pytest.approx((degree - 1) / (count + degree - 1))


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_every_schedule_of_pytorch_runs_to_its_end_and_computes_each_part_once(name):
    degree = 4
    count = 8
    orders = schedule.orders(name, degree, 2 * degree, count)
    times = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    seconds = {(kind, stage): time for stage in range(2 * degree) for kind, time in times.items()}
    line = schedule.simulate(orders, seconds, 0.0)

    assert line.busy_seconds == pytest.approx([3.0 * 2 * count] * degree)
    assert line.seconds < schedule.simulate(schedule.orders("GPipe", degree, degree, count), {
        (kind, stage): 2 * time for stage in range(degree) for kind, time in times.items()
    }, 0.0).seconds  # fmt: skip


def test_sends_take_time_once_per_direction():
    seconds = {(kind, stage): 1.0 for stage in range(2) for kind in "FB"}
    orders = schedule.orders("1F1B", 2, 2, 1)
    assert schedule.simulate(orders, seconds, 0.5).seconds == pytest.approx(5.0)
