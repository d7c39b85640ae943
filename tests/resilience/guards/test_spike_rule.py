"""The guard of losses: its rule for spikes, its limit on skipped steps, and its state in a checkpoint."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable

import pytest
from tiers import cases

from shardtrain.resilience.guards.loss_spikes import RECENT_STEPS, Guard, Rewind
from shardtrain.utils.errors import CheckpointError


def test_spike_is_a_number_of_standard_deviations_above_the_mean() -> None:
    rng = random.Random(0)
    guard = Guard()
    values = [rng.gauss(3, 0.1) for _ in range(200)]
    for value in values:
        guard.add(value, 1.0, 128)
    mean = statistics.fmean(values[-128:])
    spread = statistics.stdev(values[-128:])

    assert guard.find_spike(mean + 5.99 * spread, 1.0, 128, 6) == ""
    assert guard.find_spike(mean + 6.01 * spread, 1.0, 128, 6).startswith("the loss 3.")
    assert guard.find_spike(mean - 20 * spread, 1.0, 128, 6) == ""
    assert "the gradient norm 10.1 is far above the 1 ± 0" in guard.find_spike(3.0, 10.1, 128, 6)
    assert guard.find_spike(3.0, 9.9, 128, 6) == ""
    # differences by rounding are not spikes
    assert guard.find_spike(3.0, 1.0 + 1e-7, 128, 6) == ""


def spikes_of(series: Iterable[tuple[float, float]]) -> list[int]:
    """Return the steps at which the rule finds a spike, with the defaults of [training]."""
    guard = Guard()
    steps = []
    for step, (loss, norm) in enumerate(series):
        if guard.find_spike(loss, norm, 128, 6.0):
            steps.append(step)
        guard.add(loss, norm, 128)
    return steps


def healthy(seed: int, steps: int) -> list[tuple[float, float]]:
    """Return a falling loss, and gradient norms with the long tail that small batches cause."""
    rng = random.Random(seed)
    series = []
    for step in range(steps):
        loss = 2.0 + 5.0 / (1 + step / 50) + rng.gauss(0, 0.15)
        norm = rng.lognormvariate(0, 0.25) + rng.expovariate(3.0)
        series.append((loss, norm))
    return series


@pytest.mark.parametrize("seed", cases([0], nightly=range(1, 8)))
def test_only_true_spikes_are_reported(seed: int) -> None:
    steps = 5_300
    series = healthy(seed, steps)
    assert spikes_of(series) == []

    rng = random.Random(seed)
    # adds ten standard deviations to the loss, or sets the norm to 26
    for size, part in (
        (1.5, 0),
        (20.0, 1),
    ):
        places = sorted(rng.sample(range(500, steps, 300), 5))
        changed = list(series)
        for place in places:
            loss, norm = changed[place]
            changed[place] = (loss + size, norm) if part == 0 else (loss, 1.3 * size)
        assert spikes_of(changed) == places


def test_rule_starts_when_half_of_the_window_is_full() -> None:
    for window, least in ((128, 64), (30, 20), (20, 20), (6, 6), (2, 2)):
        guard = Guard()
        for count in range(least + 1):
            assert bool(guard.find_spike(100.0, 1.0, window, 6)) == (count >= least), (
                window,
                count,
            )
            guard.add(1.0 + 1e-3 * (count % 2), 1.0, window)


def test_higher_loss_that_stays_is_a_spike_for_four_steps() -> None:
    guard = Guard()
    for step in range(128):
        guard.add(2.0 + 1e-3 * (step % 2), 1.0, 128)
    spikes = []
    for _ in range(20):
        spikes.append(bool(guard.find_spike(5.0, 1.0, 128, 6)))
        guard.add(5.0, 1.0, 128)

    assert spikes == [True] * 4 + [False] * 16


@pytest.mark.parametrize(
    ("fraction", "allowed"), [(0.01, 10), (0.0, 0), (0.0105, 10), (1.0, RECENT_STEPS)]
)
def test_skips_within_a_thousand_steps_are_limited(fraction: float, allowed: int) -> None:
    guard = Guard()
    results = [guard.may_skip(step, fraction) for step in range(1, RECENT_STEPS + 1)]
    assert results == [True] * allowed + [False] * (RECENT_STEPS - allowed)
    if 0 < allowed < RECENT_STEPS:  # the first skip is now a thousand steps old
        assert guard.may_skip(RECENT_STEPS + 1, fraction)
        all_recent = Guard(skipped_steps=list(range(2, 2 + allowed)))
        assert not all_recent.may_skip(RECENT_STEPS + 1, fraction)


def test_steps_that_contain_skipped_rows_are_left_out() -> None:
    guard = Guard(rewinds=[Rewind(9, 4, 40, 56), Rewind(9, 4, 50, 60)])
    assert [guard.excludes(row, row + 8) for row in (24, 32, 40, 56, 64)] == [
        False,
        False,
        True,
        True,
        False,
    ]

    for first in range(0, 70, 3):
        for step in (4, 8, 16):

            def step_of(row: int, first: int = first, step: int = step) -> int:
                return (row - first) // step

            starts = range(first, 96, step)
            expected = sum(guard.excludes(row, min(row + step, 96)) for row in starts)
            assert guard.num_excluded_steps(first, 96, step_of) == expected, (first, step)


def test_state_survives_json_and_bad_state_is_refused() -> None:
    guard = Guard([1.5, 0.1], [2.0, 1 / 3], [4, 7], 3, [Rewind(9, 4, 40, 56)])
    other = Guard()
    other.load(json.loads(json.dumps(guard.to_dict())))

    assert other == guard

    good = guard.to_dict()
    for name, bad in (
        ("losses", None),
        ("losses", [1.0]),
        ("losses", [1.0, float("nan")]),
        ("grad_norms", ["1", 2.0]),
        ("skipped_steps", [-1]),
        ("skipped_steps", [True]),
        ("spikes", 1.0),
        ("rewinds", [[1, 2, 3]]),
        ("rewinds", [1]),
        ("rewinds", {}),
    ):
        with pytest.raises(CheckpointError, match="the guard's state"):
            Guard().load({**good, name: bad})
