"""The global gradient norm over every mesh axis, and clipping by it.

PyTorch's own clip fails on parameters of different meshes and, with HSDP, has been wrong by the number of
replicas. Here each gradient's squares are summed over exactly the axes on which it is split, so nothing
is counted twice.
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
from shardtrain.ops import host_collectives
from shardtrain.ops.accelerator import Reading
from shardtrain.ops.dtensor import local_tensor, split_axes, squared_norm


def gradient_norm(parameters: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """Return the L2 norm of all gradients of the model, a float64 scalar, equal on all ranks (a collective).

    Clipping scales by it, so it must not depend on how tensors are split, see ``squared_norm``.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = SquaredNorm(mesh)
    squares.add(*gradients)
    return squares.norm()


class SquaredNorm:
    """A running sum of squares of gradients, added in one or several calls of ``add``."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._by_axes: dict[tuple[str, ...], Tensor] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}

    def add(self, *gradients: Tensor) -> None:
        """Add the squares of this rank's parts of gradients. Not a collective."""
        by_axes: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            axes: tuple[str, ...] = ()
            if isinstance(gradient, DTensor):
                # Only axes on which the gradient is split. A sum over a replicated axis would count replicas.
                mesh = gradient.device_mesh
                split = split_axes(gradient)
                names = mesh.mesh_dim_names or ()
                axes = tuple(names[axis] for axis in split)
                for axis in split:
                    self._groups[names[axis]] = mesh.get_group(axis)
            by_axes[axes].append(local_tensor(gradient))
        for axes, tensors in by_axes.items():
            squares = squared_norm(tensors).to(self._mesh.device)
            if axes in self._by_axes:
                squares = self._by_axes[axes] + squares
            self._by_axes[axes] = squares

    def norm(self) -> Tensor:
        """The square root of the sum over all ranks (a collective)."""
        total = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        # sorted by the names of axes, so that all ranks enter the all-reduces in one order
        for axes in sorted(self._by_axes):
            squares = self._by_axes[axes]
            for axis in axes:
                host_collectives.all_reduce(squares, group=self._groups[axis])
            total += squares
        return self._mesh.sum(total, over=("pp",)).sqrt()


NORMS_AGREE = 1e-5
"""Relative tolerance within which two ranks' norms count as equal.

Replicas have equal bits. Ranks that add the same squares in another order may differ by 1e-7.
"""


@dataclass(frozen=True)
class Agreed:
    """A step's global loss and gradient norm, the same on all ranks."""

    loss: float
    norm: float
    """Infinite if the norm of any rank is not finite."""
    same_norm: bool
    """True if all ranks computed the same norm. ``norm`` is their mean.

    With more than about 10,000 ranks, rounding can make it False. ``replica_check.refuse_norms`` checks
    again.
    """
    applied: bool = False
    """True if the device has already decided to apply the update."""


class OnDevice(NamedTuple):
    """The device's decision on an update that is queued before the host knows loss and norm."""

    applies: Tensor
    """Boolean scalar: True if loss and norm are finite, and the norm is the same on all ranks."""
    factor: Tensor
    """Scalar by which the gradients are multiplied, so that their norm is at most ``training.max_norm``."""


class Agreement:
    """Sum the loss over all ranks, and check that all ranks computed the same norm.

    Construction is a collective.

    All ranks must make the same decision, because a rank that skips an update while others apply it would
    deadlock. A bit flip on one replica after the gradient reduction changes only its own norm.
    """

    def __init__(self, loss: Tensor, norm: Tensor, mesh: Mesh) -> None:
        is_finite = torch.isfinite(norm)
        local_norm = torch.where(is_finite, norm, 0.0).double()
        # Tensor-parallel peers have the same loss, which must count only once.
        counts_loss = mesh.rank("tp") == 0
        local_loss = loss.double() if counts_loss else torch.zeros_like(loss, dtype=torch.float64)
        not_finite = (~is_finite).double()
        summands = torch.stack([local_loss, not_finite, local_norm, local_norm.square()])
        self._sums_4 = mesh.sum_of_all(summands)
        self._num_ranks = mesh.device_mesh.size()

    def on_device(self, max_norm: float) -> OnDevice:
        """Make the decision that ``read`` leads to on the host, but on the device."""
        total_loss, not_finite, norms, squares = self._sums_4.unbind()
        mean = norms / self._num_ranks
        variance = (squares / self._num_ranks - mean * mean).clamp_min(0.0)
        norms_agree = (variance * self._num_ranks).sqrt() <= NORMS_AGREE * mean
        are_all_finite = torch.isfinite(total_loss) & torch.isfinite(mean) & (not_finite == 0)
        factor = (max_norm / (mean + 1e-6)).clamp_max(1.0)
        return OnDevice(are_all_finite & norms_agree, factor)

    def read(self, decision: OnDevice | None = None) -> Agreed:
        """Return loss and norm. Only here does the host wait for an accelerator in a step.

        With ``decision``, ``applied`` is the device's decision. The host does not compute it again.
        """
        numbers = self._sums_4
        if decision is not None:
            # in the same copy to the host, because a second copy would be a second synchronization
            numbers = torch.cat([numbers, decision.applies.double().unsqueeze(0)])
        total_loss, not_finite, norms, squares, *applied_flag = Reading(
            numbers, "loss and gradient norm"
        ).get()
        applied = applied_flag == [1.0]
        num_ranks = self._num_ranks
        if not_finite:
            return Agreed(total_loss, math.inf, not_finite == num_ranks, applied)
        mean = norms / num_ranks
        # The variance of the norms is zero for equal norms, and about d^2 / n if one of n is off by d.
        variance = max(0.0, squares / num_ranks - mean * mean)
        is_same = math.sqrt(variance * num_ranks) <= NORMS_AGREE * mean
        return Agreed(total_loss, mean, is_same, applied)


def scale_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply every gradient by a number, in place.

    A factor on the device is not read by the host, so it is applied even if it is 1.
    """
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    if isinstance(factor, Tensor):
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    elif factor != 1.0:
        torch._foreach_mul_(gradients, factor)
