"""Batch and sequence ramps: sequences per step, and tokens per sequence, that grow during a run.

``training.batch_ramp`` and ``training.sequence_ramp`` name the step at which each size begins. A run counts the
samples that it has consumed. So the order of the data depends on one number. ``StepSizes`` therefore
converts steps to samples. Both counts agree, unless a rollback skips the data of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardtrain.config.schema import Training

BATCH_RAMP = "training.batch_ramp"
SEQUENCE_RAMP = "training.sequence_ramp"
Stage = tuple[int, int]
"""Number of samples consumed at which a size begins, and the size."""


@dataclass(frozen=True)
class StepSizes:
    """Sizes of steps as a function of the samples consumed.

    Attributes:
        batches: sequences per step over all ranks. The first stage begins at sample 0.
        lengths: tokens per sequence, in the same form. Empty if they are constant.
    """

    batches: tuple[Stage, ...]
    lengths: tuple[Stage, ...] = ()

    def batch_at(self, samples: int) -> int:
        """Return the number of sequences of the step that begins after ``samples`` samples."""
        return _size_at(self.batches, samples)

    def length_at(self, samples: int) -> int | None:
        """Return the tokens per sequence of the step that begins after ``samples`` samples.

        None if the length is constant.
        """
        return _size_at(self.lengths, samples) if self.lengths else None

    def after(self, samples: int, steps: int) -> int:
        """Return the number of samples consumed ``steps`` steps after ``samples``.

        >>> StepSizes(((0, 2), (6, 4))).after(0, 4)
        10
        """
        for stage_start, _ in self.batches[1:]:
            if samples >= stage_start:
                continue
            size = self.batch_at(samples)
            # Round up, because the last step of a size may end within the next stage.
            steps_of_stage = -(-(stage_start - samples) // size)
            if steps < steps_of_stage:
                break
            samples += steps_of_stage * size
            steps -= steps_of_stage
        return samples + steps * self.batch_at(samples)

    def step_of(self, samples: int, row: int) -> int:
        """Return the number of the step that uses the sample ``row``. Step 0 begins after ``samples`` samples.

        >>> [StepSizes(((0, 2), (6, 4))).step_of(0, row) for row in (0, 5, 6, 9, 10)]
        [0, 2, 3, 3, 4]
        """
        steps_before = 0
        for stage_start, _ in self.batches[1:]:
            if samples >= stage_start:
                continue
            size = self.batch_at(samples)
            # Round up, because the last step of a size may end within the next stage.
            steps_of_stage = -(-(stage_start - samples) // size)
            if row < samples + steps_of_stage * size:
                break
            samples += steps_of_stage * size
            steps_before += steps_of_stage
        return steps_before + (row - samples) // self.batch_at(samples)

    def num_steps(self, samples: int, end: int) -> int:
        """Return the number of steps that use the samples from ``samples`` to ``end - 1``."""
        return self.step_of(samples, end - 1) + 1 if end > samples else 0


def step_sizes(training: Training, global_batch_size: int) -> StepSizes:
    """Return the sizes of the steps of a run. ``global_batch_size`` applies without a batch ramp."""
    batches = [(0, global_batch_size)]
    # Convert the step at which each size begins to the samples that all earlier steps consume.
    if training.batch_ramp:
        batches = []
        samples = last_step = size = 0
        for step, next_size in training.batch_ramp:
            samples += (step - last_step) * size
            batches.append((samples, next_size))
            last_step = step
            size = next_size
    sizes = StepSizes(tuple(batches))
    lengths = [(sizes.after(0, step), length) for step, length in training.sequence_ramp]
    return StepSizes(sizes.batches, tuple(lengths))


def batch_sizes(training: Training) -> list[int]:
    """Return all global batch sizes that the options set. Empty if the number of ranks determines the size."""
    if training.batch_ramp:
        return [pair[-1] for pair in training.batch_ramp if pair]
    return [training.global_batch_size] if training.global_batch_size != -1 else []


def sequence_lengths(training: Training) -> list[int]:
    """Return the numbers of tokens per sequence of a run, ascending. The last is ``training.seq_len``."""
    lengths = [pair[-1] for pair in training.sequence_ramp if pair]
    return lengths or [training.seq_len]


def describe(training: Training) -> list[str]:
    """Return a line for each ramp.

    >>> from shardtrain.config.schema import Training
    >>> describe(Training(batch_ramp=[[0, 32], [1000, 64]]))
    ['training.batch_ramp: 32 sequences per step, 64 from step 1000']
    """
    lines = []
    for option, ramp, unit in (
        (BATCH_RAMP, training.batch_ramp, "sequences per step"),
        (SEQUENCE_RAMP, training.sequence_ramp, "tokens per sequence"),
    ):
        if ramp:
            parts = [f"{ramp[0][1]} {unit}"]
            parts += [f"{size} from step {step}" for step, size in ramp[1:]]
            lines.append(f"{option}: {', '.join(parts)}")
    return lines


def _size_at(stages: Sequence[Stage], samples: int) -> int:
    size = stages[0][1]
    for start, later_size in stages[1:]:
        if samples >= start:
            size = later_size
    return size
