"""The sample order: a new permutation every epoch, computed from the position only, and never changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data.order import MAX_SAMPLES, sample_at

quick = settings(max_examples=40, derandomize=True)


@quick
@given(n=st.integers(1, 3000), epoch=st.integers(0, 2**40), seed=st.integers(-(2**63), 2**64))
def test_every_epoch_visits_every_sample_exactly_once(n, epoch, seed):
    order = sample_at(epoch * n + np.arange(n), n, seed)
    assert np.array_equal(np.sort(order), np.arange(n))


@quick
@given(
    n=st.integers(1, MAX_SAMPLES),
    seed=st.integers(0, 2**64),
    positions=st.lists(st.integers(0, MAX_SAMPLES), min_size=1, max_size=30),
)
def test_sample_of_a_position_does_not_depend_on_the_batch(n, seed, positions):
    together = sample_at(positions, n, seed)
    assert together.tolist() == [int(sample_at(p, n, seed)) for p in positions]
    assert sample_at(positions[::-1], n, seed).tolist() == together.tolist()[::-1]
    assert ((together >= 0) & (together < n)).all()


@pytest.mark.parametrize("n", [63, 64, 65, 1003, 4096])
def test_epochs_and_seeds_give_different_orders(n):
    orders = set()
    for seed in range(4):
        for epoch in range(8):
            positions = epoch * n + np.arange(n)
            orders.add(sample_at(positions, n, seed).tobytes())

    assert len(orders) == 4 * 8


@pytest.mark.parametrize("n", [2, 3, 5, 8, 50])
def test_each_slot_holds_each_sample_equally_often_over_epochs(n):
    epochs = 4000
    samples = sample_at(np.arange(epochs * n), n, seed=1).reshape(epochs, n)
    expected = epochs / n
    for slot in {0, n // 2, n - 1}:
        counts = np.bincount(samples[:, slot], minlength=n)
        # Chi-square with n - 1 degrees of freedom has mean n - 1 and variance 2 (n - 1). The limit is 5
        # standard deviations plus a margin.
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < (n - 1) + 5 * np.sqrt(2 * (n - 1)) + 10


def test_slots_and_neighbors_are_uncorrelated():
    n = 20_000
    order = sample_at(np.arange(n), n, seed=7)
    following = sample_at(n + np.arange(n), n, seed=7)

    # The correlation of two independent orders has the standard deviation 1 / sqrt(n) = 0.007.
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.035
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.035
    assert abs(np.corrcoef(order, following)[0, 1]) < 0.035


def test_order_never_changes_between_versions():
    # Checkpoints store only a position, so a new order would repeat and skip samples.
    assert sample_at(range(10), 10, 42).tolist() == [8, 7, 1, 2, 5, 6, 9, 4, 3, 0]
    assert sample_at(range(8), 1003, 0).tolist() == [363, 34, 511, 375, 392, 646, 280, 791]
    assert sample_at([0, 1, 2, 7, 8], 3, -1).tolist() == [1, 0, 2, 2, 1]

    # Large numbers of samples, and seeds and positions with many bits
    samples = sample_at(range(5), 10**6, 17982163893102248868).tolist()
    assert samples == [534365, 771816, 875574, 308633, 799383]
    samples = sample_at([0, 10**9, 2**61], 2**62, 42).tolist()
    assert samples == [4449239426648221457, 711354445829857801, 2799807743355470267]


def test_result_has_the_shape_of_the_positions():
    assert sample_at(np.arange(6).reshape(2, 3), 10, 0).shape == (2, 3)
    assert sample_at(4, 10, 0).shape == ()
    assert sample_at([], 10, 0).shape == (0,)


@pytest.mark.parametrize(
    ("position", "n"), [(0, 0), (0, -3), (0, MAX_SAMPLES + 1), (-1, 5), (MAX_SAMPLES + 1, 5)]
)
def test_numbers_out_of_range_are_rejected(position, n):
    with pytest.raises(ValueError, match=r"2\*\*62"):
        sample_at(position, n, 0)
