"""Compare two recordings of the same training, and find the first step and tensor that differ beyond rounding.

Each step is compared in the order of the computation: samples, learning rate, weights, gradients, loss, norm.
So the first difference is the fault itself or its first effect.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardtrain.record import PRECISIONS
from shardtrain.tools.verify.compare import SMALL
from shardtrain.tools.verify.recordings import NUM_PROJECTIONS, Recording, Step, Vector, distance
from shardtrain.utils.errors import ConfigError, Problem

TOLERANCES = dict(zip(PRECISIONS, (1e-11, 1e-5, 0.01, 0.05, 0.2), strict=True))
"""Relative difference of a gradient in the first step that counts as rounding, by the lowest precision.

About a hundred units of rounding: sums of a few thousand terms in another order, through some layers.
"""
GROWTH_PER_STEP = 2.0
"""Factor by which the tolerance grows with each step, because training amplifies rounding."""
MOST = 0.5
"""Maximum tolerance. A larger relative difference is never rounding."""
OF_WEIGHTS = 0.1
"""Tolerance of weights divided by the tolerance of gradients. An update is small compared with the weights."""
ROUNDING = 8
"""Tolerance divided by the difference of a third recording, in which only rounding differs."""
EXACT_NUMBER = 1e-6
"""Tolerance of numbers that do not depend on the order of sums."""
NO_GRADIENT = Vector(0.0, (0.0,) * NUM_PROJECTIONS)
"""Represents a gradient that is None in one of the recordings. PyTorch may return None or zeros."""
MOST_SAMPLES = 4
"""Maximum number of samples in a message."""
EXACT_FACTOR = 1e-3
"""Relative distance of a measured factor from a ratio of counts that explains it."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two recordings.

    Attributes:
        step: Number of the step.
        what: "samples", "tokens", "lr", "weights", "gradients", "loss" or "grad_norm".
        names: Tensors that differ there, in the order of the model; empty for numbers.
        error: Relative difference of the first of them.
        tolerance: Difference that would count as rounding.
        cause: Likely cause, or "".
    """

    step: int
    what: str
    names: tuple[str, ...]
    error: float
    tolerance: float
    cause: str = ""


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        num_steps: Number of steps that both recordings have.
        largest: Largest relative difference of gradients and weights over all steps.
        missing: Parameters that only one recording has, as sentences.
    """

    num_steps: int
    largest: Mapping[str, float]
    missing: tuple[str, ...]
    first: Difference | None


def compare(a: Recording, b: Recording, rounding: Recording | None = None) -> Comparison:
    """Compare recording ``b`` with ``a``.
    ``rounding`` differs from ``a`` by rounding only, and sets the tolerance.

    Raises:
        ConfigError: the recordings have different seeds, no common step or no gradients.
    """
    for other in (b, rounding):
        if other is not None and other.seed != a.seed:
            rule = f"has projections of seed {other.seed}, but {a.folder} has projections of seed {a.seed}"
            raise ConfigError(
                Problem("recording", str(other.folder), rule, "record both with the same seed")
            )
    pairs = _common_steps(a, b)
    if not pairs:
        rule = f"has no step in common with {a.folder}"
        raise ConfigError(
            Problem("recording", str(b.folder), rule, "number the steps of both runs alike")
        )
    if not any(step_a.gradients for step_a, _ in pairs):
        rule = f"has no gradient in common with {a.folder}"
        fix = "create the Recorder after wrapping and sharding the model, and call write before zero_grad"
        raise ConfigError(Problem("recording", str(b.folder), rule, fix))

    numbers = [step.number for step, _ in pairs]
    tolerances = _tolerances(a, b, numbers, rounding)
    largest = {"gradients": 0.0, "weights": 0.0}
    first: Difference | None = None
    # A gradient that consists of rounding errors may have either sign, and AdamW makes a full update of it.
    # So the weights of such parameters are not compared in later steps.
    only_rounding: set[str] = set()
    for index, (step_a, step_b) in enumerate(pairs):
        weights = errors_of(step_a.weights, step_b.weights)
        for name in only_rounding:
            weights.pop(name, None)
        errors = {"gradients": errors_of(step_a.gradients, step_b.gradients), "weights": weights}
        for kind, by_name in errors.items():
            largest[kind] = max([largest[kind], *by_name.values()])
        allowed = tolerances[step_a.number]
        # Later steps only contribute to ``largest``, because they contain the effects of the first
        # difference.
        if first is None:
            pairs_so_far = pairs[: index + 1]
            first = _first_of_step(a, b, pairs_so_far, errors, allowed)
        only_rounding |= _only_rounding(step_a.gradients, step_b.gradients, allowed["gradients"])
    missing = tuple(_missing(a, b))
    return Comparison(len(pairs), largest, missing, first)


def _common_steps(a: Recording, b: Recording) -> list[tuple[Step, Step]]:
    """Return the steps that both recordings have, with the tensors that have the same shape in both."""
    steps_b = {step.number: step for step in b.steps}
    names = []
    for name, shape in a.shapes.items():
        if b.shapes.get(name) == shape:
            names.append(name)
    pairs = []
    for step_a in a.steps:
        step_b = steps_b.get(step_a.number)
        if step_b is not None:
            pairs.append(_with_same_names(step_a, step_b, names))
    return pairs


def _with_same_names(step_a: Step, step_b: Step, names: Sequence[str]) -> tuple[Step, Step]:
    """Return the steps with only the tensors of ``names``. A gradient that one of them lacks counts as zero."""
    has_gradient = step_a.gradients.keys() | step_b.gradients.keys()
    limited = []
    for step in (step_a, step_b):
        gradients = {}
        weights = {}
        for name in names:
            if name in has_gradient:
                gradients[name] = step.gradients.get(name, NO_GRADIENT)
            if name in step.weights:
                weights[name] = step.weights[name]
        limited.append(replace(step, gradients=gradients, weights=weights))
    return limited[0], limited[1]


def _only_rounding(
    one: Mapping[str, Vector], other: Mapping[str, Vector], tolerance: float
) -> set[str]:
    """Return the tensors whose gradient is so small that it may consist of rounding errors only.

    An example is the bias of the keys of attention, whose exact gradient is 0. Adam divides a gradient by
    its own size, so the update of such a tensor has full size and a random sign, also in a correct program.
    """
    limit = tolerance * SMALL * _total_norm(one)
    small = set()
    for name, vector in one.items():
        norm = max(vector.norm, other[name].norm)
        if 0 < norm <= limit:
            small.add(name)
    return small


def _total_norm(vectors: Mapping[str, Vector]) -> float:
    squares = 0.0
    for vector in vectors.values():
        if not math.isnan(vector.norm):
            squares += vector.norm**2
    return math.sqrt(squares)


def errors_of(one: Mapping[str, Vector], other: Mapping[str, Vector]) -> dict[str, float]:
    """Return the relative difference of each tensor that both have."""
    # One recording may have only zero gradients. The scale then comes from the other.
    total = _total_norm(one) or _total_norm(other)
    errors = {}
    for name, vector in one.items():
        if name not in other:
            continue
        # The projections see a change of direction, and the norm is exact.
        of_projections = distance(vector.projections, other[name].projections)
        of_norm = abs(vector.norm - other[name].norm)
        # Tensors that are tiny compared with the rest have a minimum scale, because their rounding is
        # relatively large.
        scale = max(vector.norm, SMALL * total, 1e-300)
        error = max(of_projections, of_norm) / scale
        # NaN compares as False with every tolerance, and would pass as no difference.
        if math.isnan(error):
            error = math.inf
        errors[name] = error
    return errors


def _tolerances(
    a: Recording, b: Recording, numbers: Sequence[int], rounding: Recording | None
) -> dict[int, dict[str, float]]:
    """Return the tolerance of gradients and weights at each step.

    Raises:
        ConfigError: the third recording has none of the steps.
    """
    usual = max(TOLERANCES[a.precision], TOLERANCES[b.precision])
    steps_a = {step.number: step for step in a.steps}
    steps_of_rounding: dict[int, Step] = {}
    if rounding is not None:
        steps_of_rounding = {step.number: step for step in rounding.steps}
    if rounding is not None and not steps_of_rounding.keys() & set(numbers):
        rule = f"has no step in common with {a.folder}, so it has no effect"
        raise ConfigError(
            Problem("--rounding", str(rounding.folder), rule, "number the steps of all runs alike")
        )
    measured = {"gradients": 0.0, "weights": 0.0}
    tolerances = {}
    # The tolerance grows until it is ``MOST``.
    most_doublings = math.log(MOST / usual, GROWTH_PER_STEP)
    for number in numbers:
        doublings = min(number - numbers[0], most_doublings)
        grown = usual * GROWTH_PER_STEP**doublings
        allowed = {"gradients": grown, "weights": OF_WEIGHTS * grown}
        if number in steps_of_rounding:
            # A measurement replaces the growth that is assumed above.
            of_a = steps_a[number]
            of_rounding = steps_of_rounding[number]
            for kind in measured:
                errors = errors_of(getattr(of_a, kind), getattr(of_rounding, kind))
                # Rounding errors of one step may cancel by chance, so the tolerance never shrinks.
                measured[kind] = max([measured[kind], *errors.values()])
                floor = TOLERANCES["float64"]
                tolerance = max(floor, ROUNDING * measured[kind])
                allowed[kind] = min(MOST, tolerance)
        tolerances[number] = allowed
    return tolerances


def _missing(a: Recording, b: Recording) -> list[str]:
    sentences = []
    for one, other in ((a, b), (b, a)):
        for name, shape in one.shapes.items():
            if name not in other.shapes:
                sentence = f"{one.folder} has a parameter {name}, but {other.folder} has none"
                # A tied weight has one name. After it is untied, it has two, with the same shape.
                for known, shape_of_known in one.shapes.items():
                    if shape_of_known == shape and known in other.shapes:
                        sentence += (
                            f": if it is tied to {known}, wrapping or sharding the model untied it"
                        )
                        break
                sentences.append(sentence)
            elif one is a and other.shapes[name] != shape:
                sentences.append(
                    f"{name} has shape {shape} in {a.folder}, but {other.shapes[name]} in {b.folder}"
                )
    return sentences


def _first_of_step(
    a: Recording,
    b: Recording,
    pairs: Sequence[tuple[Step, Step]],
    errors: Mapping[str, Mapping[str, float]],
    allowed: Mapping[str, float],
) -> Difference | None:
    """Return the first difference of the last of ``pairs``, or None."""
    step_a, step_b = pairs[-1]
    number = step_a.number

    # Inputs of the step come first: other data or another learning rate explain all later differences.
    data = _other_data(step_a, step_b)
    if data:
        return Difference(number, "samples", (), 1.0, 0.0, data)
    error = _difference(step_a.lr, step_b.lr, EXACT_NUMBER)
    if error is not None:
        cause = f"the learning rate is {step_a.lr:g} in {a.folder} and {step_b.lr:g} in {b.folder}"
        return Difference(number, "lr", (), error, EXACT_NUMBER, cause)

    # A step records its weights before the update, so they are earlier than its gradients.
    for kind in ("weights", "gradients"):
        names = tuple(name for name, error in errors[kind].items() if error > allowed[kind])
        cause = _differing_replicas(b, step_b, kind) or _differing_replicas(a, step_a, kind)
        if not names and not cause:
            continue
        if not cause:
            cause = _not_finite(a, b, pairs[-1], kind, names)
        if not cause and kind == "weights":
            cause = _cause_of_weights(pairs)
        elif not cause:
            cause = _cause_of_gradients(a, b, step_a, step_b, names)
        # Replicas may differ although the values that were compared agree.
        error = math.inf
        if names:
            error = errors[kind][names[0]]
        return Difference(number, kind, names, error, allowed[kind], cause)

    # The weights and gradients agree. A number that the program computes from them may still be wrong.
    tolerance = allowed["gradients"]
    error = _difference(mean_loss(step_a), mean_loss(step_b), tolerance)
    if error is not None:
        cause = "only the reported loss differs: in one run it is not the mean over all tokens"
        return Difference(number, "loss", (), error, tolerance, cause)
    error = _difference(step_a.grad_norm, step_b.grad_norm, tolerance)
    if error is not None:
        cause = "only the reported norm differs: one run may report it for one rank's part, or for clipped gradients"
        return Difference(number, "grad_norm", (), error, tolerance, cause)
    return None


def _difference(one: float | None, other: float | None, tolerance: float) -> float | None:
    """Return the relative difference of two recorded numbers if it is larger than ``tolerance``, else None."""
    if one is None or other is None:
        return None
    error = _relative(one, other)
    return error if error > tolerance else None


def mean_loss(step: Step) -> float | None:
    """Return the mean loss of all ranks, weighted by their tokens if these were recorded."""
    if step.losses is None:
        return None
    if step.num_tokens is None or sum(step.num_tokens) == 0:
        return statistics.fmean(step.losses)
    total = 0.0
    for loss, num_tokens in zip(step.losses, step.num_tokens, strict=True):
        total += loss * num_tokens
    return total / sum(step.num_tokens)


def _other_data(step_a: Step, step_b: Step) -> str:
    """Describe the difference if samples or numbers of tokens of the steps differ, or return ""."""
    samples_a, samples_b = step_a.samples, step_b.samples
    if samples_a is not None and samples_b is not None and samples_a != samples_b:
        # Counters, because a data rank that reads another rank's samples repeats samples without a new one.
        count_a = Counter(samples_a)
        count_b = Counter(samples_b)
        more = sorted((count_b - count_a).keys())
        fewer = sorted((count_a - count_b).keys())
        if more and set(more) <= set(samples_a):
            repeated = ", ".join(more[:MOST_SAMPLES])
            return f"other data: the second run has samples more than once ({repeated})"
        only = f"only the first has {_some(fewer)}, only the second {_some(more)}"
        return f"other data: {len(samples_a)} and {len(samples_b)} samples; {only}"
    if step_a.num_tokens is not None and step_b.num_tokens is not None:
        num_a = sum(step_a.num_tokens)
        num_b = sum(step_b.num_tokens)
        if num_a != num_b:
            return f"other data, or tokens counted in another way: {num_a} and {num_b} tokens"
    return ""


def _some(samples: Sequence[str]) -> str:
    return ", ".join(samples[:MOST_SAMPLES]) or "none"


def _differing_replicas(recording: Recording, step: Step, kind: str) -> str:
    """Describe ranks that hold different numbers for the same part of a tensor, or return ""."""
    vectors = step.gradients if kind == "gradients" else step.weights
    names = [name for name, vector in vectors.items() if vector.replicas_differ]
    if not names:
        return ""
    consequence = "their weights or updates differ"
    if kind == "gradients":
        consequence = "gradients are not reduced over them"
    tensors = _first_of(names)
    return f"missing reduction: ranks of {recording.folder} hold different {kind} of {tensors}; {consequence}"


def _first_of(names: Sequence[str]) -> str:
    """Return ``NAME and 3 more``."""
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


def _not_finite(
    a: Recording, b: Recording, steps: tuple[Step, Step], kind: str, names: Sequence[str]
) -> str:
    """Describe the first tensor with NaN or an infinite number, or return ""."""
    for name in names:
        places = []
        for recording, step in zip((a, b), steps, strict=True):
            vectors = step.gradients if kind == "gradients" else step.weights
            if not math.isfinite(vectors[name].norm):
                places.append(str(recording.folder))
        if places:
            return f"{name} has NaN or infinite {kind} in {' and '.join(places)}, which cannot be compared"
    return ""


def _cause_of_weights(pairs: Sequence[tuple[Step, Step]]) -> str:
    if len(pairs) == 1:
        return "the initial weights differ: set the same seed, and draw weights independently of the rank"
    (before_a, before_b), (after_a, after_b) = pairs[-2:]
    if after_a.number != before_a.number + 1:
        last = after_a.number - 1
        return f"training differs in step {before_a.number} to {last}: record every step to find where it begins"
    # The gradients of the step before agree, so compare the updates. A common factor is a clue to the cause.
    factors = []
    for name, vector in after_a.weights.items():
        if name not in after_b.weights or name not in before_b.weights:
            continue
        of_a = _minus(vector, before_a.weights[name])
        of_b = _minus(after_b.weights[name], before_b.weights[name])
        if not any(of_a) and not any(of_b):
            continue
        factors.append(_factor(of_a, of_b))
    common = _common(factors)
    cause = f"the gradients of step {before_a.number} agree, so the optimizer's update differs"
    if common is not None:
        cause += f": it is {common:.4g} times as large"
    return cause


def _minus(one: Vector, other: Vector) -> tuple[float, ...]:
    return tuple(a - b for a, b in zip(one.projections, other.projections, strict=True))


def _cause_of_gradients(
    a: Recording, b: Recording, step_a: Step, step_b: Step, names: Sequence[str]
) -> str:
    """Return the likely cause of different gradients, or ""."""
    for recording, step in ((b, step_b), (a, step_a)):
        absent = [name for name in names if step.gradients[name].norm == 0]
        if absent:
            return (
                f"the gradient of {_first_of(absent)} is zero or None in {recording.folder}: "
                "frozen, detached or not used"
            )
    factors = []
    for name in names:
        of_a = step_a.gradients[name].projections
        of_b = step_b.gradients[name].projections
        factors.append(_factor(of_a, of_b))
    common = _common(factors)
    # Gradients too small to be compared, such as those of an adapter that starts at zero, are not evidence.
    smallest = SMALL * _total_norm(step_a.gradients)
    num_same = 0
    for name, vector in step_a.gradients.items():
        if vector.norm >= smallest and name not in names:
            num_same += 1
    if common is None:
        # Another weighting of the tokens changes all gradients, although some may stay within the tolerance.
        if num_same > len(names):
            return ""
        return _uneven_tokens(a, b, step_a, step_b)
    subject = "all gradients are"
    if num_same:
        subject = "these gradients, and no others, are"
    explained = _explained(common, a, b, step_b)
    # Two ranks would double all gradients. If only some are doubled, the number of ranks is not the cause.
    if num_same and _is_close(common, 2.0, EXACT_FACTOR):
        explained = ": they are counted twice, for example by a tied weight whose gradient is also reduced separately"
    return f"{subject} {common:.6g} times as large{explained}"


def _explained(factor: float, a: Recording, b: Recording, step_b: Step) -> str:
    """Explain a factor by the numbers of ranks or tokens."""
    if step_b.num_tokens is not None:
        total = float(sum(step_b.num_tokens))
        if total and _is_close(factor, total, EXACT_FACTOR):
            return f" = {total:.0f}, the number of tokens: not divided by it"
        if total and _is_close(factor, 1 / total, EXACT_FACTOR):
            return f" = 1 / {total:.0f}, the number of tokens: divided by it twice"
    # A reduction that averages where it must sum, or the reverse, is wrong by the ratio of the numbers of ranks.
    for ranks_a, ranks_b, what in (
        (a.num_ranks, b.num_ranks, "ranks"),
        (a.num_data_ranks, b.num_data_ranks, "ranks with other samples"),
    ):
        if ranks_a == ranks_b:
            continue
        if _is_close(factor, ranks_a / ranks_b, EXACT_FACTOR):
            return f" = {ranks_a} / {ranks_b}, by the numbers of {what}: averaged over ranks where they must be summed"
        if _is_close(factor, ranks_b / ranks_a, EXACT_FACTOR):
            ratio = f"{ranks_b}"
            if ranks_a > 1:
                ratio = f"{ranks_b} / {ranks_a}"
            return f" = {ratio}, by the numbers of {what}: summed over ranks where they must be averaged"
    return ""


def _uneven_tokens(a: Recording, b: Recording, step_a: Step, step_b: Step) -> str:
    for recording, step in ((b, step_b), (a, step_a)):
        if step.num_tokens is not None and len(set(step.num_tokens)) > 1:
            counts = ", ".join(map(str, step.num_tokens[:4]))
            if len(step.num_tokens) > 4:
                counts += ", ..."
            return (
                f"mean of means: ranks of {recording.folder} have {counts} tokens, and each may divide its loss by its "
                "own number of tokens; divide by the number of tokens of all ranks"
            )
    return ""


def _factor(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return c if ``other`` is c times ``one`` within ``EXACT_FACTOR``, else None."""
    squared = 0.0
    product = 0.0
    for x, y in zip(one, other, strict=True):
        squared += x * x
        product += x * y
    if squared == 0 or math.isnan(squared):
        return None
    # Compute the factor of least squares. The remaining difference must be small.
    factor = product / squared
    rest = 0.0
    for x, y in zip(one, other, strict=True):
        rest += (y - factor * x) ** 2
    allowed = EXACT_FACTOR * abs(factor) * math.sqrt(squared / NUM_PROJECTIONS)
    if math.sqrt(rest / NUM_PROJECTIONS) <= allowed:
        return factor
    return None


def _common(factors: Sequence[float | None]) -> float | None:
    """Return the factor by which all tensors differ, or None if they differ by several factors or by 1."""
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(factors):
        return None
    middle = statistics.median(known)
    for factor in known:
        if not _is_close(factor, middle, EXACT_FACTOR):
            return None
    # A factor of 1 explains no difference.
    if _is_close(middle, 1.0, EXACT_FACTOR):
        return None
    return middle


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-300)


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return _relative(one, other) <= tolerance
