"""The sums that begin a step carry counts, checksum and flags there and back, and add up over ranks exactly."""

from __future__ import annotations

from shardtrain.train.step_sums import StepSums


def test_what_is_packed_is_unpacked() -> None:
    own = StepSums(num_targets=2**40 + 1, num_tokens=2**41, num_rows=7, checksum=2**64 - 3, flags=[1.0, 0.0, 2.0, 0.0])
    assert StepSums.unpack(own.pack()) == own


def test_sums_over_ranks_are_exact() -> None:
    """The checksum is added modulo 2^64, beyond what a float64 holds; a request that comes too late adds 2^20."""
    one = StepSums(num_targets=3, num_tokens=5, num_rows=1, checksum=2**64 - 1, flags=[1.0 + 2**20, 1.0, 0.0, 0.0])
    other = StepSums(num_targets=2**40, num_tokens=2**41, num_rows=2, checksum=5, flags=[0.0, 1.0, 0.0, 1.0])
    found = StepSums.unpack(one.pack() + other.pack())
    assert found == StepSums(2**40 + 3, 2**41 + 5, 3, 4, [1.0 + 2**20, 2.0, 0.0, 1.0])
