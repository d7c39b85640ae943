"""Check the numbers that each rank recorded: updates, gradient norm, and dtypes of gradients and weights.

The update and the norm are computed again in float64 from the rank's own gradients. No reference run is
needed, so these checks detect errors far below the rounding of a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardtrain.config import Config
from shardtrain.optim.lr_scheduler import learning_rate
from shardtrain.tools.verify.compare import Expected, assemble, same_bits
from shardtrain.tools.verify.rounding_noise import ROUNDOFF, unit_roundoff
from shardtrain.tools.verify.verify_rank import RankRecord, is_clipped

FEW_NUMEL = 64
"""Sums of a few bfloat16 fit into the longer float16, so smaller tensors are only compared with bfloat16."""
LEAST_NUMEL = 16
"""Smaller tensors may have a value of a shorter dtype in every element by chance."""
NORM_MARGIN = 1e-5
"""Allowed relative error of the gradient norm, for the recorded gradients."""
SCALE_MARGIN = 0.05
"""Relative tolerance to recognize a factor as the loss scale of float16."""
ROUNDINGS = 2.0
"""Roundings of a weight per update: PyTorch's AdamW rounds after weight decay and at the end, and
stochastic rounding takes either neighbor.
"""
SIGMAS = 6.0
"""Allowed bias of stochastic rounding, in standard deviations of the sum of rounding errors."""
BITS_OF_BFLOAT16 = 8
"""Binary digits of a bfloat16, with the leading one."""
MOST_CANCELLED = 4.0
"""Largest quotient of a weight before its update, or of the update, and the weight after it."""
FLOAT32_BIAS = 2.0**-13
"""Allowed bias of an element in units in the last place of bfloat16, because updates are computed in float32."""


@dataclass(frozen=True)
class WrongNumber:
    """A recorded number that rounding does not explain: its step, a description, and the likely cause."""

    step: int
    first: str
    cause: str


def wrong_numbers(
    expected: Expected, records: Sequence[RankRecord], config: Config, steps: int
) -> Iterator[WrongNumber]:
    """Yield the faults in the records of a mesh, in the order of the steps."""
    # Each rank updates its own shards, so each has a simulation.
    simulated = {record.rank: _AdamW(config, steps) for record in records}
    for step in range(steps):
        # Clipping multiplies gradients, so they are no longer numbers of a shorter dtype.
        if not is_clipped(step, steps):
            yield from _short_gradients(records, config, step)
            yield from _wrong_norm(expected, records, config, step)
        for record in records:
            yield from simulated[record.rank].check(record, step)
        yield from _short_weights(records, config, step)
        yield from _copies_that_differ(records, step)


def _short_dtype(values: Tensor) -> str:
    """Return the shorter dtype that holds every element of a float32 tensor exactly, or ""."""
    if values.dtype != torch.float32 or values.numel() < LEAST_NUMEL:
        return ""
    # Zeros fit into every dtype, for example the gradient of an expert without tokens.
    if not values.count_nonzero():
        return ""
    dtypes = [torch.bfloat16, torch.float16]
    if values.numel() < FEW_NUMEL:
        dtypes.remove(torch.float16)
    for dtype in dtypes:
        if torch.equal(values.to(dtype).float(), values):
            return str(dtype).removeprefix("torch.")
    return ""


def _short_gradients(
    records: Sequence[RankRecord], config: Config, step: int
) -> Iterator[WrongNumber]:
    """Yield a gradient whose numbers all fit into a shorter dtype than the configured one."""
    training = config.training
    if training.mixed_precision_reduce != "float32" or training.dtype != "float32":
        return
    prefix = f"gradient/{step}/"
    operation = "reduced over ranks" if len(records) > 1 else "added over micro-batches"
    for record in records:
        for key, values in record.parts.items():
            if not key.startswith(prefix):
                continue
            dtype = _short_dtype(values)
            if dtype:
                first = f"step {step + 1}: gradient {key.removeprefix(prefix)}"
                cause = f"each number of the gradient is a {dtype}: {operation} in {dtype} instead of float32"
                yield WrongNumber(step, first, cause)
                return


def _short_weights(
    records: Sequence[RankRecord], config: Config, step: int
) -> Iterator[WrongNumber]:
    """Yield a master weight that lost the digits of float32."""
    if config.training.dtype != "float32":
        return
    prefix = f"weights/{step}/"
    for record in records:
        for key, values in record.parts.items():
            if not key.startswith(prefix):
                continue
            name = key.removeprefix(prefix)
            # Only an update can lose digits. A frozen weight may have been stored in a shorter dtype.
            is_trained = f"gradient/{step}/{name}" in record.parts
            if not is_trained:
                continue
            dtype = _short_dtype(values)
            if dtype:
                cause = f"each number of the weight is a {dtype}: the float32 weight is rounded after its update"
                yield WrongNumber(step, _after_update(name, step), cause)
                return


def _wrong_norm(
    expected: Expected, records: Sequence[RankRecord], config: Config, step: int
) -> Iterator[WrongNumber]:
    """Yield a gradient norm that is not the norm of the gradients."""
    total = 0.0
    for name in expected.names:
        key = f"gradient/{step}/{name}"
        if key not in expected.record.parts:
            continue
        full = assemble(records, key, expected.record.parts[key].shape)
        # Without a part of a gradient, its norm is unknown.
        if full is None:
            return
        squares = full.double().square()
        total += float(squares.sum())
    exact = math.sqrt(total)
    for record in records:
        norm = record.norms[step]
        error = abs(norm - exact) / max(exact, 1e-30)
        # The negation also catches NaN, which compares as False with every number.
        if not error <= NORM_MARGIN:
            first = f"step {step + 1}: the gradient norm of rank {record.rank} is {norm:.6g} instead of {exact:.6g}"
            yield WrongNumber(step, first, _cause_of_norm(config, step, norm, exact))
            return


def _cause_of_norm(config: Config, step: int, norm: float, exact: float) -> str:
    cause = "it is not the norm of the gradients of this mesh"
    if abs(norm - exact) < ROUNDOFF["bfloat16"] * exact:
        return f"{cause}: it is computed or added in a shorter dtype than float32"
    if config.training.mixed_precision_param != "float16":
        return cause
    # With float16, the loss is scaled before the backward pass, and the gradients are divided by the scale
    # after it.
    num_doublings = step // config.training.loss_scale_growth_interval
    scale = config.training.initial_loss_scale * 2.0**num_doublings
    ratio = exact / max(norm, 1e-30)
    if abs(ratio / scale - 1) < SCALE_MARGIN:
        return f"gradients are scaled by {scale:g}, the loss scale of float16: they are not divided by it"
    if abs(ratio * scale - 1) < SCALE_MARGIN:
        return f"gradients are scaled by 1/{scale:g}, the loss scale of float16: they are divided by it twice"
    for factor, other in ((0.5, "next"), (2.0, "previous")):
        if abs(ratio / factor - 1) < SCALE_MARGIN:
            return (
                f"the update has {factor:g} times the gradients of the norm: they are divided by the loss scale "
                f"of float16 of the {other} step"
            )
    return cause


def _copies_that_differ(records: Sequence[RankRecord], step: int) -> Iterator[WrongNumber]:
    """Yield a weight whose copies on several ranks are not bitwise equal after the update."""
    prefix = f"weights/{step}/"
    seen: dict[tuple[str, str], tuple[int, Tensor]] = {}
    for record in records:
        for key, values in record.parts.items():
            if not key.startswith(prefix):
                continue
            # Ranks with the same slice of a weight hold copies of it.
            place = (key, str(record.slices[key]))
            rank, copy = seen.setdefault(place, (record.rank, values))
            if not same_bits(copy, values):
                cause = f"ranks {rank} and {record.rank} hold different copies: each rounds or updates its own"
                yield WrongNumber(step, _after_update(key.removeprefix(prefix), step), cause)
                return


def _after_update(name: str, step: int) -> str:
    return f"step {step + 1}: weight {name} after the update"


@dataclass(frozen=True)
class _Update:
    """An exact update of one weight.

    Attributes:
        old: Weight before the update.
        exact: Weight after it.
        change: Part of the update that depends on the optimizer's states.
        size: The value of ``change`` if the gradients of several steps did not cancel.
    """

    old: Tensor
    exact: Tensor
    change: Tensor
    size: Tensor


@dataclass
class _Moments:
    """AdamW's states of one weight, and the mean of absolute gradients."""

    mean: Tensor
    mean_square: Tensor
    mean_size: Tensor


@dataclass
class _RoundingBias:
    """Sums over all weights of the errors of stochastic rounding, in units in the last place.

    An exact value at fraction f between two bfloat16 numbers is rounded up with probability f. So its error
    has mean 0 and variance f (1 - f), and a sum over n weights has an error of about sqrt(n / 6). A constant
    bias grows with n. The bias of a single weight is smaller than its rounding error.

    Attributes:
        outward: Sum of the errors, positive if away from zero.
        forward: Sum of the errors, positive if in the direction of the update.
        of_decay: The part of ``outward`` if weight decay were lost.
        variance: Variance of the sums.
        count: Number of weights.
    """

    outward: float = 0.0
    forward: float = 0.0
    of_decay: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, update: _Update, new: Tensor, decay: float, of_states: float) -> None:
        """Add the weights of a tensor after an update.

        Args:
            update: The exact update.
            new: Weights after the update.
            decay: Fraction that weight decay removes.
            of_states: Relative error of an update by the rounding of the optimizer's states.
        """
        # If a weight almost cancels, the rounding of its update is many units of the small result.
        largest = torch.maximum(update.old.abs(), update.size)
        is_kept = update.exact.abs() > largest / MOST_CANCELLED
        exact = update.exact[is_kept]
        old = update.old[is_kept]

        # The distance of neighboring bfloat16 numbers at each weight. Errors are measured in this unit.
        _, exponent = torch.frexp(exact)
        unit = torch.exp2((exponent - BITS_OF_BFLOAT16).double())
        size = exact.abs() / unit
        fraction = size - size.floor()
        error = (new.double()[is_kept] - exact) / unit

        # Two directions tell two faults apart: truncation moves weights toward zero, and lost updates move
        # them back to their old values.
        outward = error * exact.sign()
        forward = error * (exact - old).sign()
        of_decay = decay * old.abs() / unit
        state_error = of_states * update.size[is_kept] / unit
        variance = fraction * (1 - fraction) + state_error.square()
        self.outward += float(outward.sum())
        self.forward += float(forward.sum())
        self.of_decay += float(of_decay.sum())
        self.variance += float(variance.sum())
        self.count += exact.numel()

    def cause(self) -> str:
        """Return the cause of a bias, or "" if chance explains the sums."""
        allowed = SIGMAS * math.sqrt(self.variance) + FLOAT32_BIAS * self.count
        mean = self.outward / max(1, self.count)
        if abs(self.outward) > allowed:
            # Without weight decay, weights stay larger by exactly the part that it removes.
            if abs(self.outward - self.of_decay) < 0.2 * self.of_decay:
                return "weight decay is lost"
            if mean < 0:
                return (
                    f"weights are rounded toward zero by {-mean:.2g} units in the last place on average: "
                    "truncated before or instead of stochastic rounding"
                )
            return f"weights are rounded away from zero by {mean:.2g} units in the last place on average"
        if self.forward < -allowed:
            return (
                "small updates are lost: weights are rounded to nearest instead of stochastically"
            )
        if self.forward > allowed:
            return "updates are too large on average"
        return ""


@dataclass
class _AdamW:
    """AdamW in float64 on the gradients of one rank. Each update starts from the weights that the rank had."""

    config: Config
    steps: int
    moments: dict[str, _Moments] = field(default_factory=dict)

    def check(self, record: RankRecord, step: int) -> Iterator[WrongNumber]:
        """Yield the weights of a rank that AdamW would not have after this step."""
        wrong: list[WrongNumber] = []
        worst = 0.0
        bias = _RoundingBias()
        decay = self._rate(step) * self.config.optimizer.weight_decay
        prefix = f"gradient/{step}/"
        # Start from the recorded weights, so errors of earlier steps do not add up.
        before = "initial"
        if step > 0:
            before = f"weights/{step - 1}"
        for key, part in record.parts.items():
            if not key.startswith(prefix):
                continue
            name = key.removeprefix(prefix)
            new = record.parts[f"weights/{step}/{name}"]
            gradient = part.double()
            if new.shape != gradient.shape or not new.numel():
                continue
            old = record.parts[f"{before}/{name}"].double()
            update = self._update(name, old, gradient, step)
            excess = self._excess(update, new, step)
            worst = max(worst, excess)
            if not excess <= 1.0:
                cause = self._cause(update, new.double(), excess)
                wrong.append(WrongNumber(step, _after_update(name, step), cause))
            if self.config.optimizer.bf16_stochastic_round and new.dtype == torch.bfloat16:
                of_states = step * ROUNDOFF[self._state_dtype]
                bias.add(update, new, decay, of_states)

        # Rounding to nearest in bfloat16 loses small updates by design, but stochastic rounding must not.
        # If a weight is clearly wrong, its own message is more precise than the bias over all weights.
        cause = bias.cause()
        if cause and worst < 2.0:
            yield WrongNumber(step, f"step {step + 1}: all weights after the update", cause)
        yield from wrong

    @property
    def _state_dtype(self) -> str:
        """Name of the dtype of the optimizer's states."""
        state_dtype: str = self.config.optimizer.state_dtype
        if state_dtype == "default":
            return self.config.training.dtype
        return state_dtype

    def _rate(self, step: int) -> float:
        return learning_rate(self.config.optimizer, self.config.lr_scheduler, self.steps, step)

    def _update(self, name: str, old: Tensor, gradient: Tensor, step: int) -> _Update:
        options = self.config.optimizer
        if name not in self.moments:
            zeros = (torch.zeros_like(gradient) for _ in range(3))
            self.moments[name] = _Moments(*zeros)
        moments = self.moments[name]
        # lerp moves a state by a fraction of its distance to the new value: s + (1 - beta) * (g - s).
        moments.mean.lerp_(gradient, 1 - options.beta1)
        moments.mean_size.lerp_(gradient.abs(), 1 - options.beta1)
        moments.mean_square.lerp_(gradient.square(), 1 - options.beta2)

        # The states start at zero. Dividing by these corrections makes them means from the first step on.
        correction = 1 - options.beta1 ** (step + 1)
        correction_of_square = 1 - options.beta2 ** (step + 1)
        root = (moments.mean_square / correction_of_square).sqrt()
        lr = self._rate(step)
        factor = lr / correction / (root + options.eps)
        change = -factor * moments.mean
        size = factor * moments.mean_size

        decayed = old * (1 - lr * options.weight_decay)
        return _Update(old, decayed + change, change, size)

    def _excess(self, update: _Update, new: Tensor, step: int) -> float:
        """Return the largest error of an element, divided by what rounding of weight and states explains."""
        # Each step rounds the states again. Float32 operations lose a few digits.
        of_states = 4.0 * (step + 1) * max(ROUNDOFF[self._state_dtype], 2.0**-20)
        of_weight = ROUNDINGS * unit_roundoff(new.dtype)
        new = new.double()
        largest = torch.maximum(update.exact.abs(), new.abs())
        allowed = of_weight * largest + of_states * update.size
        # If the weight almost cancels, the float32 rounding of the old weight is large compared with the new
        # one.
        allowed += 4 * ROUNDOFF["float32"] * update.old.abs()
        error = (new - update.exact).abs()
        ratio = error / (1.01 * allowed + 1e-12)
        return float(ratio.max())

    def _cause(self, update: _Update, new: Tensor, excess: float) -> str:
        """Compare the update with those of likely mistakes."""
        without_change = update.exact - update.change
        decay = update.old - without_change
        rounded = update.exact.to(torch.bfloat16).double()
        mistakes: Mapping[str, Tensor] = {
            "not updated": update.old,
            "weight decay is left out": update.exact + decay,
            "only weight decay is applied": without_change,
            "the new weight is rounded to bfloat16 on the way": rounded,
        }
        # A mistake is the cause if it explains at least nine tenths of the error.
        error = float((new - update.exact).norm())
        for cause, candidate in mistakes.items():
            distance = float((new - candidate).norm())
            if distance < 0.1 * error:
                return cause
        if error < 2 * ROUNDOFF["bfloat16"] * float(update.change.norm()):
            return (
                "the update is computed or its states are kept in a shorter dtype than configured"
            )
        return f"the update differs from AdamW's for this gradient by {excess:.2g} times the rounding of the weight"
