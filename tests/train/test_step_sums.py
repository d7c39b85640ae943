"""The all-reduce at the beginning of a step: counts, checksum and flags round-trip and add up exactly."""

from __future__ import annotations

from shardtrain.train.step_sums import StepSums


def test_step_sums_round_trip() -> None:
    sums = StepSums(
        num_targets=2**40 + 1,
        num_tokens=2**41,
        num_rows=7,
        checksum=2**64 - 3,
        flags=[1.0, 0.0, 2.0, 0.0],
    )

    assert StepSums.unpack(sums.pack()) == sums


def test_sums_over_ranks_are_exact() -> None:
    """Checksums are added modulo 2^64, beyond the precision of float64. A late stop request adds 2^20 to a flag."""
    first = StepSums(
        num_targets=3,
        num_tokens=5,
        num_rows=1,
        checksum=2**64 - 1,
        flags=[1.0 + 2**20, 1.0, 0.0, 0.0],
    )
    second = StepSums(
        num_targets=2**40, num_tokens=2**41, num_rows=2, checksum=5, flags=[0.0, 1.0, 0.0, 1.0]
    )
    total = StepSums.unpack(first.pack() + second.pack())

    assert total == StepSums(2**40 + 3, 2**41 + 5, 3, 4, [1.0 + 2**20, 2.0, 0.0, 1.0])
