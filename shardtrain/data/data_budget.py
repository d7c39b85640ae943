"""Whether the data last for the steps of a run: said when the run begins, where that is known then."""

from __future__ import annotations

from shardtrain.config.schema import Training
from shardtrain.utils.errors import DataError


def check_enough(training: Training, step: int, steps_left: int, total_steps: int) -> str:
    """Judge data that end after ``steps_left`` steps from ``step`` on; gives a line where a run ends early as it may.

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
