"""The counters of a run. Every counter that must survive a resume is a field here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from shardtrain.utils.checked_json import is_count
from shardtrain.utils.errors import CheckpointError


@dataclass
class TrainState:
    """Counts since the start of the run, equal on all ranks and independent of their number."""

    step: int = 0
    """Steps taken, whether or not their update was applied."""
    updates: int = 0
    """Updates applied; the learning rate is a function of it, so a skipped update does not advance the schedule."""
    samples_consumed: int = 0
    """Sequences read over all ranks: the position in the order of the data."""
    tokens_seen: int = 0
    """Target tokens trained on over all ranks."""
    nonfinite_skips: int = 0
    """Updates skipped in a row because a loss or gradient was not finite."""

    order_hash: int = 0
    """One number for all rows seen so far, in order (see ``data.checksum``)."""

    def advance(
        self, samples_consumed: int, tokens: int, row_hashes: int, applied: bool = True, finite: bool = False
    ) -> None:
        """Count one step; ``applied`` says whether it was an update, ``samples_consumed`` is the position after it."""
        self.step += 1
        self.updates += applied
        self.nonfinite_skips = 0 if applied or finite else self.nonfinite_skips + 1
        self.samples_consumed = samples_consumed
        self.tokens_seen += tokens
        self.order_hash = (self.order_hash + row_hashes) % 2**64

    def to_dict(self) -> dict[str, int]:
        """Plain numbers for a checkpoint."""
        return asdict(self)

    def load(self, values: dict[str, Any]) -> None:
        """Take the counters of a checkpoint; raises CheckpointError when one is missing or is not a count."""
        for field in fields(self):
            value = values.get(field.name)
            # the hash has 64 bits, the others are counts
            if not is_count(value, most=2**64 - 1 if field.name == "order_hash" else 2**62):
                raise CheckpointError(f"train state: {field.name}={value!r} is not a count; use another checkpoint")
            setattr(self, field.name, value)
