"""Whether the data are enough for a run: how long they last, and whether they have anything to learn from."""

from __future__ import annotations

from shardtrain.config.schema import Config, Training
from shardtrain.utils.errors import DataError, fix_first

STEPS_WITHOUT_TARGETS = 10
"""A run ends after so many steps if none of them had a token with loss."""


def check_enough(training: Training, step: int, steps_left: int, total_steps: int) -> str:
    """Judge data that end after ``steps_left`` steps from ``step`` on; gives a line where a run ends early
    as it may.

    Empty where the data last, or where the run is as long as they are (training.epochs).

    Raises:
        DataError: with training.on_data_end = "error".
    """
    last = step + steps_left
    if training.epochs is not None or last >= total_steps:
        return ""
    if training.on_data_end == "error":
        steps = "1 step" if last == 1 else f"{last} steps"
        raise DataError(
            f"training.steps={total_steps} is more than the {steps} that the training data are; use more data, set "
            f'training.steps={last}, or set training.on_data_end to "repeat" (begin again) or "stop" (exit 0)'
        )
    return f"the data end after step {last} of {total_steps}; then training.on_data_end={training.on_data_end}"


def check_has_targets(config: Config, step: int, total_steps: int) -> None:
    """Stop a run that has seen no target on any rank, such as one whose prompts fill each row: no answer is
    left of it.

    Raises:
        DataError: when no token of its first steps had a loss.
    """
    if step < min(STEPS_WITHOUT_TARGETS, total_steps):
        return
    raise DataError(
        fix_first(
            f"the first {step} steps had no token with loss",
            "look at the rows with shardtrain data show, and raise training.seq_len if prompts fill them",
            f'training.seq_len={config.training.seq_len} and data.format="{config.data.format}" leave no target',
        )
    )
