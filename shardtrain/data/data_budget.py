"""Check that the data are enough for all steps of a run, and that they contain tokens to learn."""

from __future__ import annotations

from shardtrain.config.schema import Config, Training
from shardtrain.utils.errors import DataError, fix_first

STEPS_WITHOUT_TARGETS = 10
"""A run ends with an error if this number of steps at its start have no target."""


def check_enough(training: Training, step: int, steps_left: int, total_steps: int) -> str:
    """Check that the data are enough for a run. Return a line for the log if they end early, else "".

    If the data determine the length of the run (training.epochs), they are always enough.

    Args:
        training: the options of the run.
        step: number of steps that the run has already made.
        steps_left: number of steps for which there are data left.
        total_steps: number of steps of the run.

    Raises:
        DataError: there are not enough data, and training.on_data_end is "error".
    """
    last = step + steps_left
    if training.epochs is not None or last >= total_steps:
        return ""
    if training.on_data_end == "error":
        steps = "1 step" if last == 1 else f"{last} steps"
        raise DataError(
            f"training.steps={total_steps} exceeds the {steps} of training data; use more data, set "
            f'training.steps={last}, or set training.on_data_end to "repeat" (begin again) or "stop" (exit 0)'
        )
    return f"the data end after step {last} of {total_steps}; then training.on_data_end={training.on_data_end}"


def check_has_targets(config: Config, step: int, total_steps: int) -> None:
    """Stop a run whose data have no targets, for example because prompts fill all rows.

    Raises:
        DataError: the first steps had no target token.
    """
    if step < min(STEPS_WITHOUT_TARGETS, total_steps):
        return
    raise DataError(
        fix_first(
            f"the first {step} steps had no target token",
            "look at the rows with shardtrain data show, and raise training.seq_len if prompts fill them",
            f'training.seq_len={config.training.seq_len} and data.format="{config.data.format}" leave no target',
        )
    )
