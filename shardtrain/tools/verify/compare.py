"""Compare a mesh with one process: the largest error of each kind of number, and the first difference.

Tolerances: sums in another order differ by about 1e-7 of their size, and by a few times that after some
layers. The error of a gradient is relative to its norm, or to a twentieth of the norm of all gradients if its
norm is smaller. (The gradient of a key bias, for example, is zero except for rounding.)

Some models amplify rounding: a recurrence over many tokens, a product of many factors, large logits. A second
run of one process, the "shaken" run, measures this effect. It starts with every weight moved to the next
representable number above or below. ``ROUNDING`` times its effect counts as rounding, up to ``MOST`` times
the usual tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from shardtrain.layout import Layout
from shardtrain.tools.verify import verify_report
from shardtrain.tools.verify.verify_rank import MAX_NORM, RankRecord, is_clipped
from shardtrain.tools.verify.verify_report import MOST, ROUNDING
from shardtrain.utils.variables import is_whole_number


@dataclass(frozen=True)
class Errors:
    """Largest errors over ranks, or tolerances for them.

    Losses and weights are absolute, gradients and norm relative.
    """

    loss: float
    gradient: float
    norm: float
    weights: float


USUAL = Errors(**verify_report.USUAL)
NONE = Errors(0.0, 0.0, 0.0, 0.0)
SMALL = 0.05
"""A gradient whose norm is a smaller fraction of the norm of all gradients is compared relative to that norm."""


@dataclass(frozen=True)
class First:
    """The first difference in time and, within a step, in the order of the forward pass.

    Attributes:
        kind: "own" (initial weights of training), "initial" (initial weights of the comparison),
            "loss", "gradient", "norm", "weights" or "buffers".
        step: Step, from 0.
        names: All tensors that differ there.
        error: Error of the first of them.
        loss_differs: True if the loss of this step differs, too.
    """

    kind: str
    step: int
    names: Sequence[str]
    error: float
    loss_differs: bool = False


@dataclass
class Differences:
    """Largest error of each kind over ranks, steps and tensors.

    ``initial`` is the number of tensors whose initial values are not bitwise equal.
    """

    initial: int = 0
    loss: float = 0.0
    gradient: float = 0.0
    norm: float = 0.0
    weights: float = 0.0
    first: First | None = field(default=None)


class Expected:
    """The record of one process, with parameter names in the order of the forward pass."""

    def __init__(self, record: RankRecord, layout: Layout) -> None:
        self.record = record
        names = []
        self.buffers = []
        for key in record.parts:
            if key.startswith("initial/"):
                names.append(key.removeprefix("initial/"))
            elif key.startswith("buffers/0/"):
                self.buffers.append(key.removeprefix("buffers/0/"))
        self.names = forward_order(names, layout)

    def whole(self, kind: str, name: str) -> Tensor:
        """Return a full tensor, by kind ("initial", "weights/STEP", ...) and name."""
        return self.record.parts[f"{kind}/{name}"]

    def weights(self, step: int) -> dict[str, Tensor]:
        """Return all weights before a step. Steps count from 0."""
        kind = "initial"
        if step > 0:
            kind = f"weights/{step - 1}"
        return {name: self.whole(kind, name) for name in self.names}

    def total(self, step: int) -> float:
        """Return the norm of all gradients of a step, before clipping."""
        return self.record.norms[step]

    def clipping(self, step: int) -> float:
        """Return the factor by which clipping multiplied the gradients of a step, or 1 without clipping."""
        if not is_clipped(step, len(self.record.norms)):
            return 1.0
        # The 1e-6 comes from PyTorch's clip_grads_with_norm_. The trainer's clipping also uses it.
        return min(1.0, MAX_NORM / (self.record.norms[step] + 1e-6))

    def error(
        self, kind: str, name: str, part: Tensor, slices: tuple[slice, ...], scale: float
    ) -> float:
        """Return the norm of the difference of a part, divided by ``scale``. NaN counts as infinity."""
        wanted = self.whole(kind, name)[slices]
        if wanted.shape != part.shape:
            return math.inf
        distance = float((part - wanted).norm())
        return _nan_as_infinite(distance / max(scale, 1e-30))


def forward_order(names: Sequence[str], layout: Layout) -> list[str]:
    """Sort parameter names in the order of the forward pass: first modules, layers by number, last modules."""

    def place(name: str) -> tuple[int, int]:
        top, _, rest = name.partition(".")
        if top in layout.first:
            return 0, layout.first.index(top)
        if top == layout.layers:
            # Layers are usually named by their numbers, but a user's model may use other names.
            number = rest.partition(".")[0]
            if is_whole_number(number):
                return 1, int(number)
            return 1, 0
        # A module that the layout does not name comes between the layers and the last modules.
        if top not in layout.last:
            return 2, -1
        return 2, layout.last.index(top)

    return sorted(names, key=place)


def moved_by(expected: Expected, shaken: RankRecord, steps: int) -> list[Errors]:
    """Return the largest differences of the shaken run from ``expected``, for each step including earlier steps."""
    moved: list[Errors] = []
    largest = asdict(NONE)
    for step in range(steps):
        # A number that differed once remains uncertain, so use the largest difference so far.
        current = asdict(_StepErrors(expected, [shaken], step).largest)
        for kind, value in current.items():
            largest[kind] = max(largest[kind], value)
        moved.append(Errors(**largest))
    return moved


def tolerances(moved: Sequence[Errors]) -> list[Errors]:
    """Return the tolerance of each step, given the errors of the shaken run.

    It is at least the usual tolerance.
    """
    usual = asdict(USUAL)
    allowed = []
    for errors in moved:
        by_kind = {}
        for kind, effect in asdict(errors).items():
            amplified = max(usual[kind], ROUNDING * effect)
            by_kind[kind] = min(MOST * usual[kind], amplified)
        allowed.append(Errors(**by_kind))
    return allowed


def compare(
    expected: Expected,
    records: Sequence[RankRecord],
    steps: int,
    allowed: Sequence[Errors] | None = None,
) -> Differences:
    """Compare the ranks of a mesh with one process.

    ``allowed`` is the tolerance of each step, by default ``USUAL``.
    """
    differences = Differences()
    allowed = allowed or [USUAL] * steps

    # Initial weights must be bitwise equal, because they are drawn block by block on any mesh. Compare "own",
    # the initial weights of training, last, so it replaces "initial" as the first difference.
    for kind in ("initial", "own"):
        unequal = []
        for name in expected.names:
            if not _is_bitwise_equal(expected, records, kind, name):
                unequal.append(name)
        differences.initial = max(differences.initial, len(unequal))
        if unequal:
            differences.first = First(kind, 0, unequal, 0.0)

    for step in range(steps):
        errors = _StepErrors(expected, records, step)
        for kind, error in asdict(errors.largest).items():
            setattr(differences, kind, max(getattr(differences, kind), error))
        if differences.first is None:
            differences.first = _first_of_step(expected, records, step, errors, allowed[step])
    return differences


def _is_bitwise_equal(
    expected: Expected, records: Sequence[RankRecord], kind: str, name: str
) -> bool:
    """True if at least one rank has a part of this tensor, and all parts are bitwise equal to one process's."""
    key = f"{kind}/{name}"
    full = expected.whole(kind, name)
    has_part = False
    for record in records:
        if key not in record.parts:
            continue
        has_part = True
        if not same_bits(record.parts[key], full[record.slices[key]]):
            return False
    return has_part


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if the tensors are bitwise equal. NaN equals NaN, because parameters without an initializer are NaN."""
    if one.shape != other.shape:
        return False
    is_same = one == other
    both_nan = one.isnan() & other.isnan()
    return bool((is_same | both_nan).all())


class _StepErrors:
    """The errors of one step: gradients and weights by name, and the largest of each kind."""

    def __init__(self, expected: Expected, records: Sequence[RankRecord], step: int) -> None:
        self.gradients = {}
        self.weights = {}
        for name in expected.names:
            self.gradients[name] = gradient_error(expected, records, step, name)
            self.weights[name] = weight_error(expected, records, step, name)

        # Every rank reports the loss and the norm of the step.
        their_loss = expected.record.losses[step]
        their_norm = expected.record.norms[step]
        loss_errors = []
        norm_errors = []
        for record in records:
            loss_errors.append(_distance(record.losses[step], their_loss, 1.0))
            norm_errors.append(_distance(record.norms[step], their_norm, their_norm))
        self.largest = Errors(
            loss=max(loss_errors),
            gradient=max(0.0, *self.gradients.values()),
            norm=max(norm_errors),
            weights=max(0.0, *self.weights.values()),
        )


def _first_of_step(
    expected: Expected,
    records: Sequence[RankRecord],
    step: int,
    errors: _StepErrors,
    allowed: Errors,
) -> First | None:
    """Return the first difference of a step, or None if all errors are within the tolerance."""
    # Report a wrong gradient before a wrong loss: it identifies tensors, and the same fault usually
    # causes both.
    loss_differs = errors.largest.loss > allowed.loss
    wrong_gradients = [name for name, error in errors.gradients.items() if error > allowed.gradient]
    if wrong_gradients:
        error = errors.gradients[wrong_gradients[0]]
        return First("gradient", step, wrong_gradients, error, loss_differs)
    if loss_differs:
        return First("loss", step, [], errors.largest.loss, loss_differs)
    if errors.largest.norm > allowed.norm:
        return First("norm", step, [], errors.largest.norm)

    # Weights are last, because a wrong gradient also makes them wrong.
    wrong_weights = [name for name, error in errors.weights.items() if error > allowed.weights]
    if wrong_weights:
        return First("weights", step, wrong_weights, errors.weights[wrong_weights[0]])

    # Buffers are token counts and their signs. Each rank that has a buffer has all of it, with equal values.
    wrong_buffers = []
    for name in expected.buffers:
        key = f"buffers/{step}/{name}"
        wanted = expected.record.parts[key]
        for record in records:
            part = record.parts.get(key)
            if part is None:
                continue
            if part.shape != wanted.shape or not torch.allclose(part, wanted, 1e-5, 1e-6):
                wrong_buffers.append(name)
                break
    if wrong_buffers:
        return First("buffers", step, wrong_buffers, 0.0)
    return None


def scale_of(expected: Expected, step: int, name: str) -> float:
    """Return the divisor for the error of a gradient: its norm, or ``SMALL`` times the total norm if larger."""
    norm = float(expected.whole(f"gradient/{step}", name).norm())
    # The record contains the gradients after clipping, but the total norm before it.
    return max(norm, SMALL * expected.total(step) * expected.clipping(step))


def gradient_error(
    expected: Expected, records: Sequence[RankRecord], step: int, name: str
) -> float:
    """Return the largest relative error over the ranks with a part of a gradient.

    Return infinity if a rank with the parameter lacks the gradient, or if only the mesh has a gradient.
    """
    key = f"gradient/{step}/{name}"
    # A frozen or unused parameter has no gradient on one process, so it must have none on the mesh.
    if key not in expected.record.parts:
        is_absent = all(key not in record.parts for record in records)
        return 0.0 if is_absent else math.inf
    scale = scale_of(expected, step, name)
    holders = [record for record in records if f"initial/{name}" in record.parts]
    if not holders or any(key not in record.parts for record in holders):
        return math.inf
    kind = f"gradient/{step}"
    errors = []
    for record in holders:
        errors.append(expected.error(kind, name, record.parts[key], record.slices[key], scale))
    return max(errors)


def weight_error(expected: Expected, records: Sequence[RankRecord], step: int, name: str) -> float:
    """Return the largest absolute error of any element of a weight after a step."""
    key = f"weights/{step}/{name}"
    worst = 0.0
    for record in records:
        # A rank may have an empty shard, whose maximum does not exist.
        if key not in record.parts or not record.parts[key].numel():
            continue
        wanted = expected.whole(f"weights/{step}", name)[record.slices[key]]
        if wanted.shape != record.parts[key].shape:
            return math.inf
        error = float((record.parts[key] - wanted).abs().max())
        worst = max(worst, _nan_as_infinite(error))
    return worst


def _distance(mine: float, theirs: float, scale: float) -> float:
    return _nan_as_infinite(abs(mine - theirs) / max(scale, 1e-30))


def _nan_as_infinite(error: float) -> float:
    """Replace NaN by infinity, because comparing NaN with a tolerance would not report an error."""
    if math.isnan(error):
        return math.inf
    return error


def assemble(records: Sequence[RankRecord], key: str, shape: Sequence[int]) -> Tensor | None:
    """Assemble a full tensor from the parts of the ranks. Return None if they do not cover it."""
    full = torch.zeros(tuple(shape))
    is_covered = torch.zeros(tuple(shape), dtype=torch.bool)
    for record in records:
        if key not in record.parts:
            continue
        part = record.parts[key]
        place = record.slices[key]
        if full[place].shape == part.shape:
            full[place] = part
            is_covered[place] = True
    if not bool(is_covered.all()):
        return None
    return full
