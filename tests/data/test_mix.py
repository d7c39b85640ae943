"""Mixing: shares are exact, any position is computed directly, and a stage continues where the previous one ended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data.mix import CYCLE, Mixture, Stage

weights = st.lists(st.floats(0, 10), min_size=2, max_size=5).filter(lambda w: sum(w) > 0.1)


def test_equal_weights_alternate():
    sources, numbers = Mixture([Stage((1.0, 1.0))]).locate(np.arange(6))
    assert sources.tolist() == [0, 1, 0, 1, 0, 1]
    assert numbers.tolist() == [0, 0, 1, 1, 2, 2]


@settings(max_examples=25)
@given(weights, st.integers(1, 3000))
def test_every_prefix_contains_each_source_in_its_share(given_weights, length):
    sources, _ = Mixture([Stage(tuple(given_weights))]).locate(np.arange(length))
    share = np.array(given_weights) / sum(given_weights)
    counts = np.bincount(sources, minlength=len(given_weights))

    # Each row is in the middle of its interval. A tie with another source can shift it by one position.
    assert (np.abs(counts - share * length) <= len(given_weights)).all()


@settings(max_examples=25)
@given(weights, weights, st.integers(0, 5000), st.integers(0, 200_000))
def test_row_numbers_of_a_source_have_no_gaps_across_stages(first, second, stop, position):
    count = min(len(first), len(second))
    if sum(first[:count]) <= 0 or sum(second[:count]) <= 0:
        return
    stages = [Stage(tuple(first[:count]), stop), Stage(tuple(second[:count]))]
    mixture = Mixture(stages)
    sources, numbers = mixture.locate(np.arange(position, position + 400))
    before = mixture.rows_before(position)

    assert before.sum() == position

    # Each source continues with the row after those that were drawn before this position.
    for source in range(count):
        numbers_of_source = numbers[sources == source].tolist()
        first_number = int(before[source])
        assert numbers_of_source == [first_number + i for i in range(len(numbers_of_source))]


@settings(max_examples=25)
@given(weights, st.integers(0, 3000), st.integers(0, 100_000))
def test_position_of_a_row_is_computed_without_counting(given_weights, stop, rows):
    mixture = Mixture([Stage(tuple(given_weights), stop), Stage(tuple(reversed(given_weights)))])
    for source in range(len(given_weights)):
        position = mixture.first_position_beyond(source, rows)
        if position is None:
            assert mixture.rows_before(10**9)[source] <= rows
            continue
        located_source, number = mixture.locate(np.array([position]))
        assert (int(located_source[0]), int(number[0])) == (source, rows)


def test_source_without_weight_in_a_stage_is_not_read():
    mixture = Mixture([Stage((1.0, 0.0), 1000), Stage((0.5, 0.5))])
    sources, numbers = mixture.locate(np.arange(2000))
    assert set(sources[:1000].tolist()) == {0}
    assert np.bincount(sources[1000:]).tolist() == [500, 500]
    assert numbers[1000:][sources[1000:] == 1].tolist() == list(range(500))


def test_positions_beyond_a_billion_are_as_cheap_as_the_first():
    shares = (0.7, 0.2, 0.1)
    mixture = Mixture([Stage(shares)])
    sources, numbers = mixture.locate(np.array([10**12]))
    source = int(sources[0])
    number = int(numbers[0])

    assert mixture.rows_before(10**12)[source] == number
    assert number == pytest.approx(10**12 * shares[source], rel=1 / CYCLE)


def test_hundreds_of_sources_need_little_memory():
    import tracemalloc

    tracemalloc.start()
    mixture = Mixture([Stage((1.0,) * 500, 10**9), Stage((1.0,) * 500)])
    sources, numbers = mixture.locate(np.arange(10**9 - 500, 10**9 + 500))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 8 * 2**20, (
        "a full table of 500 sources and 65,536 positions would take 250 MiB per stage"
    )
    assert np.bincount(sources, minlength=500).min() >= 1
    assert numbers.max() >= 10**9 // 500 - 1
