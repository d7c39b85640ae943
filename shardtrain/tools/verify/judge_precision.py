"""Judge the records of a mesh in its own precision: tolerances from simulated rounding, the first
difference, and its likely cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtrain import models
from shardtrain.config import Config
from shardtrain.tools.verify import dropout, gathered_modules, update_rounding, verify_report
from shardtrain.tools.verify.compare import (
    USUAL,
    Errors,
    Expected,
    First,
    gradient_error,
    weight_error,
)
from shardtrain.tools.verify.diagnose import diagnose
from shardtrain.tools.verify.evidence import Evidence
from shardtrain.tools.verify.judge import describe
from shardtrain.tools.verify.verify_rank import RankRecord, read_record
from shardtrain.tools.verify.verify_report import BLIND

FACTOR = 4.0
"""Tolerance divided by the largest effect of simulated rounding."""
FEW_ELEMENTS = 4.0
"""Additional tolerance of small tensors. For n elements, multiply the tolerance by 1 + FEW_ELEMENTS / sqrt(n)."""
NOISY_RUNS = 3
"""Number of runs with simulated rounding."""
MAX_TOLERANCE = 0.5
"""A gradient with a larger tolerance cannot be compared: half of it, or its double, is as far from it as rounding."""
KINDS = tuple(verify_report.USUAL)


def judge_precision(
    _rank: int,
    _num: int,
    config: Config,
    degrees: dict[str, int],
    folder: str,
    ranks: str,
    num_ranks: int,
    steps: int,
) -> dict[str, Any]:
    """Compare the records of a mesh with the float32 reference. Runs in a separate process.

    Args:
        config: Configuration of the mesh.
        degrees: Ranks along each mesh axis.
        folder: Folder of the reference and of the noisy runs.
        ranks: Folder of the records of the mesh's ranks.
        num_ranks: Number of ranks of the mesh.
        steps: Number of recorded steps.

    Returns:
        Fields of ``verify_report.MeshResult``.
    """
    dropout.switch_off()
    expected, noisy = _references(config, Path(folder))
    records = []
    for rank in range(num_ranks):
        records.append(read_record(Path(ranks), rank))
    allowed = allowed_errors(expected, noisy, steps)
    errors = errors_of(expected, records, steps)
    fields = _summary(errors, allowed)

    # Weights are not compared with the reference here. The update is checked separately below, with this
    # run's own gradients and states, which needs a smaller tolerance.
    wrong = []
    for key, error in errors.items():
        if error > allowed[key] and not key.startswith("weights/"):
            wrong.append(key)
    first_step = steps
    if wrong:
        first_step = _step_of(wrong[0])
    # A wrong update explains later differences, and its message is more precise than one about a gradient.
    numbers = update_rounding.wrong_numbers(expected, records, config, steps)
    number = next(numbers, None)
    if number is not None and number.step <= first_step:
        return fields | {"first": number.first, "cause": number.cause}

    # Modules that gather a sequence are compared even if no gradient is wrong. Their rounding may be too
    # small to exceed the tolerance of a gradient.
    of_first_step = First("gradient", 0, [], 0.0)
    tolerances = _of_step(allowed, 0)
    evidence = Evidence(config, degrees, expected, records, of_first_step, noisy[0], tolerances)
    of_modules = gathered_modules.found_in(evidence)
    if of_modules is not None:
        return {**fields, **of_modules}
    if not wrong:
        return fields

    layout = models.find(config.model.name).LAYOUT
    first = _first_of(wrong, errors)
    place = describe(first, expected, records[0].losses, layout.layers)
    place += f"; rounding explains {allowed[wrong[0]]:.2g}"
    tolerances = _of_step(allowed, first_step)
    evidence = Evidence(config, degrees, expected, records, first, noisy[0], tolerances)
    return fields | {"first": place, "cause": diagnose(evidence)}


def tolerances_of(
    _rank: int, _num: int, config: Config, folder: str, steps: int
) -> dict[str, float]:
    """Return ``allowed_errors`` of the records in ``folder``. Runs in a separate process."""
    expected, noisy = _references(config, Path(folder))
    return allowed_errors(expected, noisy, steps)


def _references(config: Config, folder: Path) -> tuple[Expected, list[RankRecord]]:
    """Read the records of the float32 reference and of the noisy runs."""
    layout = models.find(config.model.name).LAYOUT
    expected = Expected(read_record(folder / "reference", 0), layout)
    noisy = []
    for number in range(NOISY_RUNS):
        noisy.append(read_record(folder / f"noisy-{number}", 0))
    return expected, noisy


def _kind_of(key: str) -> str:
    """Return "loss", "norm", "gradient" or "weights"."""
    return key.split("/")[0]


def _step_of(key: str) -> int:
    """Return the step of a number, from 0."""
    return int(key.split("/")[1])


def allowed_errors(expected: Expected, noisy: Sequence[RankRecord], steps: int) -> dict[str, float]:
    """Return ``FACTOR`` times the largest error of the noisy runs, by key (see ``precision.tolerances``)."""
    allowed: dict[str, float] = {}
    for record in noisy:
        for key, error in errors_of(expected, [record], steps).items():
            # The noisy run may agree by chance, so no tolerance is below that of a float32 mesh.
            least = getattr(USUAL, _kind_of(key))
            factor = FACTOR * _uncertainty(expected, key)
            allowed[key] = max(allowed.get(key, 0.0), least, factor * error)
        for step in range(steps):
            # The norm changes by at most as much as the gradients do. By chance it may change far less.
            key = f"norm/{step}"
            distance = _distance_of_gradients(expected, record, step)
            allowed[key] = max(allowed[key], FACTOR * distance)
    # A loss may also agree by chance, so all steps have the tolerance of the largest error.
    loss_keys = [f"loss/{step}" for step in range(steps)]
    largest = max(allowed[key] for key in loss_keys)
    allowed.update(dict.fromkeys(loss_keys, largest))
    return allowed


def _uncertainty(expected: Expected, key: str) -> float:
    """Return the factor for a tensor of few elements, whose noisy errors may all be small by chance."""
    part = expected.record.parts.get(key)
    if part is None:
        return 1.0
    numel = max(1, part.numel())
    return 1.0 + FEW_ELEMENTS / math.sqrt(numel)


def _distance_of_gradients(expected: Expected, record: RankRecord, step: int) -> float:
    """Return the norm of the differences of all gradients of one process, relative to the norm of all gradients."""
    squares = 0.0
    for name in expected.names:
        key = f"gradient/{step}/{name}"
        mine = record.parts.get(key)
        theirs = expected.record.parts.get(key)
        if mine is not None and theirs is not None:
            difference = (mine - theirs).double()
            squares += float(difference.square().sum())
    total = expected.total(step) * expected.clipping(step)
    return math.sqrt(squares) / max(total, 1e-30)


def errors_of(expected: Expected, records: Sequence[RankRecord], steps: int) -> dict[str, float]:
    """Return the error of each number, by key (see ``precision.tolerances``).

    Keys are in the order of time and, within a step, of the forward pass.
    """
    errors: dict[str, float] = {}
    for step in range(steps):
        for name in expected.names:
            errors[f"gradient/{step}/{name}"] = gradient_error(expected, records, step, name)
        loss = expected.record.losses[step]
        norm = expected.record.norms[step]
        # Every rank reports the same loss and norm. The worst rank decides.
        loss_errors = []
        norm_errors = []
        for record in records:
            loss_errors.append(abs(record.losses[step] - loss))
            norm_errors.append(abs(record.norms[step] - norm))
        errors[f"loss/{step}"] = _largest(loss_errors)
        errors[f"norm/{step}"] = _largest(norm_errors) / max(norm, 1e-30)
        for name in expected.names:
            errors[f"weights/{step}/{name}"] = weight_error(expected, records, step, name)
    return errors


def _largest(values: Sequence[float]) -> float:
    """Return the largest value, or infinity if one is NaN, because ``max`` may ignore it."""
    for value in values:
        if math.isnan(value):
            return math.inf
    return max(values)


def _first_of(wrong: Sequence[str], errors: Mapping[str, float]) -> First:
    """Return the first difference, with all tensors of its kind and step."""
    kind = _kind_of(wrong[0])
    step = _step_of(wrong[0])
    prefix = f"{kind}/{step}/"
    names = []
    for key in wrong:
        if key.startswith(prefix):
            names.append(key.removeprefix(prefix))
    loss_differs = f"loss/{step}" in wrong
    return First(kind, step, names, errors[wrong[0]], loss_differs)


def _of_step(allowed: Mapping[str, float], step: int) -> Errors:
    """Return the largest tolerance of each kind in a step."""
    largest = dict.fromkeys(KINDS, 0.0)
    for key, value in allowed.items():
        kind = _kind_of(key)
        if _step_of(key) == step:
            largest[kind] = max(largest[kind], value)
    return Errors(**largest)


def _summary(errors: Mapping[str, float], allowed: Mapping[str, float]) -> dict[str, Any]:
    """Return the largest error of each kind, and how much of it rounding explains."""
    largest = dict.fromkeys(KINDS, 0.0)
    explained = dict.fromkeys(KINDS, 0.0)
    for key, error in errors.items():
        kind = _kind_of(key)
        largest[kind] = max(largest[kind], error)
        explained[kind] = max(explained[kind], allowed[key])
    rounding = (
        f"rounding explains differences from float32 of up to {explained['loss']:.1e} of the loss and "
        f"{explained['gradient']:.1e} of a gradient; each tensor has its own tolerance"
    )
    # An agreement within such a large tolerance proves nothing, so report how many gradients have it.
    gradients = [key for key in allowed if key.startswith("gradient/")]
    too_wide = [key for key in gradients if allowed[key] > MAX_TOLERANCE]
    unproven = ""
    if too_wide:
        _, step, name = too_wide[0].split("/", 2)
        unproven = f"{BLIND} for {len(too_wide)} of {len(gradients)} gradients"
        unproven += f", the first of them {name} in step {int(step) + 1}"
    return {
        "initial": None,
        "first": "",
        "cause": "",
        **largest,
        "rounding": rounding,
        "unproven": unproven,
    }
