"""Which dataset a position of the sample order belongs to: a pure function, any position at once.

The weights are rounded to whole numbers of rows in a cycle of 65,536. A source's rows are spread over the cycle at
equal distances (Bresenham 1965), so every batch has about its share and no random number is needed. A stage is a range
of positions with its own weights; each source continues where the stage before left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CYCLE = 1 << 16
"""Rows after which the pattern of sources repeats; weights are exact to 1 in 65,536."""

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stage:
    """Weights of all sources, in their order, for the positions before ``stop``; None for the last stage."""

    weights: tuple[float, ...]
    stop: int | None = None


class Mixture:
    """Positions 0, 1, 2, ... -> (source, how many rows of that source came before).

    fingerprint: text of all that decides the order.
    unread:      (stage, source) whose weight is above 0 but too small for a row in a cycle.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.num_sources = len(stages[0].weights)
        # With one source neither weights nor stages change the order, so a resume need not compare them.
        self.fingerprint = repr(list(stages)) if self.num_sources > 1 else ""

        # For each stage the source at each place of a cycle, the rows of each source in a cycle, and before[s]: rows of
        # the source at place s among the places before it. Not a table of all sources at all places: with 500 of them
        # that is a quarter of a gigabyte a stage.
        self._cycles = [_cycle(stage.weights) for stage in stages]
        self._per_cycle = [np.bincount(cycle, minlength=self.num_sources) for cycle in self._cycles]
        self._before = [_rows_before(cycle) for cycle in self._cycles]
        self.unread = [
            (number, source)
            for number, stage in enumerate(stages)
            for source, weight in enumerate(stage.weights)
            if weight > 0 and not self._per_cycle[number][source]
        ]

        # Where stages begin and end, and how many rows each source has given before each stage.
        self._starts = [0, *(stage.stop or 0 for stage in stages[:-1])]
        self._stops = [*self._starts[1:], None]
        self._given = np.zeros((len(stages), self.num_sources), dtype=np.int64)
        for index in range(1, len(stages)):
            length = self._starts[index] - self._starts[index - 1]
            self._given[index] = self._given[index - 1] + self._count(index - 1, length)

    def locate(self, positions: _Ints) -> tuple[_Ints, _Ints]:
        """Source of each position, and the number of that row within its source, from 0."""
        if self.num_sources == 1:
            return np.zeros_like(positions), positions
        sources = np.empty_like(positions)
        numbers = np.empty_like(positions)
        stages = np.searchsorted(np.asarray(self._starts), positions, side="right") - 1
        for stage in np.unique(stages).tolist():
            in_stage = stages == stage
            cycles, place = np.divmod(positions[in_stage] - self._starts[stage], CYCLE)
            source = self._cycles[stage][place].astype(np.int64)
            sources[in_stage] = source
            # Rows of the source in earlier stages, in whole cycles of this one, and in the current cycle.
            earlier = self._given[stage][source] + cycles * self._per_cycle[stage][source]
            numbers[in_stage] = earlier + self._before[stage][place]
        return sources, numbers

    def rows_before(self, position: int) -> _Ints:
        """Rows of each source among the first ``position``; one number per source."""
        stage = int(np.searchsorted(np.asarray(self._starts), position, side="right")) - 1
        return self._given[stage] + self._count(stage, position - self._starts[stage])

    def first_position_beyond(self, source: int, rows: int) -> int | None:
        """The position of row number ``rows`` (from 0) of a source, or None if it never gives so many."""
        for stage, (start, stop) in enumerate(zip(self._starts, self._stops, strict=True)):
            places = np.flatnonzero(self._cycles[stage] == source)
            if not len(places):
                continue
            cycles, rest = divmod(rows - int(self._given[stage][source]), len(places))
            position = start + cycles * CYCLE + int(places[rest])
            if stop is None or position < stop:
                return position
        return None

    def _count(self, stage: int, length: int) -> _Ints:
        cycles, rest = divmod(length, CYCLE)
        return cycles * self._per_cycle[stage] + np.bincount(self._cycles[stage][:rest], minlength=self.num_sources)


def _rows_before(cycle: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
    """At each place of a cycle, how many rows of its source came before it."""
    # The stable sort lists the places of source 0, then of source 1, ...: an index within its source is the count.
    order = np.argsort(cycle, kind="stable")
    counts = np.bincount(cycle)
    before = np.empty(CYCLE, dtype=np.int32)
    before[order] = np.arange(CYCLE) - np.repeat(np.cumsum(counts) - counts, counts)
    return before


def _cycle(weights: Sequence[float]) -> npt.NDArray[np.uint16]:
    """The source at each place of a cycle."""
    # Largest remainder method: round down, and give what is missing to the largest remainders. All sorts here are
    # stable: the order of the data may not depend on how a version of NumPy breaks ties.
    shares = np.asarray(weights, dtype=np.float64) / sum(weights) * CYCLE
    counts = np.floor(shares).astype(np.int64)
    missing = CYCLE - int(counts.sum())
    counts[np.argsort(-(shares - counts), kind="stable")[:missing]] += 1

    # The ideal places of a source of n rows are the middles of n equal parts of the cycle; sorted, they are the cycle.
    places = [(np.arange(count) + 0.5) / count * CYCLE for count in counts.tolist() if count]
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners[np.argsort(np.concatenate(places), kind="stable")].astype(np.uint16)
