"""The numbers of a mesh against those of one process: the largest error of each kind, and the first that is too large.

Tolerances: sums in another order differ by about 1e-7 of their size, a few times that after some layers. A gradient's
error is measured against its norm, or against a twentieth of the norm of all gradients where its own is smaller: the
gradient of a key bias, for one, is zero but for rounding.

Some models amplify rounding: a recurrence over many tokens, a product of many factors, large logits. By how much, one
process says by itself: a second run of it, "shaken", begins with every weight moved to the next number above or below.
What that changes, times ``ROUNDING``, counts as rounding, up to ``MOST`` times the usual tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from shardtrain.layout import Layout
from shardtrain.tools.verify.verify_rank import MAX_NORM, RankRecord, is_clipped

ROUNDING = 8
"""A mesh rounds all sums of a step in another order, and not the weights alone: another draw of the same chance."""
MOST = 100
"""A gradient that is off by more than a thousandth is never rounding."""


@dataclass(frozen=True)
class Errors:
    """The largest errors over ranks, of a step or of several, and the largest that count as rounding: ``loss`` and
    ``weights`` are absolute, ``gradient`` and ``norm`` relative."""

    loss: float
    gradient: float
    norm: float
    weights: float


USUAL = Errors(loss=1e-5, gradient=1e-5, norm=1e-5, weights=1e-6)
"""What counts as rounding between a mesh and one process, for a model that does not amplify rounding."""
NONE = Errors(0.0, 0.0, 0.0, 0.0)
SMALL = 0.05
"""Share of the norm of all gradients below which a gradient's error is not measured against its own norm."""


@dataclass(frozen=True)
class First:
    """The first difference in time, and within a step in the order of the forward pass.

    ``kind`` is own (what training would start from), initial, loss, gradient, norm, weights
    or buffers; ``names`` are all tensors that differ there.
    """

    kind: str
    step: int
    names: Sequence[str]
    error: float
    loss_differs: bool = False


@dataclass
class Differences:
    """Largest error of each kind over ranks, steps, tensors; ``initial`` counts tensors not bitwise equal."""

    initial: int = 0
    loss: float = 0.0
    gradient: float = 0.0
    norm: float = 0.0
    weights: float = 0.0
    first: First | None = field(default=None)


class Expected:
    """What one process computed, by name, with the names in the order of the forward pass."""

    def __init__(self, record: RankRecord, layout: Layout) -> None:
        self.record = record
        names = [key.removeprefix("initial/") for key in record.parts if key.startswith("initial/")]
        self.names = forward_order(names, layout)
        self.buffers = [key.removeprefix("buffers/0/") for key in record.parts if key.startswith("buffers/0/")]

    def whole(self, kind: str, name: str) -> Tensor:
        """A tensor of one process: all of it is there."""
        return self.record.parts[f"{kind}/{name}"]

    def weights(self, step: int) -> dict[str, Tensor]:
        """All weights before a step, counted from 0."""
        kind = "initial" if step == 0 else f"weights/{step - 1}"
        return {name: self.whole(kind, name) for name in self.names}

    def total(self, step: int) -> float:
        """Norm of all gradients of a step, before clipping."""
        return self.record.norms[step]

    def clipping(self, step: int) -> float:
        """What clipping multiplied the gradients of a step by: 1 where there was none."""
        if not is_clipped(step, len(self.record.norms)):
            return 1.0
        # the 1e-6 is PyTorch's, of clip_grads_with_norm_, which the trainer's clipping keeps
        return min(1.0, MAX_NORM / (self.record.norms[step] + 1e-6))

    def error(self, kind: str, name: str, part: Tensor, slices: tuple[slice, ...], scale: float) -> float:
        """Norm of the difference of a part, over ``scale``; not a number counts as infinite."""
        wanted = self.whole(kind, name)[slices]
        if wanted.shape != part.shape:
            return float("inf")
        error = float((part - wanted).norm()) / max(scale, 1e-30)
        return float("inf") if math.isnan(error) else error


def forward_order(names: Sequence[str], layout: Layout) -> list[str]:
    """Parameter names in the order in which a forward pass meets them: first modules, layers by number, last ones."""

    def place(name: str) -> tuple[int, int]:
        top, _, rest = name.partition(".")
        if top in layout.first:
            return 0, layout.first.index(top)
        if top == layout.layers:
            number = rest.partition(".")[0]
            return 1, int(number) if number.isdecimal() else 0
        return 2, layout.last.index(top) if top in layout.last else -1

    known = {name: index for index, name in enumerate(names)}
    return sorted(names, key=lambda name: (*place(name), known[name]))


def moved_by(expected: Expected, shaken: RankRecord, steps: int) -> list[Errors]:
    """What a unit in the last place of the weights changes up to each step; they differ by the unit itself at least."""
    moved: list[Errors] = []
    before = asdict(NONE)
    for step in range(steps):
        # what has moved once does not come back to where it was: the largest so far counts
        largest = asdict(_Step(expected, [shaken], step).largest)
        before = {kind: max(value, before[kind]) for kind, value in largest.items()}
        moved.append(Errors(**before))
    return moved


def tolerances(moved: Sequence[Errors]) -> list[Errors]:
    """What counts as rounding in each step: the usual, and more where the model amplifies rounding."""
    usual = asdict(USUAL)
    allowed = []
    for errors in moved:
        amplified = {kind: max(usual[kind], ROUNDING * value) for kind, value in asdict(errors).items()}
        allowed.append(Errors(**{kind: min(MOST * usual[kind], value) for kind, value in amplified.items()}))
    return allowed


def compare(
    expected: Expected, records: Sequence[RankRecord], steps: int, allowed: Sequence[Errors] | None = None
) -> Differences:
    """All differences of a mesh's ranks from one process; ``allowed`` says of each step what counts as rounding."""
    found = Differences()
    allowed = allowed or [USUAL] * steps

    # Initial weights are drawn block by block, the same numbers on any mesh, so they are compared bit by bit. "own",
    # what training would start from, comes last, so that it is named where it differs too.
    for kind in ("initial", "own"):
        unequal = []
        for name in expected.names:
            key = f"{kind}/{name}"
            holders = [record for record in records if key in record.parts]
            whole = expected.whole(kind, name)
            alike = [same_bits(record.parts[key], whole[record.slices[key]]) for record in holders]
            if not holders or not all(alike):
                unequal.append(name)
        found.initial = max(found.initial, len(unequal))
        if unequal:
            found.first = First(kind, 0, unequal, 0.0)

    for step in range(steps):
        errors = _Step(expected, records, step)
        for kind, error in asdict(errors.largest).items():
            setattr(found, kind, max(getattr(found, kind), error))
        if found.first is None:
            found.first = _first_of_step(expected, records, step, errors, allowed[step])
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers, where no number counts as one: weights nobody knows how to draw."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


class _Step:
    """The errors of one step, by tensor and as the largest of each kind."""

    def __init__(self, expected: Expected, records: Sequence[RankRecord], step: int) -> None:
        theirs = expected.record
        self.gradients = {name: gradient_error(expected, records, step, name) for name in expected.names}
        self.weights = {name: weight_error(expected, records, step, name) for name in expected.names}
        self.largest = Errors(
            loss=max(_distance(record.losses[step], theirs.losses[step], 1.0) for record in records),
            gradient=max(0.0, *self.gradients.values()),
            norm=max(_distance(record.norms[step], theirs.norms[step], theirs.norms[step]) for record in records),
            weights=max(0.0, *self.weights.values()),
        )


def _first_of_step(
    expected: Expected, records: Sequence[RankRecord], step: int, errors: _Step, allowed: Errors
) -> First | None:
    """What differs first in a step; None where nothing is off by more than rounding."""
    # A wrong gradient comes before a loss that differs: it names tensors, and usually the same fault is behind both.
    loss_differs = errors.largest.loss > allowed.loss
    wrong_gradients = [name for name, error in errors.gradients.items() if error > allowed.gradient]
    if wrong_gradients:
        return First("gradient", step, wrong_gradients, errors.gradients[wrong_gradients[0]], loss_differs)
    if loss_differs:
        return First("loss", step, [], errors.largest.loss, loss_differs)
    if errors.largest.norm > allowed.norm:
        return First("norm", step, [], errors.largest.norm)

    wrong_weights = [name for name, error in errors.weights.items() if error > allowed.weights]
    if wrong_weights:
        return First("weights", step, wrong_weights, errors.weights[wrong_weights[0]])

    # Buffers are counts of tokens and signs of them, which every rank that has one holds whole and equal.
    wrong_buffers = []
    for name in expected.buffers:
        key = f"buffers/{step}/{name}"
        wanted = expected.record.parts[key]
        mine = [record.parts[key] for record in records if key in record.parts]
        if not all(part.shape == wanted.shape and torch.allclose(part, wanted, 1e-5, 1e-6) for part in mine):
            wrong_buffers.append(name)
    return First("buffers", step, wrong_buffers, 0.0) if wrong_buffers else None


def scale_of(expected: Expected, step: int, name: str) -> float:
    """What a gradient's error is measured against."""
    own = float(expected.whole(f"gradient/{step}", name).norm())
    # the record has gradients after clipping, and their norm before it
    return max(own, SMALL * expected.total(step) * expected.clipping(step))


def gradient_error(expected: Expected, records: Sequence[RankRecord], step: int, name: str) -> float:
    """Largest relative error over the ranks that hold a part of a gradient; infinite where no rank has it."""
    key = f"gradient/{step}/{name}"
    if key not in expected.record.parts:
        return 0.0 if all(key not in record.parts for record in records) else float("inf")
    scale = scale_of(expected, step, name)
    holders = [record for record in records if f"initial/{name}" in record.parts]
    if any(key not in record.parts for record in holders) or not holders:
        return float("inf")
    return max(
        expected.error(f"gradient/{step}", name, record.parts[key], record.slices[key], scale) for record in holders
    )


def weight_error(expected: Expected, records: Sequence[RankRecord], step: int, name: str) -> float:
    """Largest absolute error of any number of a weight after a step."""
    key = f"weights/{step}/{name}"
    worst = 0.0
    for record in records:
        if key in record.parts and record.parts[key].numel():
            wanted = expected.whole(f"weights/{step}", name)[record.slices[key]]
            if wanted.shape != record.parts[key].shape:
                return float("inf")
            error = float((record.parts[key] - wanted).abs().max())
            worst = max(worst, float("inf") if math.isnan(error) else error)
    return worst


def _distance(mine: float, theirs: float, scale: float) -> float:
    error = abs(mine - theirs) / max(scale, 1e-30)
    return float("inf") if math.isnan(error) else error


def assemble(records: Sequence[RankRecord], key: str, shape: Sequence[int]) -> Tensor | None:
    """The whole tensor from the parts of the ranks; None unless they cover it."""
    whole = torch.zeros(tuple(shape))
    seen = torch.zeros(tuple(shape), dtype=torch.bool)
    for record in records:
        if key in record.parts and whole[record.slices[key]].shape == record.parts[key].shape:
            whole[record.slices[key]] = record.parts[key]
            seen[record.slices[key]] = True
    return whole if bool(seen.all()) else None
