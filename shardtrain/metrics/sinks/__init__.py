"""Metric sinks: console, ``metrics.jsonl``, TensorBoard, Weights & Biases, other services, and the user's files.

A sink never stops training. If it cannot write, it logs one warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardtrain.config.schema import Config
from shardtrain.metrics.step_record import Record, RunFacts


class Sink(Protocol):
    """A destination of metrics. An optional attribute ``summary`` is logged at the end of a run."""

    def write(self, record: Record) -> None:
        """Write a logged step."""
        ...

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Write results on held-out data, such as ``{"loss": 2.9}``."""
        ...

    def close(self) -> None:
        """Write pending values and close. No other call follows."""
        ...


@dataclass(frozen=True)
class SinkContext:
    """Run and rank for which a sink is opened.

    Attributes:
        records: On the writer rank, the records of ``metrics.jsonl`` before the step from which the run
            continues. Only available while sinks are opened.
        validations: The same for ``validation.jsonl``.
    """

    # The run.
    config: Config
    folder: Path
    """``job.dump_folder``."""
    facts: RunFacts
    # Earlier records of a resumed run.
    records: Sequence[Mapping[str, Any]] = ()
    validations: Sequence[Mapping[str, Any]] = ()

    @property
    def is_wanted(self) -> bool:
        """True if this rank writes: the writer rank, or every rank with metrics.save_for_all_ranks."""
        return self.facts.is_writer or self.config.metrics.save_for_all_ranks

    @property
    def rank(self) -> int | None:
        """This rank if every rank writes, to distinguish their destinations.

        None if only the writer rank writes.
        """
        return self.facts.rank if self.config.metrics.save_for_all_ranks else None

    def tags(self, record: Record) -> dict[str, float]:
        """Return the values of a record by TensorBoard tag."""
        return record.tags(self.facts.device_type, self.config.metrics.legacy_tags)


def validation_tags(values: Mapping[str, float]) -> dict[str, float]:
    """Return results on held-out data by TensorBoard tag."""
    return {f"validation_metrics/{key}": value for key, value in values.items()}
