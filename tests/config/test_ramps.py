"""Sizes of steps during a ramp equal those of a loop that counts steps and samples."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardtrain.config.ramps import StepSizes, step_sizes
from shardtrain.config.schema import Training

increasing = st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True).map(sorted)


@st.composite
def ramps(draw) -> list[list[int]]:
    sizes = draw(increasing)
    gaps = draw(st.lists(st.integers(1, 5), min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    steps = [0]
    for gap in gaps:
        steps.append(steps[-1] + gap)
    return [list(pair) for pair in zip(steps, sizes, strict=True)]


def size_of_step(ramp: list[list[int]], step: int) -> int:
    return [size for first_step, size in ramp if first_step <= step][-1]


@given(ramps(), ramps())
def test_each_step_has_its_size_in_the_ramp(batch_ramp, sequence_ramp):
    training = Training(batch_ramp=batch_ramp, sequence_ramp=sequence_ramp)
    sizes = step_sizes(training, global_batch_size=3)
    samples = 0
    for step in range(25):
        assert sizes.after(0, step) == samples
        assert sizes.batch_at(samples) == size_of_step(batch_ramp, step)
        assert sizes.length_at(samples) == size_of_step(sequence_ramp, step)
        samples += sizes.batch_at(samples)


@given(ramps(), st.integers(0, 60), st.integers(0, 80))
def test_steps_from_any_position_use_consecutive_rows(batch_ramp, start, count):
    """A run may resume in the middle of a step of the ramp if its earlier steps had other batch sizes."""
    sizes = step_sizes(Training(batch_ramp=batch_ramp), global_batch_size=3)
    starts = [start]
    while starts[-1] <= start + count:
        starts.append(starts[-1] + sizes.batch_at(starts[-1]))

    for step, (first, after) in enumerate(pairwise(starts)):
        assert sizes.after(start, step) == first
        for row in range(first, after):
            assert sizes.step_of(start, row) == step
        assert sizes.num_steps(start, after) == step + 1
    assert sizes.num_steps(start, start) == 0


def test_constant_sizes_have_one_stage():
    assert step_sizes(Training(), global_batch_size=3) == StepSizes(((0, 3),))
