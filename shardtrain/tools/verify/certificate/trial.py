"""A ``Trial``: one run of the trainer with a small variant of a configuration, and its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtrain.config import Loaded

REFERENCE = "reference"
"""Name of the trial on one process with which the others are compared."""
SHAKEN = "shaken"
"""Name of the trial that measures the effect of rounding: see ``Trial.is_shaken``."""

AVERAGE = "average"
"""Kind of the weights that are evaluated instead of the trained weights, such as moving averages."""


RATE = "rate"
"""Kind of the learning rate of a step."""
SCALE = "scale"
"""Kind of the loss scale of a step, if a trial scales its loss."""
METRIC = "metric"
"""Kind of the other metrics of a step, such as the losses of further tokens."""
SKIPPED_STEP = 2
"""Step whose update a trial of the dimension ``skipped`` skips."""
INITIAL_SCALE = 1024.0
"""Loss scale of such a trial before its first step."""

TRAINING_MODE = "loss in training mode"
"""Name of the validation loss that modules in training mode compute. It is compared with the validation loss."""


@dataclass(frozen=True)
class Trial:
    """One run of the trainer.

    Attributes:
        name: Unique name, also of its files.
        loaded: The configuration.
        num_ranks: Number of processes.
        steps: Steps whose numbers are compared, from 1.
        stop_after: Step after which the run is stopped as if killed, so a later trial can resume it. None
            to run to the end.
        resumes: Name of the trial that this trial resumes, or "".
        compared_with: Name of the trial with which this trial is compared.
        is_reference: True if other trials are compared with this one.
        shortens_documents: True to shorten documents, so a short sequence has several of them.
        separates_documents: True to train every document of a packed sequence in its own sequence.
            Documents are those of the reader, and not those that the packing marks.
        is_shaken: True to move each initial weight to the next representable number above or below.
        overflows: True if the gradients of one data rank overflow in ``SKIPPED_STEP``.
        leaves_out: True to leave out ``SKIPPED_STEP``: its rows are read, and nothing is computed.
        scales_loss: True to scale the loss, as for float16.
    """

    name: str
    loaded: Loaded
    num_ranks: int
    steps: Sequence[int]
    stop_after: int | None = None
    resumes: str = ""
    compared_with: str = REFERENCE
    is_reference: bool = False
    shortens_documents: bool = False
    separates_documents: bool = False
    is_shaken: bool = False
    overflows: bool = False
    leaves_out: bool = False
    scales_loss: bool = False


@dataclass(frozen=True)
class NumberError:
    """Distance of a number of a trial from the same number of the reference.

    Attributes:
        kind: "initial", "rate", "scale", "gradient", "loss", "norm", "metric", "weights", "average", or
            "validation".
        step: Step, from 1. Initial weights have step 0.
        tensor: Name of the tensor or of the metric. Empty for other numbers.
        error: Relative for gradients and the norm, and for metrics above 1. Absolute for others.
        factor: Factor of a gradient, if it is a multiple of the reference's gradient. For a weight, the
            factor of the weight before the update that explains the error. Else None.
    """

    kind: str
    step: int
    tensor: str
    error: float
    factor: float | None = None


@dataclass(frozen=True)
class TrialFacts:
    """Facts about a trial, apart from its numbers.

    Attributes:
        layout_difference: First difference of packed rows from the documents of the reader, or "".
        num_shared_rows: Number of rows in which several documents have targets. None if they were not
            counted.
        rows: Hash of the rows of each step, over all ranks. Empty if rows are not comparable.
        targets: Number of target tokens of each step, over all ranks.
        outputs: Sum of squares of the outputs of each module in the first step, by path, in the order of
            the forward pass. Empty if ranks have parts of an output.
        num_gradients: Number of gradients of a step.
        core: Pattern of the paths of attention cores, or "".
        buffers: Names of the buffers whose values are compared.
        mode_module: First module whose outputs for the validation rows depend on the training mode, or "".
        rates: Learning rate of each step.
        scales: Loss scales of each step, one for each rank whose scale differs from the ranks before it.
    """

    layout_difference: str = ""
    num_shared_rows: int | None = None
    rows: Mapping[str, int] = field(default_factory=dict)
    targets: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, float] = field(default_factory=dict)
    num_gradients: int = 0
    core: str = ""
    buffers: Sequence[str] = ()
    mode_module: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    scales: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialErrors:
    """All errors of a trial, over its ranks, or the reason why it did not finish.

    Attributes:
        errors: Error of each number.
        failure: Reason why the trial did not finish, or "".
        is_refused: True if the configuration was refused, and False if a rank failed.
        facts: Results of the trial other than numbers.
    """

    errors: Sequence[NumberError] = ()
    failure: str = ""
    is_refused: bool = False
    facts: TrialFacts = TrialFacts()


def errors_file(folder: Path, name: str, rank: int) -> Path:
    """Return the path of the errors that a rank writes for a trial."""
    return folder / f"{name}-{rank}.json"


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for the duration of the block."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
