"""The counters of a run that survive a resume."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from shardtrain.utils.checked_json import is_count
from shardtrain.utils.errors import CheckpointError


@dataclass
class TrainState:
    """Counters since the start of the run. Equal on all ranks, and independent of the number of ranks.

    Attributes:
        step: Steps, including those with a skipped update.
        updates: Applied updates. The learning rate depends on it, so a skipped update does not
            advance the schedule.
        samples_consumed: Sequences read by all ranks: the position in the data order.
        tokens_seen: Target tokens trained on by all ranks.
        nonfinite_skips: Consecutive updates that were skipped because a loss or gradient was not finite.
        order_hash: Hash of all rows read so far, in order (see ``data.checksum``).
    """

    step: int = 0
    updates: int = 0
    samples_consumed: int = 0
    tokens_seen: int = 0
    nonfinite_skips: int = 0
    order_hash: int = 0

    def advance(
        self,
        samples_consumed: int,
        tokens: int,
        row_hashes: int,
        applied: bool = True,
        finite: bool = False,
    ) -> None:
        """Count one step.

        Args:
            samples_consumed: The position in the data order after the step.
            applied: The update was applied.
            finite: Loss and gradients were finite.
        """
        self.step += 1
        self.updates += applied
        self.nonfinite_skips = 0 if applied or finite else self.nonfinite_skips + 1
        self.samples_consumed = samples_consumed
        self.tokens_seen += tokens
        self.order_hash = (self.order_hash + row_hashes) % 2**64

    def to_dict(self) -> dict[str, int]:
        """Return the counters for a checkpoint."""
        return asdict(self)

    def load(self, values: dict[str, Any]) -> None:
        """Load the counters of a checkpoint. Raises CheckpointError if one is missing or invalid."""
        for field in fields(self):
            value = values.get(field.name)
            most = 2**64 - 1 if field.name == "order_hash" else 2**62
            if not is_count(value, most=most):
                raise CheckpointError(
                    f"train state: {field.name}={value!r} is not a count; use another checkpoint",
                )
            setattr(self, field.name, value)
