"""Name the module and the likely cause of the first difference of a variant.

The evidence is small: the rows and target tokens of each step, the size of the outputs of each module in
the first step, and the factor between two gradients. The mesh comparison has more (``verify.diagnose``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtrain.tools.verify.certificate.trial import (
    AVERAGE,
    METRIC,
    RATE,
    SCALE,
    TRAINING_MODE,
    NumberError,
    TrialFacts,
)

SAME_FACTOR = 1e-3
"""Relative distance of two factors that are equal except for rounding."""
SMALLEST_DECAY = 1e-5
"""Smallest difference of weight decay times learning rate that is not rounding."""
SAME_SIZE = 1e-5
"""Relative distance of two sums of squares that are equal except for rounding."""

_OTHER_ROWS = {
    "workers": "the order of rows depends on worker processes",
    "resume": "the run does not continue at its position in the data",
    "skipped": "the position in the data must advance in a step without an update, too",
    "task": "check which rows each rank reads",
    "accumulation": "check the rows of a micro-batch",
}
_FORWARD = {
    "compile": "its compiled code computes something else",
    "recompute": "recomputation changes its results",
    "offload": "offloading changes its results",
    "accumulation": "its output for a row depends on the other rows of the micro-batch",
    "resume": "it does not have the weights or buffers of the checkpoint",
}
_BACKWARD = {
    "recompute": "the recomputed forward pass differs from the first pass",
    "offload": "the tensors that come back from host memory differ from the tensors that were moved there",
    "compile": "its compiled backward pass computes something else",
    "resume": "it does not have the weights or buffers of the checkpoint",
    "accumulation": "check the divisor of the loss and the sum over micro-batches",
    "task": "check sums over ranks, and the divisor of the loss",
}


@dataclass(frozen=True)
class Differing:
    """A variant that differs from its reference.

    Attributes:
        dimension: Name of the dimension.
        label: Description of the variant, such as "dp_shard=2" or "8 micro-batches of 1".
        errors: Numbers beyond their tolerances, in the order of the reference.
        first: The first of them in time.
        facts: Facts of the variant.
        expected: Facts of its reference.
    """

    dimension: str
    label: str
    errors: Sequence[NumberError]
    first: NumberError
    facts: TrialFacts
    expected: TrialFacts

    def of_first_step(self, kind: str) -> list[NumberError]:
        """Return the numbers of a kind that differ in the step of the first difference."""
        step = self.first.step
        return [error for error in self.errors if error.kind == kind and error.step == step]


def cause_of(one: Differing) -> str:
    """Return the likely cause, with the module where one can be named."""
    # Begin with causes outside of the computation: initial weights, rows and token counts.
    if one.first.kind == "initial":
        return f"the initial weights of {_module(one.first)} depend on the mesh: check their seed and blocks"
    if one.first.kind == "validation" and one.first.tensor == TRAINING_MODE:
        where = "a module"
        if one.facts.mode_module:
            where = f"module {one.facts.mode_module}"
        return (
            f"{where} computes something else in evaluation than in training, although dropout is off: "
            "check what it does with its training mode"
        )
    if one.first.kind == "validation":
        return "the validation rows or the divisor depend on ranks or batch size: sum over all rows, and divide once"
    step = str(one.first.step)
    if one.first.kind == SCALE:
        return _of_scale(one, step)
    # A run that continues at another position has no rows of this step.
    if one.facts.rows and one.facts.rows.get(step) != one.expected.rows.get(step):
        fix = _OTHER_ROWS.get(one.dimension, "check the order of the data")
        return f"step {step} has other rows than on one process: {fix}"
    if one.first.kind == RATE:
        return _of_rate(one, step)
    mine = one.facts.targets.get(step)
    theirs = one.expected.targets.get(step)
    if mine != theirs:
        return (
            f"the loss of step {step} is divided by {mine} instead of {theirs} target tokens: "
            "each rank or micro-batch uses its own count, or some are counted twice"
        )
    # The two runs of this dimension have the same rows and differ only in which documents share a sequence.
    if one.dimension == "packing":
        return (
            f"rows are laid out correctly, so documents affect each other: check module {one.facts.core}, "
            "the document mask, and other modules that mix tokens"
        )
    # A common factor is the most specific evidence, and a module of the forward pass the next.
    gradients = one.of_first_step("gradient")
    if gradients:
        return _scaled(one, gradients) or _forward(one) or _backward(one, gradients)
    return _of_numbers(one)


def _of_scale(one: Differing, step: str) -> str:
    scales = [f"{scale:g}" for scale in one.facts.scales.get(step, ())]
    if len(scales) > 1:
        return (
            f"ranks have the loss scales {', '.join(scales)} in step {step}: "
            "each rank decides by its own gradients, instead of by those of all ranks"
        )
    return (
        f"the loss scale of step {step} is {', '.join(scales)}: an overflow halves it, "
        "and a checkpoint contains it"
    )


def _of_rate(one: Differing, step: str) -> str:
    mine = one.facts.rates.get(step)
    theirs = one.expected.rates.get(step)
    cause = f"the learning rate of step {step} is {mine:.4g} instead of {theirs:.4g}"
    if one.dimension == "skipped":
        return f"{cause}: the schedule counts a step without an update"
    return f"{cause}: check the number of updates that the schedule counts"


def _module(error: NumberError) -> str:
    """Name the module that owns the tensor of an error."""
    path, _, _ = error.tensor.rpartition(".")
    if not path:
        return f"the tensor {error.tensor}"
    return f"module {path}"


def _scaled(one: Differing, gradients: Sequence[NumberError]) -> str:
    """Return the cause if all gradients that differ are multiples of the reference's gradients."""
    factors = [error.factor for error in gradients]
    first = factors[0]
    if first is None:
        return ""
    tolerance = SAME_FACTOR * max(abs(first), SAME_FACTOR)
    for factor in factors:
        if factor is None or abs(factor - first) > tolerance:
            return ""
    which = "all gradients"
    if len(gradients) < one.facts.num_gradients:
        tensor = gradients[0].tensor
        which = f"{len(gradients)} gradients, first that of {tensor} in {_module(gradients[0])},"
    if abs(first) < SAME_FACTOR:
        return f"{which} are zero: they are not computed, or lost"
    text = f"{which} are scaled by {first:.4g}"
    # A missing or additional reduction scales by a number of ranks or micro-batches.
    for size, name in _sizes(one.label):
        if abs(first * size - 1) < SAME_FACTOR:
            return f"{text}, 1/{size} for {name}: averaged where they must be summed, or a share is missing"
        if abs(first / size - 1) < SAME_FACTOR:
            return f"{text}, {name}: counted {size} times"
    return f"{text}: check the divisor of the loss"


def _sizes(label: str) -> list[tuple[int, str]]:
    """Return the numbers above 1 of ranks or micro-batches in a label, each with a name."""
    sizes = []
    for axis, size in re.findall(r"(\w+)=(\d+)", label):
        sizes.append((int(size), f"the size of axis {axis}"))
    for number in re.findall(r"(\d+) micro-batches", label):
        sizes.append((int(number), f"the {number} micro-batches"))
    # A factor of 1 explains nothing.
    return [(size, name) for size, name in sizes if size > 1]


def _forward(one: Differing) -> str:
    """Return the first module whose outputs differ in the first forward pass, with the cause, or ""."""
    # Outputs are recorded only in the first step. Later steps begin with weights that may already differ.
    if one.first.step != 1 or not one.facts.outputs:
        return ""
    path = first_difference_of(one.facts.outputs, one.expected.outputs)
    if path is None:
        return ""
    cause = f"the forward pass first differs in the output of {_forward_of(path)}"
    hint = _FORWARD.get(one.dimension, "check its forward on this mesh")
    return f"{cause}: {hint}"


def first_difference_of(outputs: Mapping[str, float], expected: Mapping[str, float]) -> str | None:
    """Return the path of the first module whose sum of squares differs, or None. "" is the model itself."""
    for path, size in expected.items():
        mine = outputs.get(path)
        if mine is not None and abs(mine - size) > SAME_SIZE * max(abs(size), 1e-30):
            return path
    return None


def _forward_of(path: str) -> str:
    return f"module {path}" if path else "the model's own forward"


def _backward(one: Differing, gradients: Sequence[NumberError]) -> str:
    """Return the module with the first wrong gradient in the order of the backward pass, with the cause."""
    # Gradients are in the order of the forward pass, so the last one is the first of the backward pass.
    module = _module(gradients[-1])
    hint = _BACKWARD.get(one.dimension, "check its backward pass")
    if one.first.step == 1 and one.facts.outputs and one.expected.outputs:
        return f"the forward pass agrees, and the backward pass first differs in {module}: {hint}"
    return f"the gradient first differs in {module}, counted from the loss: {hint}"


def _of_numbers(one: Differing) -> str:
    """Return the cause of a loss, norm or weight that differs although all gradients agree."""
    if one.first.kind == "loss":
        return "the gradients agree, the reported loss does not: check its sum over ranks and micro-batches"
    if one.first.kind == "norm":
        return "the gradients agree, their norm does not: check its sum over ranks and its tensors"
    if one.first.kind == METRIC:
        return (
            f"the gradients agree, the metric {one.first.tensor} does not: "
            "check its sum over ranks and micro-batches, and its divisor"
        )
    module = _module(one.first)
    if one.first.kind == AVERAGE:
        cause = f"the weights agree, the average of {module} does not"
        if one.dimension == "skipped":
            return f"{cause}: it is updated in a step without an update"
        if one.dimension == "resume":
            return f"{cause}: the averages of the checkpoint are not loaded, or start again"
        return (
            f"{cause}: check the decay and the shards of training.ema_decay or evaluation_weights"
        )
    if one.dimension == "resume":
        return (
            f"the gradients agree, the update of {module} does not: "
            "the optimizer states, the learning rate or the weights differ from the checkpoint's"
        )
    if one.dimension == "skipped":
        return (
            f"the gradients agree, the update of {module} does not: "
            "the optimizer states change in a step without an update"
        )
    if one.first.tensor in one.facts.buffers:
        return (
            f"the gradients agree, the buffer {one.first.tensor} does not: check that its update is made once a "
            "step, from sums over all micro-batches and ranks"
        )
    decay = one.first.factor
    if decay is not None and abs(decay) > SMALLEST_DECAY:
        return (
            f"the gradients agree, and the update of {module} differs by {decay:.2g} times the weight: "
            "check which weights have weight decay (optimizer.no_weight_decay), and how much"
        )
    return f"the gradients agree, the update of {module} does not: check clipping, learning rate and optimizer states"
