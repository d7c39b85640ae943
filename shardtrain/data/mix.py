"""Mix datasets: a pure function maps each position of the sample order to a dataset.

The pattern of datasets repeats in cycles of 65,536 rows. Weights are rounded to an integer number of rows
per cycle. The rows of a source are spread over the cycle at equal distances (Bresenham 1965). So every
batch contains about the right number of its rows, without random numbers. A stage is a range of positions
with its own weights. In a new stage, each source continues where it stopped in the previous stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

CYCLE = 1 << 16
"""Number of rows after which the pattern of sources repeats. It makes weights exact to 1 in 65,536."""

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stage:
    """Weights of all sources, in their order, for the positions before ``stop``.

    ``stop`` is None for the last stage.
    """

    weights: tuple[float, ...]
    stop: int | None = None


class Mixture:
    """Maps positions 0, 1, 2, ... to a source and a row number within this source.

    Attributes:
        fingerprint: a text with everything that determines the order.
        unread: (stage, source) pairs whose weight is above 0, but too small for one row per cycle.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.num_sources = len(stages[0].weights)
        # With one source, weights and stages do not change the order, so a resumed run may change them.
        self.fingerprint = repr(list(stages)) if self.num_sources > 1 else ""

        # For each stage, compute three arrays: the source at each place of a cycle, the number of rows of
        # each source per cycle, and for each place the number of earlier places with the same source. (A
        # table of the counts of all sources at all places would need 256 MiB per stage with 500 sources.)
        self._cycles = [_cycle(stage.weights) for stage in stages]
        self._per_cycle = [np.bincount(cycle, minlength=self.num_sources) for cycle in self._cycles]
        self._before = [_rows_before(cycle) for cycle in self._cycles]
        self.unread = []
        for number, stage in enumerate(stages):
            for source, weight in enumerate(stage.weights):
                if weight > 0 and not self._per_cycle[number][source]:
                    self.unread.append((number, source))

        # Compute the start and the end of each stage, and how many rows of each source come before it.
        self._starts = [0]
        for stage in stages[:-1]:
            self._starts.append(stage.stop or 0)
        self._stops = [*self._starts[1:], None]
        self._rows_before_stage = np.zeros((len(stages), self.num_sources), dtype=np.int64)
        for index in range(1, len(stages)):
            previous = index - 1
            length = self._starts[index] - self._starts[previous]
            rows = self._rows_before_stage[previous] + self._count(previous, length)
            self._rows_before_stage[index] = rows

    def locate(self, positions: _Ints) -> tuple[_Ints, _Ints]:
        """Return the source of each position, and the number of the row within its source, from 0."""
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
            # Add up the source's rows in earlier stages, in complete cycles of this stage, and in the current
            # cycle.
            in_earlier_stages = self._rows_before_stage[stage][source]
            in_earlier_cycles = cycles * self._per_cycle[stage][source]
            numbers[in_stage] = in_earlier_stages + in_earlier_cycles + self._before[stage][place]
        return sources, numbers

    def rows_before(self, position: int) -> _Ints:
        """Return how many of the first ``position`` rows belong to each source."""
        stage = int(np.searchsorted(np.asarray(self._starts), position, side="right")) - 1
        in_stage = self._count(stage, position - self._starts[stage])
        return self._rows_before_stage[stage] + in_stage

    def first_position_beyond(self, source: int, rows: int) -> int | None:
        """Return the position of row number ``rows`` (from 0) of a source.

        None if the source never has so many rows.
        """
        for stage, (start, stop) in enumerate(zip(self._starts, self._stops, strict=True)):
            places = np.flatnonzero(self._cycles[stage] == source)
            if not len(places):
                continue
            row_of_stage = rows - int(self._rows_before_stage[stage][source])
            cycles, rest = divmod(row_of_stage, len(places))
            position = start + cycles * CYCLE + int(places[rest])
            if stop is None or position < stop:
                return position
        return None

    def _count(self, stage: int, length: int) -> _Ints:
        """Return how many rows of each source are in the first ``length`` positions of a stage."""
        cycles, rest = divmod(length, CYCLE)
        in_rest = np.bincount(self._cycles[stage][:rest], minlength=self.num_sources)
        return cycles * self._per_cycle[stage] + in_rest


def _rows_before(cycle: npt.NDArray[np.uint16]) -> npt.NDArray[np.int32]:
    """For each place of a cycle, return the number of earlier places with the same source."""
    # The stable sort lists the places of source 0, then the places of source 1, and so on. The index of a
    # place within its source is the number of earlier places.
    order = np.argsort(cycle, kind="stable")
    counts = np.bincount(cycle)
    first_of_source = np.cumsum(counts) - counts
    before = np.empty(CYCLE, dtype=np.int32)
    before[order] = np.arange(CYCLE) - np.repeat(first_of_source, counts)
    return before


def _cycle(weights: Sequence[float]) -> npt.NDArray[np.uint16]:
    """Return the source of each row of a cycle. Sources are spread evenly, in proportion to their weights."""
    # Largest remainder method: round down, and add the missing rows to the sources with the largest
    # remainders. All sorts are stable, because the order of the data must not depend on how a version of
    # NumPy breaks ties.
    shares = np.asarray(weights, dtype=np.float64) / sum(weights) * CYCLE
    counts = np.floor(shares).astype(np.int64)
    missing = CYCLE - int(counts.sum())
    by_remainder = np.argsort(-(shares - counts), kind="stable")
    counts[by_remainder[:missing]] += 1

    # If a source has n rows, its ideal places are the centers of n equal parts of the cycle. Sort the ideal
    # places of all sources to get the cycle.
    places = []
    for count in counts.tolist():
        if count:
            places.append((np.arange(count) + 0.5) / count * CYCLE)
    sources = np.repeat(np.arange(len(counts)), counts)
    order = np.argsort(np.concatenate(places), kind="stable")
    return sources[order].astype(np.uint16)
