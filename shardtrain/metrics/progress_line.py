"""Live progress line below the log: step, loss, speed and remaining time."""

from __future__ import annotations

from shardtrain.metrics.step_record import TOTAL_SPEED, Record
from shardtrain.utils.progress import Progress
from shardtrain.utils.units import format_seconds


class ProgressLine(Progress):
    """Progress of a run, drawn at the end of each step, and by ``wait`` during a long step."""

    def __init__(self, total_steps: int, start_step: int, color: bool = True) -> None:
        self._total_steps = total_steps
        self._step = start_step
        self._record: Record | None = None
        super().__init__("", max(total_steps, 1), start_step, color)
        self.step(start_step)

    def step(self, step: int, record: Record | None = None) -> None:
        """Move to ``step``. ``record`` is the record of the step if it was logged."""
        self._step = step
        self._record = record or self._record
        self.show(step, texts(step, self._total_steps, self._record), at_once=record is not None)

    def wait(self, what: str) -> None:
        """Show ``what`` instead of the step number, until the next step."""
        _, *others = texts(self._step, self._total_steps, self._record)
        self.show(self._step, [what, *others], at_once=True)


def texts(step: int, total_steps: int, record: Record | None) -> list[str]:
    """Return the columns of the line: the step, and loss, speed and remaining time of the last logged step."""
    words = [f"step {step}/{total_steps}"]
    if record is not None:
        left = (total_steps - step) * record.step_seconds
        words += [
            f"loss {record.loss:.4f}" if record.has_targets else "no targets",
            f"{record.tokens_per_second:,.0f} {TOTAL_SPEED}",
            f"{format_seconds(left)} left",
        ]
    return words
