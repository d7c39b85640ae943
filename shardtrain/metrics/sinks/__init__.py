"""Where metrics go: the console, ``metrics.jsonl``, TensorBoard, Weights & Biases, and files of the user's.

A sink never stops training: what it cannot write is one warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardtrain.config.schema import Config
from shardtrain.metrics.record import Record, RunFacts


class Sink(Protocol):
    """One place that metrics go to. It may also have ``summary``, a line for the log at the end of a run."""

    def write(self, record: Record) -> None:
        """Take a logged step."""
        ...

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Take results on held-out data: ``{"loss": 2.9}``."""
        ...

    def close(self) -> None:
        """Write what is left; nothing comes after."""
        ...


@dataclass(frozen=True)
class SinkContext:
    """What a sink is opened for: a run, on one of its ranks.

    ``records`` and ``validations`` are what an earlier part of the run wrote to ``metrics.jsonl`` and
    ``validation.jsonl``, up to the step that it continues from; they are there on the writer rank, while sinks open.
    """

    config: Config
    folder: Path
    """``job.dump_folder``."""
    facts: RunFacts
    records: Sequence[Mapping[str, Any]] = ()
    validations: Sequence[Mapping[str, Any]] = ()

    @property
    def is_wanted(self) -> bool:
        """Whether this rank writes: the writer rank, or with metrics.save_for_all_ranks each."""
        return self.facts.is_writer or self.config.metrics.save_for_all_ranks

    @property
    def rank(self) -> int | None:
        """This rank where each writes, so that places may be told apart; None where one writes for all."""
        return self.facts.rank if self.config.metrics.save_for_all_ranks else None

    def tags(self, record: Record) -> dict[str, float]:
        """The values of a record by TensorBoard tag."""
        return record.tags(self.facts.device_type, self.config.metrics.legacy_tags)


def validation_tags(values: Mapping[str, float]) -> dict[str, float]:
    """Results on held-out data by TensorBoard tag."""
    return {f"validation_metrics/{key}": value for key, value in values.items()}
