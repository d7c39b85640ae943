"""The global gradient norm over every mesh axis, and clipping by it.

PyTorch's own clip fails on parameters of different meshes and, under HSDP, has been off by the number of replicas.
Here each gradient's squares are summed over exactly the axes on which it is split, so nothing is counted twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardtrain.distributed.mesh import Mesh
from shardtrain.ops.accelerator import Reading
from shardtrain.ops.dtensor import local_tensor, split_axes, squared_norm


def gradient_norm(parameters: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """L2 norm of all gradients of the whole model, a float64 scalar, equal on all ranks (a collective).

    It decides how far clipped weights move, so it must not depend on how tensors are split: see ``squared_norm``.
    """
    squares = SquaredNorm(mesh)
    squares.add(*(parameter.grad for parameter in parameters if parameter.grad is not None))
    return squares.norm()


class SquaredNorm:
    """Sums of squares of gradients that are given one after the other, or all at once."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._by_axes: dict[tuple[str, ...], Tensor] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}

    def add(self, *gradients: Tensor) -> None:
        """Add the squares of this rank's part of gradients."""
        by_axes: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            axes: tuple[str, ...] = ()
            if isinstance(gradient, DTensor):
                # axes on which ranks hold the same part are left out: their squares would count once for each rank
                mesh = gradient.device_mesh
                split = split_axes(gradient)
                names = mesh.mesh_dim_names or ()
                axes = tuple(names[axis] for axis in split)
                for axis in split:
                    self._groups[names[axis]] = mesh.get_group(axis)
            by_axes[axes].append(local_tensor(gradient))
        for axes, tensors in by_axes.items():
            squares = squared_norm(tensors).to(self._mesh.device)
            self._by_axes[axes] = self._by_axes[axes] + squares if axes in self._by_axes else squares

    def norm(self) -> Tensor:
        """The root of the sum over all ranks (a collective)."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        # by name and in one order, or ranks would meet in different sums: group objects are not the same from call to
        # call
        for axes in sorted(self._by_axes):
            squares = self._by_axes[axes]
            for axis in axes:
                dist.all_reduce(squares, group=self._groups[axis])
            total += squares
        return self._mesh.sum(total, over=("pp",)).sqrt()


NORMS_AGREE = 1e-5
"""Relative difference from which two ranks' norms are not the same number. Replicas hold equal bits; groups of ranks
that add them in another order may differ by 1e-7."""


@dataclass(frozen=True)
class Agreed:
    """A step's global loss and gradient norm as all ranks see them alike."""

    loss: float
    norm: float
    """Infinite where the norm of any rank is not finite."""
    same_norm: bool
    """Whether all ranks found the same norm; ``norm`` is their mean. Beyond some 10,000 ranks it may be False for
    rounding alone: ``replica_check.refuse_norms`` looks again."""
    applied: bool = False
    """Whether the update is done already: the device was given it together with the question whether to do it."""


class OnDevice(NamedTuple):
    """What a device decides of the update that it was given."""

    applies: Tensor
    """Whether loss and norm are finite and the norm is the same on all ranks, a boolean scalar."""
    factor: Tensor
    """What gradients are multiplied by, so that their norm is at most the largest that is allowed."""


class Agreement:
    """This rank's part of the loss summed over all ranks, and whether all have the same norm (one collective).

    Ranks must not decide differently: a bit that flipped on one replica after the reduction makes one norm another, or
    not finite, and a rank that skips an update while others apply it waits for them for ever.
    """

    def __init__(self, loss: Tensor, norm: Tensor, mesh: Mesh) -> None:
        is_finite = torch.isfinite(norm)
        own_norm = torch.where(is_finite, norm, 0.0).double()
        # tensor-parallel peers hold the same loss
        own_loss = loss.double() if mesh.rank("tp") == 0 else torch.zeros_like(loss, dtype=torch.float64)
        own = torch.stack([own_loss, (~is_finite).double(), own_norm, own_norm.square()])
        self._sums_4 = mesh.sum_of_all(own)
        self._num_ranks = mesh.device_mesh.size()

    def on_device(self, max_norm: float) -> OnDevice:
        """What the host will decide, decided on the device, for an update that is queued before the host knows."""
        total_loss, not_finite, norms, squares = self._sums_4.unbind()
        mean = norms / self._num_ranks
        variance = (squares / self._num_ranks - mean * mean).clamp_min(0.0)
        same = (variance * self._num_ranks).sqrt() <= NORMS_AGREE * mean
        applies = torch.isfinite(total_loss) & torch.isfinite(mean) & (not_finite == 0) & same
        return OnDevice(applies, (max_norm / (mean + 1e-6)).clamp_max(1.0))

    def read(self, decided: OnDevice | None = None) -> Agreed:
        """What was agreed, on the host: the one time in a step that it waits for an accelerator.

        With ``decided``, whether the update was applied is what the device says, and is not computed again.
        """
        numbers = self._sums_4
        if decided is not None:
            # what the device has decided comes with the same copy: a second one would be a second wait
            numbers = torch.cat([numbers, decided.applies.double().unsqueeze(0)])
        total_loss, not_finite, norms, squares, *decision = Reading(numbers, "loss and gradient norm").get()
        applied = decision == [1.0]
        num_ranks = self._num_ranks
        if not_finite:
            return Agreed(total_loss, math.inf, not_finite == num_ranks, applied)
        mean = norms / num_ranks
        # a sum carries both questions: of equal numbers the variance is zero, one of n that is off by d has d^2 / n
        variance = max(0.0, squares / num_ranks - mean * mean)
        return Agreed(total_loss, mean, math.sqrt(variance * num_ranks) <= NORMS_AGREE * mean, applied)


def scale_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply every gradient by a number, in place; one on the device is multiplied by whatever it is."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    if isinstance(factor, Tensor):
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    elif factor != 1.0:
        torch._foreach_mul_(gradients, factor)
